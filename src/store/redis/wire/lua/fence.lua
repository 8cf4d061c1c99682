-- Included by every script that may grant a key. Lua numbers are doubles, and `..` prints only 14
-- digits of them: text() formats fences. ARGV[1] of each script is the key of the last fence.

local function text(fence)
  return string.format('%.0f', fence)
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

-- The next fence: larger than each one before it, and at least the clock.
local function next_fence(now)
  local fence = now
  if not fence then
    local t = redis.call('TIME')
    fence = t[1] * 1000000 + t[2]
  end
  local stored = redis.pcall('SET', ARGV[1], text(fence), 'GET')
  if not stored then
    fence_mark = {'fence missing'}
    return fence
  end
  if type(stored) == 'table' then
    if not string.find(stored.err, 'WRONGTYPE', 1, true) then error(stored) end
    redis.call('SET', ARGV[1], text(fence))
    fence_mark = {'fence replaced'}
  elseif not is_fence(stored, fence) then
    fence_mark = {'fence replaced'}
  else
    local last = tonumber(stored)
    if last >= fence then
      fence = math.floor(last) + 1
      redis.call('SET', ARGV[1], text(fence))
    end
  end
  return fence
end
