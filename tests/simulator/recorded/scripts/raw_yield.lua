-- yield: passes the key to the first live waiter, between two sections of one process, and enqueues
-- the next id of the process. Without waiters the acquisition holds the key for another full lease
-- under a new fence. A key that was lost is acquired under the next id.
--
-- KEYS   1 lock
-- ARGV   of a raw key: its names, which raw.lua removes
--        1 fence; 2 time at which the call expires, as of acquire; 3 lease of an offer, ms;
--        4 TTL of the queue, ms; 5 capacity of the queue; 6 next acquisition id; 7 lease, ms;
--        8 acquisition id of the holder; 9 fence of the holder; 10 queue; 11 record, as of acquire
-- reply  {now, 'expired'}
--        {now, 'extended', fence}
--        as of acquire, for the next id: the old id holds nothing any more
--        Each may end in a mark of the fence: see fence.lua

-- Included by the scripts of raw keys: messages to Redisson, and turns for it. The lines after
-- `--@raw` are only in these scripts: composed keys have other ones.
--
-- A thread of Redisson that waits is subscribed to the channel of its lock, and asks after each
-- message there. A process that waits is subscribed to that channel, too, and to one beside it, so
-- that the difference of their subscribers is the number of other programs that wait.
--
-- Other programs do not use the queue. So the processes in it must let them have their turn: a
-- waiter that finds the key free gets an even fence, an offer at a release has an odd one, and a
-- release of an odd fence reserves the key for other programs, if one of them waits. At least every
-- second release does.

-- The names precede the other arguments: the channel of Redisson, the channel beside it, and the
-- reservation.
local channel, own_channel, reservation = table.remove(ARGV, 1), table.remove(ARGV, 1), table.remove(ARGV, 1)

-- How long a key is reserved. Redisson needs a round trip and a thread that runs. A waiter that
-- enqueues later, when the key is free again, waits for the rest of this time.
local reserved_ms = 30

local function others_wait()
  local subscribers = redis.call('PUBSUB', 'NUMSUB', channel, own_channel)
  return subscribers[2] > subscribers[4]
end

local function is_odd(fence)
  return type(fence) == 'string' and string.find(fence, '[13579]$') ~= nil
end

-- Wakes the waiters of Redisson. It decodes no other text than a number. Without permission for the
-- channel they wait until the TTL that they saw.
local function announce()
  redis.pcall('PUBLISH', channel, '0')
end

-- Reserves a key without a holder for other programs. The reservation ends with the first poll of a
-- waiter, so its process must not poll because of this message, but because of the next one.
local function reserve()
  redis.call('SET', reservation, 1)
  redis.call('PEXPIRE', reservation, reserved_ms)
  redis.pcall('PUBLISH', own_channel, 'reserved')
  announce()
end

-- Whether the holder of this fence lets other programs have their turn.
local function must_reserve(fence)
  return is_odd(fence) and others_wait()
end

-- A key is free, and no process waits for it.
local function leave_free()
  if others_wait() then reserve() else announce() end
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

local now = clock()
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

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

-- Makes a fence even or odd: see raw.lua.
local function set_turn(fence, rest)
  if fence % 2 == rest then return fence end
  fence = text(fence + 1)
  redis.call('SET', ARGV[1], fence)
  return fence
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
    fence = set_turn(fence, requester and 0 or 1)
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
      fence = set_turn(fence, 0)
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
    if not offered then leave_free() end
  end
  local body = redis.call('HGET', record, 'body')
  if #head > max_head then head = '' end
  return {'recorded', head, body and #body <= max_body and body}
end

local lock, queue = KEYS[1], ARGV[10]
local stored = redis.call('HGET', lock, ARGV[8])
if stored and stored ~= ARGV[9] then
  -- A copy of an executed yield: a section may run under the new fence, and must not lose the key.
  -- The write changes nothing: WAIT covers only what this connection has written.
  redis.call('HSET', lock, ARGV[8], stored)
  return {now, 'extended', stored}
end
if not stored then
  local reply = recorded(lock, queue, ARGV[11], ARGV[6], ARGV[3])
    or acquire(lock, queue, ARGV[6], ARGV[7], 'enqueue', ARGV[3], ARGV[4], ARGV[5])
  if fence_mark then reply[#reply + 1] = fence_mark end
  return {now, unpack(reply)}
end
local function yield_to_others()
  redis.call('HDEL', lock, ARGV[8])
  reserve()
  local reply = enqueue(queue, ARGV[6], reserved_ms, ARGV[4], tonumber(ARGV[5]))
  if fence_mark then reply[#reply + 1] = fence_mark end
  return {now, unpack(reply)}
end
if must_reserve(stored) then return yield_to_others() end
if offer_next(lock, queue, false, ARGV[3]) then
  redis.call('HDEL', lock, ARGV[8])
  -- The offer may be for the next id, which was enqueued already because this yield got no reply:
  -- it gets the key or a queue entry, and not both.
  local reply = acquire(lock, queue, ARGV[6], ARGV[7], 'enqueue', ARGV[3], ARGV[4], ARGV[5])
  if fence_mark then reply[#reply + 1] = fence_mark end
  return {now, unpack(reply)}
end
if others_wait() then return yield_to_others() end
-- PEXPIRE is first, because Redis accepts it when it is out of memory, and then accepts the rest.
redis.call('PEXPIRE', lock, ARGV[7])
local fence = next_fence()
redis.call('HSET', lock, ARGV[8], fence)
return {now, 'extended', fence, fence_mark}
