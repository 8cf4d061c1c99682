-- force: revokes the key from its holder, notifies that holder, and blocks the key, so that the
-- holder can stop. A key that is only blocked becomes free, unless an earlier call blocked it.
--
-- KEYS   1 lock; 2 queue; 3 fence
--        of a raw key: its reservation, which raw.lua removes
-- ARGV   of a raw key: those that raw.lua removes
--        1 prefix of the channels of processes; 2 block, ms; 3 lease of an offer, ms
-- reply  {'free'}
--        {'revoked', acquisition id}
--        {'unblocked', ms left (-1: it had no TTL)}
--        Each may end in a mark of the fence: see fence.lua

--@raw --@include raw.lua
local fence_key = KEYS[3]
--@include fence.lua
--@include queue.lua
local left = redis.call('PTTL', KEYS[1])
local reply = {'free'}
if left ~= -2 then
  reply = {'unblocked', left}
  local revoked
  -- A lock of this crate has one field. Of a larger hash only some fields are read.
  local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
  for i = 1, #fields, 2 do
    local id = fields[i]
    if not string.find(id, ':end$') then
      reply = {'revoked', id}
    elseif fields[i + 1] == 'forced' and left ~= -1 and left <= tonumber(ARGV[2]) then
      revoked = string.sub(id, 1, -5)
    end
  end
  if revoked and reply[1] == 'unblocked' then
    -- The former holder may still run: the message of the earlier call may be lost.
    redis.call('PUBLISH', inbox(revoked), '1 revoked 0 ' .. revoked .. ' ' .. KEYS[1])
    return {'revoked', revoked}
  end
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
  -- The block is first: an error at the channel must not leave the key free beside its holder.
  redis.call('PUBLISH', inbox(reply[2]), '1 revoked 0 ' .. reply[2] .. ' ' .. KEYS[1])
  if ARGV[2] ~= '0' then return reply end
end
local offered = offer_next(KEYS[1], KEYS[2], false, ARGV[3])
--@raw if not offered then leave_free() end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
