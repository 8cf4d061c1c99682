-- vote: grants free keys on one of several independent servers. A grant is incomplete: its fence
-- ends in `?`, and it lasts as long as the call is valid. raise.lua completes it when a majority of
-- the servers has granted the key. A repeated call finds the grants of the first one (I8).
--
-- KEYS   n locks; fence
-- ARGV   1 time at which the call expires, as of acquire; 2 lease of an incomplete grant, ms; for
--        each lock: acquisition id
-- reply  {now, 'expired'}
--        {now, reply ..}, for each lock:
--          {'granted', fence}
--          {'busy', ms left (-1: no TTL), 1 if the grant of the holder is incomplete, else 0}
--          {'error', text}
--        May end in a mark of the fence: see fence.lua

local fence_key = KEYS[#KEYS]
--@include fence.lua
local now = clock()
if #now > #ARGV[1] or #now == #ARGV[1] and now > ARGV[1] then return {now, 'expired'} end

-- All keys get one fence: it is larger than each one before it of any key.
local granted

local function vote(i)
  local lock, id = KEYS[i], ARGV[2 + i]
  local fence = redis.call('HGET', lock, id)
  if fence then
    -- A delayed copy never shortens a lease: GT.
    redis.call('PEXPIRE', lock, ARGV[2], 'GT')
    return {'granted', fence}
  end
  local left = redis.call('PTTL', lock)
  if left ~= -2 then
    local value = redis.call('HSCAN', lock, 0, 'COUNT', 16)[2][2]
    return {'busy', left, value and string.sub(value, -1) == '?' and 1 or 0}
  end
  granted = granted or next_fence() .. '?'
  redis.call('HSET', lock, id, granted)
  redis.call('PEXPIRE', lock, ARGV[2])
  return {'granted', granted}
end

--@include each.lua
local reply = for_each(#KEYS - 1, vote, {now})
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
