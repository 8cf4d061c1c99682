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
