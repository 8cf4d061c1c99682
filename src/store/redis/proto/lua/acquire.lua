-- acquire: grants a key, or enqueues. A repeated call finds the grant or the queue entry of the
-- first one (I8).
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, if a record stands in place of a grant
-- ARGV   1 acquisition id; 2 time at which the call expires, in microseconds of the server's clock;
--        3 lease, ms; 4 '1' to enqueue; 5 lease of an offer, ms; 6 TTL of the queue, ms;
--        7 capacity of the queue
-- reply  {now, 'late'}
--        {now, 'granted', fence}
--        {now, 'line', ms left, ahead}
--        {now, 'held', ms left}
--        {now, 'full', ms left, waiting}
--        {now, 'recorded', head, body or nil}
--        -1 ms: the lock has no TTL. Each may end in {'healed'}: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'late'} end

--@include fence.lua

-- The fast path of almost every request: no lock, no queue, no record. The functions below are not
-- even defined yet.
if redis.call('EXISTS', unpack(KEYS, 2)) == 0 then
  local fence = next_fence(KEYS[1])
  redis.call('HSET', KEYS[2], ARGV[1], text(fence))
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return {now, 'granted', fence, replaced and {'healed'} or nil}
end

--@include queue.lua
--@include record.lua
local reply = recorded(ARGV[1], ARGV[5]) or acquire(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
if replaced then reply[#reply + 1] = {'healed'} end
return {now, unpack(reply)}
