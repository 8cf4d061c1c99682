-- force: revokes the key from its holder, notifies that holder, and blocks the key, so that the
-- holder can stop. A key that is only blocked becomes free, unless an earlier call blocked it.
--
-- KEYS   1 lock
-- ARGV   of a raw key: its names, which raw.lua removes
--        1 fence; 2 block, ms; 3 lease of an offer, ms; 4 queue
-- reply  {'free'}
--        {'revoked', acquisition id}
--        {'unblocked', ms left (-1: it had no TTL)}
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
  redis.call('DEL', KEYS[1])
end
if reply[1] == 'revoked' then
  local id = reply[2]
  -- The block is first: an error at the channel must not leave the key free beside its holder.
  if ARGV[2] ~= '0' then
    redis.call('HSET', KEYS[1], id .. ':end', 'forced')
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    announce()
  end
  redis.call('PUBLISH', inbox(id), '1 revoked 0 ' .. id .. ' ' .. KEYS[1])
  if ARGV[2] ~= '0' then return reply end
end
local offered = offer_next(KEYS[1], ARGV[4], false, ARGV[3])
if not offered then leave_free() end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
