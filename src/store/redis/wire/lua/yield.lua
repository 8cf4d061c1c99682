-- yield: passes the key to the first live waiter, between two sections of one process, and enqueues
-- the next id of the process. Without waiters the acquisition holds the key for another full lease
-- under a new fence. A key that was lost is acquired under the next id.
--
-- KEYS   lock; queue; record, as of acquire; fence
--        of a raw key: its reservation, which raw.lua removes
-- ARGV   of a raw key: those that raw.lua removes
--        1 prefix of the channels of processes; 2 time at which the call expires, as of acquire;
--        3 lease of an offer, ms; 4 TTL of the queue, ms; 5 capacity of the queue; 6 next
--        acquisition id; 7 lease, ms; 8 acquisition id of the holder; 9 fence of the holder;
--        10 trace of the section that has ended, or ''; 11 trace, as of acquire
-- reply  {now, 'expired'}
--        {now, 'extended', fence}
--        as of acquire, for the next id: the old id holds nothing any more
--        Each may end in a mark of the fence: see fence.lua

--@raw --@include raw.lua
local lock, queue, record, fence_key = KEYS[1], KEYS[2], KEYS[4] and KEYS[3], KEYS[#KEYS]
--@include fence.lua
local now = clock()
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

--@include queue.lua
--@include record.lua
local stored, trace = fence_of(lock, ARGV[8])
if stored and stored ~= ARGV[9] then
  -- A copy of an executed yield: a section may run under the new fence, and must not lose the key.
  -- The write changes nothing: WAIT covers only what this connection has written.
  redis.call('HSET', lock, ARGV[8], with_trace(stored, trace))
  return {now, 'extended', stored}
end
-- The next id gets the record of the key, the key or a queue entry, and not two of them.
local function go_on_with_next()
  local reply = recorded(lock, queue, record, ARGV[6], ARGV[3])
    or acquire(lock, queue, ARGV[6], ARGV[7], 'enqueue', ARGV[3], ARGV[4], ARGV[5], ARGV[11])
  if fence_mark then reply[#reply + 1] = fence_mark end
  return {now, unpack(reply)}
end
if not stored then return go_on_with_next() end
--@raw local function yield_to_others()
--@raw   redis.call('HDEL', lock, ARGV[8])
--@raw   reserve()
--@raw   local reply = enqueue(queue, ARGV[6], reserved_ms, ARGV[4], tonumber(ARGV[5]))
--@raw   if fence_mark then reply[#reply + 1] = fence_mark end
--@raw   return {now, unpack(reply)}
--@raw end
--@raw if must_reserve(stored) then return yield_to_others() end
ended = ARGV[10]
if offer(lock, queue, 0, false, ARGV[3]) then
  -- An offer to a share has replaced the lock.
  redis.pcall('HDEL', lock, ARGV[8])
  -- The offer may be for the next id, which was enqueued already because this yield got no reply.
  return go_on_with_next()
end
--@raw if others_wait() then return yield_to_others() end
-- PEXPIRE is first, because Redis accepts it when it is out of memory, and then accepts the rest.
redis.call('PEXPIRE', lock, ARGV[7])
local fence = next_fence()
redis.call('HSET', lock, ARGV[8], with_trace(fence, ARGV[11]))
return {now, 'extended', fence, fence_mark}
