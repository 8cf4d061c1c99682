-- release: ends acquisitions: releases the key that each holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, if one is left
--        for each further request, none of which has a record: lock; queue
-- ARGV   1 acquisition id; 2 block, ms; 3 lease of an offer, ms; 4 TTL of the record, ms;
--        5 its head; 6 its body, or absent
--        for each further request, from 4 on: acquisition id; block, ms
-- reply  {'freed'}: all keys
--        {'handed on'}, {'not owner'} or {'recorded before'}
--        {'each', reply ..} of several requests: as above, or {'error', text}
--        Each may end in {'healed'}: see fence.lua

-- A key of another type holds nothing of this acquisition, and its error would be permanent. Any
-- other error is returned, and the caller repeats the release.
local function ignore_wrong_type(command, ...)
  local result = redis.pcall(command, ...)
  if type(result) == 'table' and result.err then
    if not string.find(result.err, 'WRONGTYPE', 1, true) then error(result) end
    return 0
  end
  return result
end

-- With a record, the key is released only if the record is stored: an error changes nothing.
local has_record = #KEYS == 4
if has_record and ignore_wrong_type('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  redis.call('HSET', KEYS[4], 'id', ARGV[1], 'head', ARGV[5])
  if ARGV[6] then redis.call('HSET', KEYS[4], 'body', ARGV[6]) else redis.call('HDEL', KEYS[4], 'body') end
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end

-- HDEL is first, because Redis accepts it when it is out of memory, and then accepts the writes of
-- the rest of the script, too.
local held = {ignore_wrong_type('HDEL', KEYS[2], ARGV[1])}
local queues = {KEYS[3]}
local all_freed = held[1] == 1 and ARGV[2] == '0'
for i = 2, (#KEYS - 1) / 2 do
  held[i] = ignore_wrong_type('HDEL', KEYS[2 * i], ARGV[2 * i])
  queues[i] = KEYS[2 * i + 1]
  all_freed = all_freed and held[i] == 1 and ARGV[2 * i + 1] == '0'
end
-- The first waiter of a single queue: to take it is one command less than to look first.
local first
if all_freed and #queues == 1 then
  first = redis.call('LPOP', queues[1])
  if not first then return {'freed'} end
elseif all_freed and redis.call('EXISTS', unpack(queues)) == 0 then
  return {'freed'}
end

-- Included by every script that may grant a key. Lua numbers are doubles, and `..` prints only 14
-- digits of them: text() formats fences.

local function text(fence)
  return string.format('%.0f', fence)
end

-- Whether a stored value is a fence. A value of a day ahead of the clock was written by another
-- program, or the clock was set back. (Each comparison is false for `nan`.)
local function is_fence(stored, now)
  local last = tonumber(stored)
  return last and last < now + 86400000000
end

-- Whether an invalid fence was replaced by the clock. The reply then ends in {'healed'}.
local replaced = false

-- The next fence: larger than each one before it, and at least the clock.
local function next_fence(key, now)
  local fence = now
  if not fence then
    local t = redis.call('TIME')
    fence = t[1] * 1000000 + t[2]
  end
  local stored = redis.pcall('SET', key, text(fence), 'GET')
  if not stored then return fence end
  if type(stored) == 'table' then
    if not string.find(stored.err, 'WRONGTYPE', 1, true) then error(stored) end
    redis.call('SET', key, text(fence))
    replaced = true
  elseif not is_fence(stored, fence) then
    replaced = true
  else
    local last = tonumber(stored)
    if last >= fence then
      fence = math.floor(last) + 1
      redis.call('SET', key, text(fence))
    end
  end
  return fence
end

-- Included by every script that may find a key free: offers, queue entries and grants. It needs
-- fence.lua. KEYS as in the script: 1 fence; 2 lock; 3 queue.
--
-- A queue is a list of acquisition ids, its first waiter at the head. A lock is a hash of one
-- field, acquisition id -> fence, and always has a TTL. A blocked lock has the field `<acquisition
-- id>:end`: it has no holder.

-- The channel of a process. Its name has the prefix of the name of the fence.
local function inbox(id)
  return string.sub(KEYS[1], 1, -2) .. 'in:' .. (string.match(id, '^(.*):%d+$') or id)
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
local function offer_next(fence_key, lock, queue, requester, offer_ms, head)
  for _ = 1, 64 do
    head = head or redis.call('LPOP', queue)
    if not head or head == requester then return head end
    local fence = next_fence(fence_key)
    if redis.call('PUBLISH', inbox(head), '1 offered ' .. text(fence) .. ' ' .. head .. ' ' .. lock) > 0 then
      redis.call('HSET', lock, head, text(fence))
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
  return {'line', left, ahead}
end

-- Grants the key to `id`, or enqueues it. If `id` holds the key already, by a repeated call or an
-- accepted offer: the same fence, and at least a full lease. A delayed copy never shortens the
-- lease: GT. For GT, a key without a TTL has an infinite one: it gets one here.
local function acquire(fence_key, lock, queue, id, lease_ms, if_busy, offer_ms, entry_ms, capacity)
  local fence = redis.call('HGET', lock, id)
  if fence then
    if redis.call('PEXPIRE', lock, lease_ms, 'GT') == 0 then
      if redis.call('PTTL', lock) == -1 then redis.call('PEXPIRE', lock, lease_ms) end
      -- A write, although it changes nothing: WAIT covers only what this connection has written,
      -- and another client may have made the offer.
      redis.call('HSET', lock, id, fence)
    end
    return {'granted', tonumber(fence)}
  end
  local left = redis.call('PTTL', lock)
  if left == -2 then
    local next = offer_next(fence_key, lock, queue, id, offer_ms)
    if not next or next == id then
      -- Its entry may be behind more dead waiters than one call drops.
      if not next then redis.call('LREM', queue, 1, id) end
      fence = next_fence(fence_key)
      redis.call('HSET', lock, id, text(fence))
      redis.call('PEXPIRE', lock, lease_ms)
      return {'granted', fence}
    end
    left = tonumber(offer_ms)
  end
  if if_busy ~= '1' then return {'held', left} end
  return enqueue(queue, id, left, entry_ms, tonumber(capacity))
end

local function finish(i, id, block_ms)
  local lock, queue = KEYS[2 * i], queues[i]
  if held[i] ~= 1 then
    ignore_wrong_type('LREM', queue, 1, id)
    if has_record and redis.call('HGET', KEYS[4], 'id') == id then return {'recorded before'} end
    return {'not owner'}
  end
  if block_ms ~= '0' then
    redis.call('HSET', lock, id .. ':end', 1)
    redis.call('PEXPIRE', lock, block_ms)
    return {'freed'}
  end
  return {offer_next(KEYS[1], lock, queue, false, ARGV[3], first) and 'handed on' or 'freed'}
end

local reply
if #queues == 1 then
  reply = finish(1, ARGV[1], ARGV[2])
else
  -- A queue of another type fails alone: the others would be left without their blocks and offers,
  -- and a repeated call could not make up for it.
  local function finish_one(i, id, block_ms)
    local ok, one = pcall(finish, i, id, block_ms)
    if ok then return one end
    local text = type(one) == 'table' and one.err or tostring(one)
    if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
    return {'error', text}
  end
  reply = {'each', finish_one(1, ARGV[1], ARGV[2])}
  for i = 2, #queues do reply[i + 1] = finish_one(i, ARGV[2 * i], ARGV[2 * i + 1]) end
end
if replaced then reply[#reply + 1] = {'healed'} end
return reply
