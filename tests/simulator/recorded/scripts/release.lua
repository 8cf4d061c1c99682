-- release: ends acquisitions: releases the key that each holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   n locks
-- ARGV   of a raw key: its names, which raw.lua removes
--        1 fence; 2 lease of an offer, ms
--        for each lock: acquisition id; block, ms
--        for each lock: its queue
--        if the holder of a single lock leaves a record: the record; its TTL, ms; its head; its
--        body, or absent
-- reply  'freed': all keys
--        {'freed'}, {'handed off'}, {'not holder'} or {'recorded before'}
--        {'each', reply ..} of several requests: as above, or {'error', text}
--        Each may end in a mark of the fence: see fence.lua

-- The fast path of almost every release: no record, no block, no waiter. HDEL is first, because
-- Redis accepts it when it is out of memory, and then accepts the writes of the rest of the script,
-- too. To take the first waiter is one command less than to look first. If the script ends between
-- the two, the key is free: its waiters poll, and a repeated release finds nothing to do.
local n = #KEYS
local held, first = {}, nil
if n == 1 and ARGV[4] == '0' and not ARGV[6] then
  held[1] = redis.pcall('HDEL', KEYS[1], ARGV[3])
  if held[1] == 1 then
    first = redis.call('LPOP', ARGV[5])
    if not first then return 'freed' end
  end
end

-- A key of another type holds nothing of this acquisition, and its error would be permanent. Any
-- other error is returned, and the caller repeats the release.
local function ignore_wrong_type(result)
  if type(result) == 'table' and result.err then
    if not string.find(result.err, 'WRONGTYPE', 1, true) then error(result) end
    return 0
  end
  return result
end

-- With a record, the key is released only if the record is stored: an error changes nothing.
local record = n == 1 and ARGV[6]
if record and ignore_wrong_type(redis.pcall('HEXISTS', KEYS[1], ARGV[3])) == 1 then
  redis.call('HSET', record, 'id', ARGV[3], 'head', ARGV[8])
  if ARGV[9] then redis.call('HSET', record, 'body', ARGV[9]) else redis.call('HDEL', record, 'body') end
  redis.call('PEXPIRE', record, ARGV[7])
end

-- All keys are blocked before the first queue is read: an error at a queue leaves free keys, whose
-- waiters poll, and no key without its block (I10).
local all_freed, pcall_redis = true, redis.pcall
for i = 1, n do
  held[i] = held[i] or pcall_redis('HDEL', KEYS[i], ARGV[2 * i + 1])
  if held[i] ~= 1 then held[i] = ignore_wrong_type(held[i]) end
  local has_block = ARGV[2 * i + 2] ~= '0'
  if held[i] == 1 and has_block then
    redis.call('HSET', KEYS[i], ARGV[2 * i + 1] .. ':end', 1)
    redis.call('PEXPIRE', KEYS[i], ARGV[2 * i + 2])
  end
  all_freed = all_freed and held[i] == 1 and not has_block
end
if n > 1 and all_freed and redis.call('EXISTS', unpack(ARGV, 2 * n + 3)) == 0 then return 'freed' end

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

local function finish(i)
  local lock, queue, id, block_ms = KEYS[i], ARGV[2 * n + 2 + i], ARGV[2 * i + 1], ARGV[2 * i + 2]
  if held[i] ~= 1 then
    ignore_wrong_type(redis.pcall('LREM', queue, 1, id))
    if record and redis.call('HGET', record, 'id') == id then return {'recorded before'} end
    return {'not holder'}
  end
  if block_ms ~= '0' then return {'freed'} end
  if offer_next(lock, queue, false, ARGV[2], first) then return {'handed off'} end
  return {'freed'}
end

local reply
if n == 1 then
  reply = finish(1)
else
  -- A queue of another type fails alone: the others would be left without their blocks and offers,
  -- and a repeated call could not make up for it.
  local function finish_one(i)
    local ok, one = pcall(finish, i)
    if ok then return one end
    local text = type(one) == 'table' and one.err or tostring(one)
    if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
    return {'error', text}
  end
  reply = {'each'}
  for i = 1, n do reply[i + 1] = finish_one(i) end
end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
