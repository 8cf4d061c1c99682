-- force: revokes the key from its holder and notifies that one. It stays taken by nobody for a while, so that its holder can stop.
-- A key that only a minimum hold or a lock-delay blocks is freed, but not before the lock-delay of an earlier call is over.
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 ms to keep it taken; 2 offer, ms
-- reply  {'free'}     {'revoked', owner id}     {'unblocked', ms left (-1: it had no end)}
--        each may end in {'healed'}: see fence.lua

--@include fence.lua
--@include give_on.lua
local left = redis.call('PTTL', KEYS[2])
local answer = {'free'}
if left ~= -2 then
  answer = {'unblocked', left}
  local forced
  -- Of a hash of ours it is everything. It is not for us to read all of a larger one.
  local fields = redis.call('HSCAN', KEYS[2], 0, 'COUNT', 16)[2]
  for i = 1, #fields, 2 do
    local id = fields[i]
    if not string.find(id, ':end$') then
      answer = {'revoked', id}
    elseif fields[i + 1] == 'forced' and left ~= -1 and left <= tonumber(ARGV[1]) then
      forced = string.sub(id, 1, -5)
    end
  end
  if forced and answer[1] == 'unblocked' then
    -- Its holder may still run: the message of the earlier call may be lost.
    redis.call('PUBLISH', inbox(forced), '1 taken 0 ' .. forced .. ' ' .. KEYS[2])
    return {'revoked', forced}
  end
  redis.call('DEL', KEYS[2])
end
if answer[1] == 'revoked' then
  local id = answer[2]
  redis.call('PUBLISH', inbox(id), '1 taken 0 ' .. id .. ' ' .. KEYS[2])
  if ARGV[1] ~= '0' then
    redis.call('HSET', KEYS[2], id .. ':end', 'forced')
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
    return answer
  end
end
give_on(KEYS[1], KEYS[2], KEYS[3], false, ARGV[2])
if healed then answer[#answer + 1] = {'healed'} end
return answer
