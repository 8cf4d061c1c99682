-- yield: passes the key to the first live waiter, between two sections of one process, and enqueues
-- the next id of the process. Without waiters the acquisition holds the key for another full lease
-- under a new fence. A key that was lost is acquired under the next id.
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, as of acquire
-- ARGV   1 next acquisition id; 2 time at which the call expires, as of acquire; 3 lease, ms;
--        4 acquisition id of the holder; 5 lease of an offer, ms; 6 TTL of the queue, ms;
--        7 capacity of the queue; 8 fence of the holder
-- reply  {now, 'late'}
--        {now, 'extended', fence}
--        as of acquire, for the next id: the old id holds nothing any more
--        Each may end in {'healed'}: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'late'} end

--@include fence.lua
--@include queue.lua
--@include record.lua
local stored = redis.call('HGET', KEYS[2], ARGV[4])
if stored and stored ~= ARGV[8] then
  -- A copy of an executed yield: a section may run under the new fence, and must not lose the key.
  -- The write changes nothing: WAIT covers only what this connection has written.
  redis.call('HSET', KEYS[2], ARGV[4], stored)
  return {now, 'extended', tonumber(stored)}
end
if not stored then
  local reply = recorded(ARGV[1], ARGV[5]) or acquire(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], '1', ARGV[5], ARGV[6], ARGV[7])
  if replaced then reply[#reply + 1] = {'healed'} end
  return {now, unpack(reply)}
end
if offer_next(KEYS[1], KEYS[2], KEYS[3], false, ARGV[5]) then
  redis.call('HDEL', KEYS[2], ARGV[4])
  -- The offer may be for the next id, which was enqueued already because this yield got no reply:
  -- it gets the key or a queue entry, and not both.
  local reply = acquire(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], '1', ARGV[5], ARGV[6], ARGV[7])
  if replaced then reply[#reply + 1] = {'healed'} end
  return {now, unpack(reply)}
end
-- PEXPIRE is first, because Redis accepts it when it is out of memory, and then accepts the rest.
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local fence = next_fence(KEYS[1])
redis.call('HSET', KEYS[2], ARGV[4], text(fence))
return {now, 'extended', fence, replaced and {'healed'} or nil}
