-- acquire: grants keys, or enqueues. A repeated call finds the grants or the queue entries of the
-- first one (I8). No key occurs twice: two requests would both find it free.
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, if a record stands in place of a grant
--        for each further request, none of which has a record: lock; queue
-- ARGV   1 acquisition id; 2 time at which the call expires, in microseconds of the server's clock;
--        3 lease, ms; 4 '1' to enqueue; 5 lease of an offer, ms; 6 TTL of the queue, ms;
--        7 capacity of the queue
--        for each further request: acquisition id; lease, ms; '1' to enqueue
-- reply  {now, 'late'}
--        {now, 'granted', fence}: all keys
--        {now, 'line', ms left, ahead}
--        {now, 'held', ms left}
--        {now, 'full', ms left, waiting}
--        {now, 'recorded', head, body or nil}
--        {now, 'each', reply ..} of several requests: as above without the time, or {'error', text}
--        -1 ms: the lock has no TTL. Each may end in {'healed'}: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'late'} end

--@include fence.lua

local function grant(lock, id, lease_ms, fence_text)
  redis.call('HSET', lock, id, fence_text)
  redis.call('PEXPIRE', lock, lease_ms)
end

-- The fast path of almost every request: no lock, no queue, no record. The functions below are not
-- even defined yet. All keys get one fence: it is larger than each one before it of any key.
if redis.call('EXISTS', unpack(KEYS, 2)) == 0 then
  local fence = next_fence(KEYS[1], now)
  local fence_text = text(fence)
  grant(KEYS[2], ARGV[1], ARGV[3], fence_text)
  for i = 2, (#ARGV - 4) / 3 do grant(KEYS[2 * i], ARGV[3 * i + 2], ARGV[3 * i + 3], fence_text) end
  return {now, 'granted', fence, replaced and {'healed'} or nil}
end

--@include queue.lua
--@include record.lua
local reply
if #ARGV == 7 then
  reply = recorded(ARGV[1], ARGV[5]) or acquire(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
else
  -- A key of another type fails alone. Another error is that of the whole call.
  local function acquire_one(lock, queue, id, lease_ms, if_busy)
    local ok, one = pcall(acquire, KEYS[1], lock, queue, id, lease_ms, if_busy, ARGV[5], ARGV[6], ARGV[7])
    if ok then return one end
    local text = type(one) == 'table' and one.err or tostring(one)
    if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
    return {'error', text}
  end
  reply = {'each', acquire_one(KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4])}
  for i = 2, (#ARGV - 4) / 3 do
    reply[i + 1] = acquire_one(KEYS[2 * i], KEYS[2 * i + 1], ARGV[3 * i + 2], ARGV[3 * i + 3], ARGV[3 * i + 4])
  end
end
if replaced then reply[#reply + 1] = {'healed'} end
return {now, unpack(reply)}
