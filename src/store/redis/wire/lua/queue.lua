-- Included by every script that may find a key free: offers, queue entries and grants. It needs
-- fence.lua, and the prefix of the channels of processes as ARGV[1]. An error ends a script in the
-- middle. All that was executed by then is a complete step: a waiter that has left the queue
-- without an offer enqueues again with its next poll.
--
-- A queue is a list of acquisition ids, its first waiter at the head. A lock always has a TTL, and
-- is one of two:
--   held alone: a hash of one field, acquisition id -> fence, perhaps with a blank and the trace of
--   its section. Of an offer, it is `<` and the trace of the section before. A blocked lock has the
--   field `<acquisition id>:end`: it has no holder. A hash of any other form is busy.
--   shared: a sorted set of acquisition ids, each with its end in milliseconds. The TTL is that of
--   the latest end. The id of a share ends in its limit, `/4`. A blocked place is `<id>:end`.
-- A share is granted if fewer than its limit have a place, and none of them alone.

-- The channel of a process.
local function inbox(id)
  return ARGV[1] .. (string.match(id, '^(.*):[%d/]+$') or id)
end

-- How many may hold a key together with this acquisition, itself included.
local function limit_of(id)
  return tonumber(string.match(id, '/(%d+)$') or 1)
end

--@include newest.lua
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

-- The places of a shared key, without those that have ended, which are removed. Zero: the key is
-- free. Nil: it is held alone, or of another type.
local function count_places(lock, now_ms)
  local ended = redis.pcall('ZREMRANGEBYSCORE', lock, '-inf', now_ms)
  if type(ended) ~= 'table' then return redis.call('ZCARD', lock) end
  if not string.find(ended.err, 'WRONGTYPE', 1, true) then error(ended) end
end

-- Gives a place beside `count` others to a share, until `ends`.
local function add_share(lock, id, ends, ms, count)
  redis.call('ZADD', lock, ends, id)
  -- The TTL is that of the latest end: with a shorter one all shares would end with this one.
  if count == 0 then redis.call('PEXPIRE', lock, ms) else redis.call('PEXPIRE', lock, ms, 'GT') end
end

-- Ends a shared key with its last place: a waiter that wants the key alone waits for no other.
local function lower_ttl(lock, now_ms)
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
  if last[2] then redis.call('PEXPIRE', lock, last[2] - now_ms) end
end

-- A longer one is of another program. The connection is closed after a reply that is too long.
local max_trace = 256

-- The trace of the section that the call ends, for the waiter that is offered its key.
local ended = ''

-- The value of the field of a lock.
local function with_trace(fence, trace)
  return trace == '' and fence or fence .. ' ' .. trace
end

-- Offers a key to its first live waiters, as long as they fit beside `count` holders: none, if it
-- is free. The first one that does not fit keeps those behind it waiting, or it would starve.
-- `head` was taken from the queue of a free key. A waiter without a subscriber belongs to a dead
-- process. Returns `requester` if it is next and fits, which the caller grants the key; otherwise
-- the last waiter that got an offer, or false; and the number of holders. I7: the receiver of the
-- message finds this state, because a script is atomic. At most 64 waiters are looked at in one
-- call, which bounds its time. If all of them were dead, the key is free, as with an empty queue.
local function offer(lock, queue, count, requester, offer_ms, head)
  local offered = false
  for _ = 1, 64 do
    if count == 0 then
      head = head or redis.call('LPOP', queue)
    else
      head = redis.call('LRANGE', queue, 0, 0)[1]
    end
    local next = head or requester
    if not next then return offered, count end
    local fits = count == 0 or count < limit_of(next)
    if not fits and (next == requester or redis.call('PUBSUB', 'NUMSUB', inbox(next))[2] > 0) then
      return offered, count
    end
    if count > 0 and head then redis.call('LPOP', queue) end
    if next == requester then return next, count end
    local is_share = limit_of(head) > 1
    local fence = is_share and clock() or fits and next_fence()
    --@raw fence = set_turn(fence, requester and 0 or 1)
    if fits and redis.call('PUBLISH', inbox(head), '1 offered ' .. fence .. ' ' .. head .. ' ' .. lock) > 0 then
      if not is_share then
        redis.call('HSET', lock, head, with_trace(fence, ended == '' and '' or '<' .. ended))
        redis.call('PEXPIRE', lock, offer_ms)
        return head, 1
      end
      -- A yield has not deleted its lock yet.
      if count == 0 then redis.call('DEL', lock) end
      add_share(lock, head, math.floor(fence / 1000) + offer_ms, offer_ms, count)
      offered, count = head, count + 1
    end
    head = nil
  end
  drop_foreign(queue)
  return offered, count
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

-- The fence of an acquisition that holds the key alone, and its trace or ''.
local function fence_of(lock, id)
  local value = redis.pcall('HGET', lock, id)
  if not value then return false end
  if type(value) ~= 'table' then
    local fence, trace = string.match(value, '^(%S*) ?(.*)$')
    return fence, #trace <= max_trace and trace or ''
  end
  -- A shared key has no fence, and another type is an error.
  redis.call('ZCARD', lock)
  return false
end

-- The trace of the section that holds the key, for a request with a trace of its own.
local function held_by(lock, trace)
  local page = trace ~= '' and redis.pcall('HSCAN', lock, 0, 'COUNT', 1) or {}
  local value = page[2] and page[2][2]
  return value and #value <= max_trace and string.match(value, '^%S+ (.*)$')
end

-- Has the one that this one replaces ask: the nearest waiter before it, or else the holder. Those
-- before that waiter were notified when it came, and ask once a second.
local function notify_older(lock, queue, ahead)
  local before = ahead > 0 and redis.call('LRANGE', queue, 0, ahead - 1) or {}
  local held = redis.pcall('HSCAN', lock, 0, 'COUNT', 1)[2]
  table.insert(before, 1, held and held[1] or '')
  for i = #before, 1, -1 do
    if is_replaceable(before[i]) then
      redis.call('PUBLISH', inbox(before[i]), '1 revoked 0 ' .. before[i] .. ' ' .. lock)
      return
    end
  end
end

-- Grants the key to `id`, or enqueues it. If `id` holds the key already, by a repeated call or an
-- accepted offer: the same fence, and at least a full lease. A delayed copy never shortens the
-- lease: GT. For GT, a key without a TTL has an infinite one: it gets one here.
local function acquire(lock, queue, id, lease_ms, if_busy, offer_ms, entry_ms, capacity, trace)
  local fence, before = fence_of(lock, id)
  if has_newer(queue, id) and (fence or redis.call('LPOS', queue, id, 'MAXLEN', max_queue)) then
    return {'superseded'}
  end
  if fence then
    local is_longer = redis.call('PEXPIRE', lock, lease_ms, 'GT') == 1
    if not is_longer and redis.call('PTTL', lock) == -1 then redis.call('PEXPIRE', lock, lease_ms) end
    -- A write, although it may change nothing: WAIT covers only what this connection has written,
    -- and another client may have made the offer.
    if not is_longer or before ~= trace then redis.call('HSET', lock, id, with_trace(fence, trace)) end
    return {'granted', fence, before}
  end
  local left = redis.call('PTTL', lock)
  if left == -2 then
    local next = offer(lock, queue, 0, id, offer_ms)
    if not next or next == id then
      -- Its entry may be behind more dead waiters than one call drops.
      if not next then redis.call('LREM', queue, 1, id) end
      fence = next_fence()
      --@raw fence = set_turn(fence, 0)
      redis.call('HSET', lock, id, with_trace(fence, trace))
      redis.call('PEXPIRE', lock, lease_ms)
      return {'granted', fence}
    end
    left = tonumber(offer_ms)
  end
  if if_busy == 'fail' then return {'busy', left, held_by(lock, trace)} end
  local reply = enqueue(queue, id, left, entry_ms, tonumber(capacity))
  if reply[1] == 'queued' then
    reply[4] = held_by(lock, trace)
    if is_replaceable(id) then notify_older(lock, queue, reply[3]) end
  end
  return reply
end
