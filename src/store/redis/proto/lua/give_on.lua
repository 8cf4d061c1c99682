-- Included by every script that may find a key free: who has it next. KEYS as there: 1 fences; 2 lock; 3 line.
--
-- A line is a list of owner ids and nothing else, its head first. A lock is a hash of one field, owner id -> fence, and
-- always has a TTL. What a section that ended badly leaves is `<owner id>:end`: taken, by nobody.
--
-- fence.lua is included before this.

-- Named beside the fences: everything that belongs to one prefix begins alike.
local function inbox(id)
  return string.sub(KEYS[1], 1, -2) .. 'in:' .. (string.match(id, '^(.*):%d+$') or id)
end

-- No line of ours has so many entries: a stranger has written them. To look through them would take too long, and whoever waits lines up anew.
local function without_garbage(line)
  if redis.call('LLEN', line) > 65536 then redis.call('DEL', line) end
end

-- The key is free. To the first of the line who listens; an entry that nobody listens for is of a dead process. Answers who
-- has its turn: nobody (false), the one who asks and is granted it by the caller (asker), or the one to whom it is offered.
-- I7: first what stands here, then the message.
-- At most 64 dead ones go at a time, so that no script takes long; then the key is as free as if nobody waited.
local function give_on(fences, lock, line, asker, offer_ms)
  without_garbage(line)
  for _ = 1, 64 do
    local head = redis.call('LPOP', line)
    if not head or head == asker then return head end
    local fence = mint(fences)
    if redis.call('PUBLISH', inbox(head), '1 offered ' .. text(fence) .. ' ' .. head .. ' ' .. lock) > 0 then
      redis.call('HSET', lock, head, text(fence))
      redis.call('PEXPIRE', lock, offer_ms)
      return head
    end
  end
  return false
end

-- Entries of dead processes go when a line is full: 32 of them are looked at each time, others the next time. How many are left.
local function without_the_dead(line, waiting)
  local from = redis.call('TIME')[2] % math.ceil(waiting / 32) * 32
  local ids = redis.call('LRANGE', line, from, from + 31)
  local inboxes = {}
  for i, id in ipairs(ids) do inboxes[i] = inbox(id) end
  local listen = redis.call('PUBSUB', 'NUMSUB', unpack(inboxes))
  for i, id in ipairs(ids) do
    if listen[2 * i] == 0 then waiting = waiting - redis.call('LREM', line, 1, id) end
  end
  return waiting
end

local function line_up(line, id, left, place_ms, places)
  without_garbage(line)
  local before = redis.call('LPOS', line, id)
  if not before then
    local waiting = redis.call('LLEN', line)
    if waiting >= places then waiting = without_the_dead(line, waiting) end
    if waiting >= places then return {'full', left, waiting} end
    before = redis.call('RPUSH', line, id) - 1
  end
  redis.call('PEXPIRE', line, place_ms)
  return {'line', left, before}
end

-- What `id` gets. It may have the key already (a repeated question, or an offer it has come for): the same fence, at least a
-- full lease. A copy that runs late never shortens it: GT. For GT a key without a TTL has an infinite one: it gets one here.
local function take(fences, lock, line, id, lease_ms, lines_up, offer_ms, place_ms, places)
  local fence = redis.call('HGET', lock, id)
  if fence then
    local set = redis.call('PEXPIRE', lock, lease_ms, 'GT')
    if set == 0 and redis.call('PTTL', lock) == -1 then redis.call('PEXPIRE', lock, lease_ms) end
    return {'granted', tonumber(fence)}
  end
  local left = redis.call('PTTL', lock)
  if left == -2 then
    local next = give_on(fences, lock, line, id, offer_ms)
    if not next or next == id then
      -- It may stand behind more dead ones than went.
      if not next then redis.call('LREM', line, 1, id) end
      fence = mint(fences)
      redis.call('HSET', lock, id, text(fence))
      redis.call('PEXPIRE', lock, lease_ms)
      return {'granted', fence}
    end
    left = tonumber(offer_ms)
  end
  if lines_up ~= '1' then return {'held', left} end
  return line_up(line, id, left, place_ms, tonumber(places))
end
