-- self_test: executes each command of the other scripts, on keys of its own, and reports the
-- refused ones. It publishes to a channel of the caller, which checks that the message arrives and
-- that the number of receivers is plausible.
--
-- KEYS   1 lock
-- ARGV   1 fence; 2 queue; 3 channel; 4 message
-- reply  {now, number of receivers, invalid fence that was replaced, refusal ..}

local refused = {}
local function try(...)
  local result = redis.pcall(...)
  if type(result) == 'table' and result.err then
    refused[#refused + 1] = (select(1, ...)) .. ': ' .. result.err
    return false
  end
  return result
end

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

local has_time = try('TIME')
local now = has_time and clock() or '0'
local stored, invalid = redis.pcall('SET', ARGV[1], '0', 'NX', 'GET'), ''
if type(stored) == 'string' and has_time and not is_fence(stored, now) then
  invalid = '`' .. string.sub(stored, 1, 40) .. '`'
elseif type(stored) == 'table' and string.find(stored.err, 'WRONGTYPE', 1, true) then
  invalid = 'of another type'
else
  try('SET', ARGV[1], '0', 'NX', 'GET')
end
if invalid ~= '' then try('SET', ARGV[1], now) end
try('EXISTS', KEYS[1], ARGV[2])
try('HSET', KEYS[1], 'a', 1)
try('PEXPIRE', KEYS[1], 1000)
try('PTTL', KEYS[1])
try('HEXISTS', KEYS[1], 'a')
try('HGET', KEYS[1], 'a')
try('HSCAN', KEYS[1], 0, 'COUNT', 16)
try('HDEL', KEYS[1], 'a')
try('RPUSH', ARGV[2], 'a')
try('PEXPIRE', ARGV[2], 1000)
try('LPOS', ARGV[2], 'a')
try('LRANGE', ARGV[2], 0, -1)
try('LLEN', ARGV[2])
try('LREM', ARGV[2], 1, 'a')
try('LPOP', ARGV[2])
try('DEL', KEYS[1], ARGV[2])
try('PUBSUB', 'NUMSUB', ARGV[3])
local receivers = try('PUBLISH', ARGV[3], ARGV[4])
return {now, receivers or 0, invalid, unpack(refused)}
