-- acquire: grants keys, or enqueues. A repeated call finds the grants or the queue entries of the
-- first one (I8). No key occurs twice: two requests would both find it free.
--
-- KEYS   n locks; their queues; the record of a single lock, if a record stands for a grant; fence
--        of a raw key: its reservation, which raw.lua removes
-- ARGV   of a raw key: those that raw.lua removes
--        1 prefix of the channels of processes; 2 time at which the call expires, in microseconds
--        of the server's clock; 3 lease of an offer, ms; 4 TTL of the queue, ms; 5 capacity of the
--        queue
--        for each lock: acquisition id; lease, ms; if it is busy: 'fail', 'enqueue', or
--        'poll' to enqueue an id that most likely is enqueued or has an offer; trace, or ''
-- reply  now: all keys are granted, and this is their fence. (Redis sends a text with a tenth of
--        the work of a table.)
--        {now, 'expired'}
--        {now, 'granted', fence}: all keys. Of one that is held by this id, with its trace before
--        {now, 'queued', ms left, ahead}, and the trace of the holder to a request with one
--        {now, 'busy', ms left}, as well
--        {now, 'full', ms left, waiting}
--        {now, 'superseded'}: a newer acquisition replaces this one. Nothing has changed
--        {now, 'recorded', head, body or nil}
--        {now, 'each', reply ..} of several requests: as above without the time, or {'error', text}
--        -1 ms: the lock has no TTL. Each may end in a mark of the fence: see fence.lua

-- Times and fences are texts: Lua prints and reads numbers slowly. Those of one length have the
-- order of their numbers.
--@raw --@include raw.lua
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000', #t[2]) .. t[2]
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

-- The fast path of almost every request: no lock, no queue, no record. The functions below are not
-- even defined yet. All keys get one fence: it is larger than each one before it of any key. The
-- fence is the first write: without permission for it, nothing has changed. A poll looks for its
-- own entry first.
local n, fence_key = (#ARGV - 5) / 4, KEYS[#KEYS]
local is_free = (n > 1 or ARGV[8] ~= 'poll') and redis.call('EXISTS', unpack(KEYS, 1, #KEYS - 1)) == 0
-- The key is reserved for other programs: a new waiter enqueues, although the key is free. A poll
-- ends the reservation.
--@raw local reserved_left = ARGV[8] == 'enqueue' and redis.call('PTTL', reservation) or -2
--@raw local is_reserved = reserved_left > 0 and redis.call('EXISTS', KEYS[1]) == 0
--@raw is_free = is_free and not is_reserved
if is_free then
  local fence, reply = now, now
  local stored = redis.pcall('SET', fence_key, now, 'GET')
  if type(stored) ~= 'string' or #stored ~= #now or stored >= now or not tonumber(stored) then
    --@include fence.lua
    fence = fence_after(stored, now)
    reply = {now, 'granted', fence, fence_mark}
  end
  local call = redis.call
  for i = 1, n do
    local trace = ARGV[4 * i + 5]
    call('HSET', KEYS[i], ARGV[4 * i + 2], trace == '' and fence or fence .. ' ' .. trace)
    call('PEXPIRE', KEYS[i], ARGV[4 * i + 3])
  end
  return reply
end

--@include fence.lua
--@include queue.lua
--@include record.lua
local reply
if n == 1 then
  local queue, record = KEYS[2], KEYS[4] and KEYS[3]
  --@raw if is_reserved then
  --@raw   acquire = function(_, _, id)
  --@raw     return enqueue(queue, id, reserved_left, ARGV[4], tonumber(ARGV[5]))
  --@raw   end
  --@raw end
  reply = recorded(KEYS[1], queue, record, ARGV[6], ARGV[3])
    or acquire(KEYS[1], queue, ARGV[6], ARGV[7], ARGV[8], ARGV[3], ARGV[4], ARGV[5], ARGV[9])
else
  --@include each.lua
  local function acquire_one(i)
    local id, lease_ms, if_busy = ARGV[4 * i + 2], ARGV[4 * i + 3], ARGV[4 * i + 4]
    return acquire(KEYS[i], KEYS[n + i], id, lease_ms, if_busy, ARGV[3], ARGV[4], ARGV[5], ARGV[4 * i + 5])
  end
  reply = for_each(n, acquire_one, {'each'})
end
if fence_mark then reply[#reply + 1] = fence_mark end
return {now, unpack(reply)}
