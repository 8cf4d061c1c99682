-- acquire: grants keys, or enqueues. A repeated call finds the grants or the queue entries of the
-- first one (I8). No key occurs twice: two requests would both find it free.
--
-- KEYS   n locks
-- ARGV   of a raw key: its names, which raw.lua removes
--        1 fence; 2 time at which the call expires, in microseconds of the server's clock;
--        3 lease of an offer, ms; 4 TTL of the queue, ms; 5 capacity of the queue
--        for each lock: acquisition id; lease, ms; if it is busy: 'fail', 'enqueue', or
--        'poll' to enqueue an id that most likely is enqueued or has an offer
--        for each lock: its queue
--        the record of a single lock, if it stands in place of a grant
-- reply  now: all keys are granted, and this is their fence. (Redis sends a text with a tenth of
--        the work of a table.)
--        {now, 'expired'}
--        {now, 'granted', fence}: all keys
--        {now, 'queued', ms left, ahead}
--        {now, 'busy', ms left}
--        {now, 'full', ms left, waiting}
--        {now, 'recorded', head, body or nil}
--        {now, 'each', reply ..} of several requests: as above without the time, or {'error', text}
--        -1 ms: the lock has no TTL. Each may end in a mark of the fence: see fence.lua

-- Times and fences are texts: Lua prints and reads numbers slowly. Those of one length have the
-- order of their numbers.
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000', #t[2]) .. t[2]
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

-- The fast path of almost every request: no lock, no queue, no record. The functions below are not
-- even defined yet. All keys get one fence: it is larger than each one before it of any key. The
-- fence is the first write: without permission for it, or in another slot, nothing has changed.
-- A poll looks for its own entry first.
local n = #KEYS
local is_free
if n > 1 then
  local names = {unpack(ARGV, 3 * n + 6)}
  for i = 1, n do names[#names + 1] = KEYS[i] end
  is_free = redis.call('EXISTS', unpack(names)) == 0
else
  is_free = ARGV[8] ~= 'poll' and redis.call('EXISTS', KEYS[1], unpack(ARGV, 9)) == 0
end
-- The key is reserved for other programs: a new waiter enqueues, although the key is free. A poll
-- ends the reservation.
if is_free then
  local fence, reply = now, now
  local stored = redis.pcall('SET', ARGV[1], now, 'GET')
  if type(stored) ~= 'string' or #stored ~= #now or stored >= now or not tonumber(stored) then
    -- Included by every script that may grant a key. ARGV[1] of each script is the key of the last
-- fence. A fence is a number below 2^53, as a text.

-- Lua numbers are doubles, and `..` prints only 14 digits of them.
local function text(fence)
  return string.format('%.0f', fence)
end

-- The time, in microseconds, as a text.
local function clock()
  local t = redis.call('TIME')
  return t[1] .. string.sub('00000', #t[2]) .. t[2]
end

-- Whether a stored value is a fence. A value of a day ahead of the clock was written by another
-- program, or the clock was set back. (Each comparison is false for `nan`.)
local function is_fence(stored, now)
  local last = tonumber(stored)
  return last and last < now + 86400000000
end

-- The end of the reply: an invalid fence was replaced by the clock, or there was none. The server
-- may then have lost its locks, too.
local fence_mark

-- The next fence: larger than the last one, and at least the clock. The last fence was replaced by
-- the clock; `stored` is the reply.
local function fence_after(stored, now)
  if not stored then
    fence_mark = {'fence missing'}
  elseif type(stored) == 'table' then
    if not string.find(stored.err, 'WRONGTYPE', 1, true) then error(stored) end
    redis.call('SET', ARGV[1], now)
    fence_mark = {'fence replaced'}
  elseif not is_fence(stored, now) then
    fence_mark = {'fence replaced'}
  elseif tonumber(stored) >= tonumber(now) then
    now = text(math.floor(tonumber(stored)) + 1)
    redis.call('SET', ARGV[1], now)
  end
  return now
end

local function next_fence()
  local now = clock()
  return fence_after(redis.pcall('SET', ARGV[1], now, 'GET'), now)
end

    fence = fence_after(stored, now)
    reply = {now, 'granted', fence, fence_mark}
  end
  local call = redis.call
  for i = 1, n do
    call('HSET', KEYS[i], ARGV[3 * i + 3], fence)
    call('PEXPIRE', KEYS[i], ARGV[3 * i + 4])
  end
  return reply
end

-- Included by every script that may grant a key. ARGV[1] of each script is the key of the last
-- fence. A fence is a number below 2^53, as a text.

-- Lua numbers are doubles, and `..` prints only 14 digits of them.
local function text(fence)
  return string.format('%.0f', fence)
end

-- The time, in microseconds, as a text.
local function clock()
  local t = redis.call('TIME')
  return t[1] .. string.sub('00000', #t[2]) .. t[2]
end

-- Whether a stored value is a fence. A value of a day ahead of the clock was written by another
-- program, or the clock was set back. (Each comparison is false for `nan`.)
local function is_fence(stored, now)
  local last = tonumber(stored)
  return last and last < now + 86400000000
end

-- The end of the reply: an invalid fence was replaced by the clock, or there was none. The server
-- may then have lost its locks, too.
local fence_mark

-- The next fence: larger than the last one, and at least the clock. The last fence was replaced by
-- the clock; `stored` is the reply.
local function fence_after(stored, now)
  if not stored then
    fence_mark = {'fence missing'}
  elseif type(stored) == 'table' then
    if not string.find(stored.err, 'WRONGTYPE', 1, true) then error(stored) end
    redis.call('SET', ARGV[1], now)
    fence_mark = {'fence replaced'}
  elseif not is_fence(stored, now) then
    fence_mark = {'fence replaced'}
  elseif tonumber(stored) >= tonumber(now) then
    now = text(math.floor(tonumber(stored)) + 1)
    redis.call('SET', ARGV[1], now)
  end
  return now
end

local function next_fence()
  local now = clock()
  return fence_after(redis.pcall('SET', ARGV[1], now, 'GET'), now)
end

-- Included by every script that may find a key free: offers, queue entries and grants. It needs
-- fence.lua. A script declares the lock as its key. Its queue, the fence and the record are
-- arguments: an error at one of them (permission, slot) ends the script in the middle. All that
-- was executed by then is a complete step: a waiter that has left the queue without an offer
-- enqueues again with its next poll.
--
-- A queue is a list of acquisition ids, its first waiter at the head. A lock is a hash of one
-- field, acquisition id -> fence, and always has a TTL. A blocked lock has the field `<acquisition
-- id>:end`: it has no holder. A hash of any other form is busy.

-- The channel of a process. Its name has the prefix of the name of the fence, ARGV[1].
local function inbox(id)
  return string.sub(ARGV[1], 1, -2) .. 'in:' .. (string.match(id, '^(.*):%d+$') or id)
end

-- The longest queue that is searched. A longer one was written by another program: this crate never
-- makes one.
local max_queue = 65536

-- Deletes a queue of another program. Live waiters enqueue again.
local function drop_foreign(queue)
  if redis.call('LLEN', queue) > max_queue then redis.call('DEL', queue) end
end


-- Offers a free key to the first live waiter, `head` if the caller has taken it from the queue. A
-- waiter without a subscriber belongs to a dead process. Returns the waiter that it was offered to,
-- or `requester` if that is the first one and the caller grants it the key, or false. I7: the
-- receiver of the message finds this state, because a script is atomic. At most 64 dead waiters are
-- dropped in one call, which bounds its time. The key is then free, as with an empty queue.
local function offer_next(lock, queue, requester, offer_ms, head)
  for _ = 1, 64 do
    head = head or redis.call('LPOP', queue)
    if not head or head == requester then return head end
    local fence = next_fence()
    if redis.call('PUBLISH', inbox(head), '1 offered ' .. fence .. ' ' .. head .. ' ' .. lock) > 0 then
      redis.call('HSET', lock, head, fence)
      redis.call('PEXPIRE', lock, offer_ms)
      return head
    end
    head = nil
  end
  drop_foreign(queue)
  return false
end

-- Drops waiters of dead processes from a full queue. Each call checks 32 entries, at a position
-- that depends on the time. Returns the remaining length.
local function drop_dead(queue, waiting)
  local from = redis.call('TIME')[2] % math.ceil(waiting / 32) * 32
  local ids = redis.call('LRANGE', queue, from, from + 31)
  local inboxes = {}
  for i, id in ipairs(ids) do inboxes[i] = inbox(id) end
  local subscribers = redis.call('PUBSUB', 'NUMSUB', unpack(inboxes))
  for i, id in ipairs(ids) do
    if subscribers[2 * i] == 0 then waiting = waiting - redis.call('LREM', queue, 1, id) end
  end
  return waiting
end

local function enqueue(queue, id, left, entry_ms, capacity)
  local ahead = redis.call('LPOS', queue, id, 'MAXLEN', max_queue)
  if not ahead then
    local waiting = redis.call('RPUSH', queue, id) - 1
    if waiting >= capacity then
      redis.call('LREM', queue, -1, id)
      drop_foreign(queue)
      waiting = redis.call('LLEN', queue)
      if waiting >= capacity then waiting = drop_dead(queue, waiting) end
      if waiting >= capacity then return {'full', left, waiting} end
      redis.call('RPUSH', queue, id)
    end
    ahead = waiting
  end
  redis.call('PEXPIRE', queue, entry_ms)
  return {'queued', left, ahead}
end

-- Grants the key to `id`, or enqueues it. If `id` holds the key already, by a repeated call or an
-- accepted offer: the same fence, and at least a full lease. A delayed copy never shortens the
-- lease: GT. For GT, a key without a TTL has an infinite one: it gets one here.
local function acquire(lock, queue, id, lease_ms, if_busy, offer_ms, entry_ms, capacity)
  local fence = redis.call('HGET', lock, id)
  if fence then
    if redis.call('PEXPIRE', lock, lease_ms, 'GT') == 0 then
      if redis.call('PTTL', lock) == -1 then redis.call('PEXPIRE', lock, lease_ms) end
      -- A write, although it changes nothing: WAIT covers only what this connection has written,
      -- and another client may have made the offer.
      redis.call('HSET', lock, id, fence)
    end
    return {'granted', fence}
  end
  local left = redis.call('PTTL', lock)
  if left == -2 then
    local next = offer_next(lock, queue, id, offer_ms)
    if not next or next == id then
      -- Its entry may be behind more dead waiters than one call drops.
      if not next then redis.call('LREM', queue, 1, id) end
      fence = next_fence()
      redis.call('HSET', lock, id, fence)
      redis.call('PEXPIRE', lock, lease_ms)
      return {'granted', fence}
    end
    left = tonumber(offer_ms)
  end
  if if_busy == 'fail' then return {'busy', left} end
  return enqueue(queue, id, left, entry_ms, tonumber(capacity))
end

-- Included by acquire and yield. A record is a hash: the acquisition id that left it, its head, and
-- mostly a body. It needs queue.lua.

-- The bounds of a head and a body. The connection is closed after a longer reply, so a value of
-- another program must not be sent: the head is then empty, and the body is left out.
local max_head, max_body = 65536, 1048576

-- The reply with the record, or nil. The acquisition then holds nothing: an offer to it, or the
-- free key, goes to the next waiter, which gets the record, too. `record` is nil if the call wants
-- a grant with or without one.
local function recorded(lock, queue, record, id, offer_ms)
  local head = record and redis.call('HGET', record, 'head')
  if not head then return nil end
  drop_foreign(queue)
  redis.call('LREM', queue, 1, id)
  redis.call('HDEL', lock, id)
  if redis.call('EXISTS', lock) == 0 then
    local offered = offer_next(lock, queue, false, offer_ms)
  end
  local body = redis.call('HGET', record, 'body')
  if #head > max_head then head = '' end
  return {'recorded', head, body and #body <= max_body and body}
end

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
