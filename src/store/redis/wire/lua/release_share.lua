-- release_share: ends a share, or removes its queue entry. Changes nothing of others (I1).
--
-- KEYS   lock; queue; fence
-- ARGV   as of release, for one lock without a record
-- reply  'freed'
--        {'freed'}, {'handed off'} or {'not holder'}, each perhaps with a mark of the fence

local lock, queue, fence_key, id = KEYS[1], KEYS[2], KEYS[3], ARGV[3]
--@include fence.lua
--@include queue.lua
local now_ms = math.floor(clock() / 1000)
local ends = redis.pcall('ZSCORE', lock, id)
local is_holder = type(ends) == 'string' and tonumber(ends) > now_ms
if is_holder then
  -- The block is first: if the script ends here, the place is taken until its old end.
  if ARGV[4] ~= '0' then redis.call('ZADD', lock, now_ms + ARGV[4], id .. ':end') end
  redis.call('ZREM', lock, id)
  lower_ttl(lock, now_ms)
else
  local left = redis.pcall('LREM', queue, 1, id)
  if type(left) == 'table' and not string.find(left.err, 'WRONGTYPE', 1, true) then error(left) end
end
local count = redis.call('EXISTS', queue) == 1 and count_places(lock, now_ms)
local offered = count and (is_holder or count > 0) and offer(lock, queue, count, false, ARGV[2])
if not is_holder then return {'not holder', fence_mark} end
return offered and {'handed off', fence_mark} or {'freed', fence_mark}
