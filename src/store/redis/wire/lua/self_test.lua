-- self_test: executes each command of the other scripts, on keys of its own, and reports the
-- refused ones. It publishes to a channel of the caller, which checks that the message arrives and
-- that the number of receivers is plausible.
--
-- KEYS   1 lock; 2 queue; 3 fence
-- ARGV   1 channel; 2 message
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

local fence_key = KEYS[3]
--@include fence.lua
local has_time = try('TIME')
local now = has_time and clock() or '0'
local stored, invalid = redis.pcall('SET', fence_key, '0', 'NX', 'GET'), ''
if type(stored) == 'string' and has_time and not is_fence(stored, now) then
  invalid = '`' .. string.sub(stored, 1, 40) .. '`'
elseif type(stored) == 'table' and string.find(stored.err, 'WRONGTYPE', 1, true) then
  invalid = 'of another type'
else
  try('SET', fence_key, '0', 'NX', 'GET')
end
if invalid ~= '' then try('SET', fence_key, now) end
try('EXISTS', KEYS[1], KEYS[2])
try('HSET', KEYS[1], 'a', 1)
try('PEXPIRE', KEYS[1], 1000)
try('PTTL', KEYS[1])
try('HEXISTS', KEYS[1], 'a')
try('HGET', KEYS[1], 'a')
try('HSCAN', KEYS[1], 0, 'COUNT', 16)
try('HDEL', KEYS[1], 'a')
try('ZADD', KEYS[1], 1, 'a')
try('ZSCORE', KEYS[1], 'a')
try('ZCARD', KEYS[1])
try('ZRANGE', KEYS[1], 0, 0)
try('ZREM', KEYS[1], 'a')
try('ZREMRANGEBYSCORE', KEYS[1], '-inf', 1)
try('RPUSH', KEYS[2], 'a')
try('PEXPIRE', KEYS[2], 1000)
try('LPOS', KEYS[2], 'a')
try('LRANGE', KEYS[2], 0, -1)
try('LLEN', KEYS[2])
try('LREM', KEYS[2], 1, 'a')
try('LPOP', KEYS[2])
try('DEL', KEYS[1], KEYS[2])
try('PUBSUB', 'NUMSUB', ARGV[1])
local receivers = try('PUBLISH', ARGV[1], ARGV[2])
return {now, receivers or 0, invalid, unpack(refused)}
