-- force: revokes the key from its holder, notifies that holder, and blocks the key, so that the
-- holder can stop. A key that is only blocked becomes free, unless an earlier call blocked it.
--
-- KEYS   1 lock
-- ARGV   on a Cluster: those that cluster.lua removes
--        of a raw key: its names, which raw.lua removes
--        1 fence; 2 block, ms; 3 lease of an offer, ms; 4 queue
-- reply  {'free'}
--        {'revoked', acquisition id}
--        {'unblocked', ms left (-1: it had no TTL)}
--        Each may end in a mark of the fence: see fence.lua

--@single local beside = redis.call
--@cluster --@include cluster.lua
--@raw --@include raw.lua
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
  -- A lock that was deleted cannot be made again while its slot moves.
  --@cluster local is_blocked = reply[1] == 'revoked' and ARGV[2] ~= '0'
  --@cluster if is_blocked then
  --@cluster   redis.call('PEXPIRE', KEYS[1], ARGV[2])
  --@cluster   redis.call('HSET', KEYS[1], reply[2] .. ':end', 'forced')
  --@cluster   redis.call('HDEL', KEYS[1], reply[2])
  --@cluster else
  redis.call('DEL', KEYS[1])
  --@cluster end
end
if reply[1] == 'revoked' then
  local id = reply[2]
  -- The block is first: an error at the channel must not leave the key free beside its holder.
  if ARGV[2] ~= '0' then
    redis.call('HSET', KEYS[1], id .. ':end', 'forced')
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    --@raw announce()
  end
  redis.call('PUBLISH', inbox(id), '1 revoked 0 ' .. id .. ' ' .. KEYS[1])
  if ARGV[2] ~= '0' then return reply end
end
local offered = offer_next(KEYS[1], ARGV[4], false, ARGV[3])
--@raw if not offered then leave_free() end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
