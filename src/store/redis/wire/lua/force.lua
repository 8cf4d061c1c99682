-- force: revokes the key from its holders, notifies each, and blocks their places, so that they can
-- stop. A key that is only blocked becomes free, unless an earlier call blocked it.
--
-- KEYS   1 lock; 2 queue; 3 fence
--        of a raw key: its reservation, which raw.lua removes
-- ARGV   of a raw key: those that raw.lua removes
--        1 prefix of the channels of processes; 2 block, ms; 3 lease of an offer, ms; 4 the holder
--        to revoke the key from, or '' for all
-- reply  {'free'}
--        {'revoked', acquisition id ..}
--        {'unblocked', ms left (-1: it had no TTL)}
--        Each may end in a mark of the fence: see fence.lua

--@raw --@include raw.lua
local fence_key = KEYS[3]
--@include fence.lua
--@include queue.lua

-- The block is first: an error at the channel must not leave the key free beside its holder.
local function notify(id)
  redis.call('PUBLISH', inbox(id), '1 revoked 0 ' .. id .. ' ' .. KEYS[1])
end

-- A place that an earlier call has blocked is `<id>:forced`.
local function force_shares(now_ms)
  local reply = {'revoked'}
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
  for _, place in ipairs(redis.call('ZRANGE', KEYS[1], 0, 1100)) do
    local id = string.match(place, '^(.*):forced$') or not string.find(place, ':end$') and place
    if id and (ARGV[4] == '' or ARGV[4] == id) then
      if place == id then
        if ARGV[2] ~= '0' then redis.call('ZADD', KEYS[1], now_ms + ARGV[2], id .. ':forced') end
        redis.call('ZREM', KEYS[1], id)
      end
      notify(id)
      reply[#reply + 1] = id
    end
  end
  if reply[2] then
    lower_ttl(KEYS[1], now_ms)
  elseif ARGV[4] ~= '' then
    reply = {'free'}
  else
    redis.call('DEL', KEYS[1])
    reply = {'unblocked', last[2] - now_ms}
  end
  offer(KEYS[1], KEYS[2], count_places(KEYS[1], now_ms), false, ARGV[3])
  return reply
end

local now_ms = math.floor(clock() / 1000)
local is_shared = (count_places(KEYS[1], now_ms) or 0) > 0
local left = redis.call('PTTL', KEYS[1])
local reply = {'free'}
if is_shared then
  reply = force_shares(now_ms)
  if fence_mark then reply[#reply + 1] = fence_mark end
  return reply
end
if left ~= -2 then
  reply = {'unblocked', left}
  local revoked
  -- A lock of this crate has one field. Of a larger hash only some fields are read.
  local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
  for i = 1, #fields, 2 do
    local id = fields[i]
    local is_meant = ARGV[4] == '' or ARGV[4] == string.gsub(id, ':end$', '')
    if not is_meant then
      reply = {'free'}
    elseif not string.find(id, ':end$') then
      reply = {'revoked', id}
    elseif fields[i + 1] == 'forced' and left ~= -1 and left <= tonumber(ARGV[2]) then
      revoked = string.sub(id, 1, -5)
    end
  end
  if revoked and reply[1] == 'unblocked' then
    -- The former holder may still run: the message of the earlier call may be lost.
    notify(revoked)
    return {'revoked', revoked}
  end
  if reply[1] == 'free' or reply[1] == 'unblocked' and ARGV[4] ~= '' then return {'free'} end
  if reply[1] == 'revoked' and ARGV[2] ~= '0' then
    -- A lock that was deleted cannot be made again while its slot moves.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    redis.call('HSET', KEYS[1], reply[2] .. ':end', 'forced')
    for i = 1, #fields, 2 do
      if not string.find(fields[i], ':end$') then redis.call('HDEL', KEYS[1], fields[i]) end
    end
    --@raw announce()
  else
    redis.call('DEL', KEYS[1])
  end
end
if reply[1] == 'revoked' then
  notify(reply[2])
  if ARGV[2] ~= '0' then return reply end
end
local offered = offer(KEYS[1], KEYS[2], 0, false, ARGV[3])
--@raw if not offered then leave_free() end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
