-- Included by every script that may find a key free: who has it next. KEYS as there: 1 fences; 2 lock; 3 line.
--
-- A line is a list of owner ids and nothing else, its head first. A lock is a hash of one field, owner id -> fence, and
-- always has a TTL. What a section that ended badly leaves is `<owner id>:end`: taken, by nobody.
--
-- Numbers are doubles, and `..` prints 14 digits of them: fences are written by text().

local function text(fence)
  return string.format('%.0f', fence)
end

local function inbox(id)
  return 'tower-lock:in:' .. (string.match(id, '^(.*):%d+$') or id)
end

-- The next fence: above every one before it, and never behind the clock.
local function mint(fences)
  local t = redis.call('TIME')
  local fence = t[1] * 1000000 + t[2]
  local last = tonumber(redis.call('SET', fences, text(fence), 'GET') or 0)
  if last >= fence then
    fence = last + 1
    redis.call('SET', fences, text(fence))
  end
  return fence
end

-- The key is free. To the first of the line who listens; an entry that nobody listens for is of a dead process. Answers who
-- has its turn: nobody (false), the one who asks and is granted it by the caller (asker), or the one to whom it is offered.
-- I7: first what stands here, then the message.
local function give_on(fences, lock, line, asker, offer_ms)
  local head = redis.call('LPOP', line)
  while head and head ~= asker do
    local fence = mint(fences)
    if redis.call('PUBLISH', inbox(head), '1 offered ' .. text(fence) .. ' ' .. head .. ' ' .. lock) > 0 then
      redis.call('HSET', lock, head, text(fence))
      redis.call('PEXPIRE', lock, offer_ms)
      return head
    end
    head = redis.call('LPOP', line)
  end
  return head
end

-- Entries of dead processes go when a line is full. How many are left.
local function without_the_dead(line)
  for _, id in ipairs(redis.call('LRANGE', line, 0, -1)) do
    if redis.call('PUBSUB', 'NUMSUB', inbox(id))[2] == 0 then redis.call('LREM', line, 1, id) end
  end
  return redis.call('LLEN', line)
end

local function line_up(line, id, left, place_ms, places)
  local before = redis.call('LPOS', line, id)
  if not before then
    local waiting = redis.call('LLEN', line)
    if waiting >= places then waiting = without_the_dead(line) end
    if waiting >= places then return {'full', left, waiting} end
    before = redis.call('RPUSH', line, id) - 1
  end
  redis.call('PEXPIRE', line, place_ms)
  return {'line', left, before}
end

-- What `id` gets. It may have the key already (a repeated question, or an offer it has come for): the same fence, a full lease.
local function take(fences, lock, line, id, lease_ms, lines_up, offer_ms, place_ms, places)
  local fence = redis.call('HGET', lock, id)
  if fence then
    redis.call('PEXPIRE', lock, lease_ms)
    return {'granted', tonumber(fence)}
  end
  local left = redis.call('PTTL', lock)
  if left == -2 then
    local next = give_on(fences, lock, line, id, offer_ms)
    if not next or next == id then
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
