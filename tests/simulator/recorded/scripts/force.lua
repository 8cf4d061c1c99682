-- force: revokes the key from its holder and notifies that one. It stays taken by nobody for a while, so that its holder can stop.
-- A key that only a minimum hold or a lock-delay blocks is freed, but not before the lock-delay of an earlier call is over.
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 ms to keep it taken; 2 offer, ms
-- reply  {'free'}     {'revoked', owner id}     {'unblocked', ms left (-1: it had no end)}
--        each may end in {'healed'}: see fence.lua

-- Included by every script that may grant a key. Numbers are doubles, and `..` prints 14 digits of them: fences are written by text().

local function text(fence)
  return string.format('%.0f', fence)
end

-- No fence of ours is a day ahead of the clock: a stranger has written there, or the clock was set back. (Each test is false for `nan`.)
local function is_sound(stood, now)
  local last = tonumber(stood)
  return last and last < now + 86400000000
end

-- Whether what stood where the last fence stands was replaced by the clock. The reply says so.
local healed = false

-- The next fence: above every one before it, and never behind the clock.
local function mint(fences)
  local t = redis.call('TIME')
  local fence = t[1] * 1000000 + t[2]
  local stood = redis.pcall('SET', fences, text(fence), 'GET')
  if not stood then return fence end
  if type(stood) == 'table' then
    if not string.find(stood.err, 'WRONGTYPE', 1, true) then error(stood) end
    redis.call('SET', fences, text(fence))
    healed = true
  elseif not is_sound(stood, fence) then
    healed = true
  else
    local last = tonumber(stood)
    if last >= fence then
      fence = math.floor(last) + 1
      redis.call('SET', fences, text(fence))
    end
  end
  return fence
end

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

local left = redis.call('PTTL', KEYS[2])
local answer = {'free'}
if left ~= -2 then
  answer = {'unblocked', left}
  local forced
  -- Of a hash of ours it is everything. It is not for us to read all of a larger one.
  local fields = redis.call('HSCAN', KEYS[2], 0, 'COUNT', 16)[2]
  for i = 1, #fields, 2 do
    local id = fields[i]
    if not string.find(id, ':end$') then
      answer = {'revoked', id}
    elseif fields[i + 1] == 'forced' and left ~= -1 and left <= tonumber(ARGV[1]) then
      forced = string.sub(id, 1, -5)
    end
  end
  if forced and answer[1] == 'unblocked' then
    -- Its holder may still run: the message of the earlier call may be lost.
    redis.call('PUBLISH', inbox(forced), '1 taken 0 ' .. forced .. ' ' .. KEYS[2])
    return {'revoked', forced}
  end
  redis.call('DEL', KEYS[2])
end
if answer[1] == 'revoked' then
  local id = answer[2]
  redis.call('PUBLISH', inbox(id), '1 taken 0 ' .. id .. ' ' .. KEYS[2])
  if ARGV[1] ~= '0' then
    redis.call('HSET', KEYS[2], id .. ':end', 'forced')
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
    return answer
  end
end
give_on(KEYS[1], KEYS[2], KEYS[3], false, ARGV[2])
if healed then answer[#answer + 1] = {'healed'} end
return answer
