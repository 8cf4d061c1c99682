-- Included by every script that may find a key free: offers, queue entries and grants. It needs
-- fence.lua, and the prefix of the channels of processes as ARGV[1]. An error ends a script in the
-- middle. All that was executed by then is a complete step: a waiter that has left the queue
-- without an offer enqueues again with its next poll.
--
-- A queue is a list of acquisition ids, its first waiter at the head. A lock is a hash of one
-- field, acquisition id -> fence, and always has a TTL. A blocked lock has the field `<acquisition
-- id>:end`: it has no holder. A hash of any other form is busy.

-- The channel of a process.
local function inbox(id)
  return ARGV[1] .. (string.match(id, '^(.*):%d+$') or id)
end

-- The longest queue that is searched. A longer one was written by another program: this crate never
-- makes one.
local max_queue = 65536

-- Deletes a queue of another program. Live waiters enqueue again.
local function drop_foreign(queue)
  if redis.call('LLEN', queue) > max_queue then redis.call('DEL', queue) end
end

--@raw -- Makes a fence even or odd: see raw.lua.
--@raw local function set_turn(fence, rest)
--@raw   if fence % 2 == rest then return fence end
--@raw   fence = text(fence + 1)
--@raw   redis.call('SET', fence_key, fence)
--@raw   return fence
--@raw end

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
    --@raw fence = set_turn(fence, requester and 0 or 1)
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
      --@raw fence = set_turn(fence, 0)
      redis.call('HSET', lock, id, fence)
      redis.call('PEXPIRE', lock, lease_ms)
      return {'granted', fence}
    end
    left = tonumber(offer_ms)
  end
  if if_busy == 'fail' then return {'busy', left} end
  return enqueue(queue, id, left, entry_ms, tonumber(capacity))
end
