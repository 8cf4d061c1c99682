-- self_test: executes each command of the other scripts, on keys of its own, and reports the
-- refused ones. It publishes to a channel of the caller, which checks that the message arrives and
-- that the number of receivers is plausible.
--
-- KEYS   1 fence; 2 lock; 3 queue
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

--@include fence.lua
local t = try('TIME')
local now = t and t[1] * 1000000 + t[2] or 0
local stored, invalid = redis.pcall('SET', KEYS[1], '0', 'NX', 'GET'), ''
if type(stored) == 'string' and t and not is_fence(stored, now) then
  invalid = '`' .. string.sub(stored, 1, 40) .. '`'
elseif type(stored) == 'table' and string.find(stored.err, 'WRONGTYPE', 1, true) then
  invalid = 'of another type'
else
  try('SET', KEYS[1], '0', 'NX', 'GET')
end
if invalid ~= '' then try('SET', KEYS[1], text(now)) end
try('EXISTS', KEYS[2], KEYS[3])
try('HSET', KEYS[2], 'a', 1)
try('PEXPIRE', KEYS[2], 1000)
try('PTTL', KEYS[2])
try('HEXISTS', KEYS[2], 'a')
try('HGET', KEYS[2], 'a')
try('HSCAN', KEYS[2], 0, 'COUNT', 16)
try('HDEL', KEYS[2], 'a')
try('RPUSH', KEYS[3], 'a')
try('PEXPIRE', KEYS[3], 1000)
try('LPOS', KEYS[3], 'a')
try('LRANGE', KEYS[3], 0, -1)
try('LLEN', KEYS[3])
try('LREM', KEYS[3], 1, 'a')
try('LPOP', KEYS[3])
try('DEL', KEYS[2], KEYS[3])
try('PUBSUB', 'NUMSUB', ARGV[1])
local receivers = try('PUBLISH', ARGV[1], ARGV[2])
return {now, receivers or 0, invalid, unpack(refused)}
