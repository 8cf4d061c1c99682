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

--@include fence.lua
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
