-- Included by every script that may grant a key. `fence_key` of each script is the key of the last
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
    redis.call('SET', fence_key, now)
    fence_mark = {'fence replaced'}
  elseif not is_fence(stored, now) then
    fence_mark = {'fence replaced'}
  elseif tonumber(stored) >= tonumber(now) then
    now = text(math.floor(tonumber(stored)) + 1)
    redis.call('SET', fence_key, now)
  end
  return now
end

local function next_fence()
  local now = clock()
  return fence_after(redis.pcall('SET', fence_key, now, 'GET'), now)
end
