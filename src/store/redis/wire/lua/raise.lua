-- raise: completes grants on one of several independent servers: gives each the fence that they
-- agree on, and a full lease. It raises the last fence of the server to these fences, also where
-- the acquisition has no grant: every later grant of this server gets a larger one.
--
-- KEYS   n locks; fence
-- ARGV   1 time at which the call expires, as of acquire
--        for each lock: acquisition id; its fence; lease, ms
-- reply  {now, 'expired'}
--        {now, reply ..}, for each lock:
--          the fence of the grant, which is at least that of the call
--          0: not the holder; -1: the fence is a day ahead of the clock
--          {'error', text}

local fence_key = KEYS[#KEYS]
--@include fence.lua
local now = clock()
if #now > #ARGV[1] or #now == #ARGV[1] and now > ARGV[1] then return {now, 'expired'} end

local function is_incomplete(fence)
  return string.sub(fence, -1) == '?'
end

-- PEXPIRE is first, because Redis accepts it when it is out of memory, and then accepts the rest.
local reply, highest = {now}, 0
for i = 1, #KEYS - 1 do
  local id, fence, lease_ms = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local held = redis.pcall('HGET', KEYS[i], id)
  if not is_fence(fence, now) then
    -- As the last fence it would be replaced by the clock, and fences would fall.
    held = -1
  elseif type(held) == 'table' then
    held = {'error', held.err}
  else
    highest = math.max(highest, tonumber(fence))
    if not held then
      held = 0
    elseif is_incomplete(held) then
      redis.call('PEXPIRE', KEYS[i], lease_ms)
    else
      -- A delayed copy never shortens a lease: GT.
      redis.call('PEXPIRE', KEYS[i], lease_ms, 'GT')
    end
  end
  reply[i + 1] = held
end

-- The last fence is raised before a grant is complete.
if highest > 0 then
  local last = redis.pcall('SET', fence_key, text(highest), 'GET')
  if type(last) == 'table' then
    if not string.find(last.err, 'WRONGTYPE', 1, true) then error(last) end
    redis.call('SET', fence_key, text(highest))
  elseif last and is_fence(last, now) and tonumber(last) > highest then
    redis.call('SET', fence_key, last)
  end
end

for i = 1, #KEYS - 1 do
  local held, fence = reply[i + 1], ARGV[3 * i]
  if type(held) == 'string' and (is_incomplete(held) or tonumber(held) < tonumber(fence)) then
    redis.call('HSET', KEYS[i], ARGV[3 * i - 1], fence)
    reply[i + 1] = fence
  end
end
return reply
