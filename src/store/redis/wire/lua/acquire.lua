-- acquire: grants keys, or enqueues. A repeated call finds the grants or the queue entries of the
-- first one (I8). No key occurs twice: two requests would both find it free.
--
-- KEYS   n locks
-- ARGV   1 fence; 2 time at which the call expires, in microseconds of the server's clock;
--        3 lease of an offer, ms; 4 TTL of the queue, ms; 5 capacity of the queue
--        for each lock: acquisition id; lease, ms; '1' to enqueue
--        for each lock: its queue
--        the record of a single lock, if it stands in place of a grant
-- reply  {now, 'expired'}
--        {now, 'granted', fence}: all keys
--        {now, 'queued', ms left, ahead}
--        {now, 'busy', ms left}
--        {now, 'full', ms left, waiting}
--        {now, 'recorded', head, body or nil}
--        {now, 'each', reply ..} of several requests: as above without the time, or {'error', text}
--        -1 ms: the lock has no TTL. Each may end in a mark of the fence: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'expired'} end

--@include fence.lua

local n = #KEYS
local function grant(i, fence_text)
  redis.call('HSET', KEYS[i], ARGV[3 * i + 3], fence_text)
  redis.call('PEXPIRE', KEYS[i], ARGV[3 * i + 4])
end

-- The fast path of almost every request: no lock, no queue, no record. The functions below are not
-- even defined yet. All keys get one fence: it is larger than each one before it of any key. The
-- fence is the first write: without permission for it, or in another slot, nothing has changed.
local names = {unpack(ARGV, 3 * n + 6)}
for i = 1, n do names[#names + 1] = KEYS[i] end
if redis.call('EXISTS', unpack(names)) == 0 then
  local fence = next_fence(now)
  local fence_text = text(fence)
  for i = 1, n do grant(i, fence_text) end
  return {now, 'granted', fence, fence_mark}
end

--@include queue.lua
--@include record.lua
local reply
if n == 1 then
  local queue = ARGV[9]
  reply = recorded(KEYS[1], queue, ARGV[10], ARGV[6], ARGV[3])
    or acquire(KEYS[1], queue, ARGV[6], ARGV[7], ARGV[8], ARGV[3], ARGV[4], ARGV[5])
else
  -- A key of another type fails alone. Another error is that of the whole call.
  local function acquire_one(i)
    local id, lease_ms, if_busy = ARGV[3 * i + 3], ARGV[3 * i + 4], ARGV[3 * i + 5]
    local ok, one =
      pcall(acquire, KEYS[i], ARGV[3 * n + 5 + i], id, lease_ms, if_busy, ARGV[3], ARGV[4], ARGV[5])
    if ok then return one end
    local text = type(one) == 'table' and one.err or tostring(one)
    if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
    return {'error', text}
  end
  reply = {'each'}
  for i = 1, n do reply[i + 1] = acquire_one(i) end
end
if fence_mark then reply[#reply + 1] = fence_mark end
return {now, unpack(reply)}
