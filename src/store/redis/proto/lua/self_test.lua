-- self_test: does everything the other scripts do, on keys of its own, and says what it may not do. It publishes to the inbox of
-- whoever asks, so that it can be seen whether messages come, and whether their count can be believed.
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 inbox; 2 what to publish there
-- reply  {now, how many have got it, what was no fence where the last one stands, refusal ..}

local refused = {}
local function try(...)
  local got = redis.pcall(...)
  if type(got) == 'table' and got.err then
    refused[#refused + 1] = (select(1, ...)) .. ': ' .. got.err
    return false
  end
  return got
end

--@include fence.lua
local t = try('TIME')
local now = t and t[1] * 1000000 + t[2] or 0
local stood, no_fence = redis.pcall('SET', KEYS[1], '0', 'NX', 'GET'), ''
if type(stood) == 'string' and t and not is_sound(stood, now) then
  no_fence = '`' .. string.sub(stood, 1, 40) .. '`'
elseif type(stood) == 'table' and string.find(stood.err, 'WRONGTYPE', 1, true) then
  no_fence = 'of another type'
else
  try('SET', KEYS[1], '0', 'NX', 'GET')
end
if no_fence ~= '' then try('SET', KEYS[1], text(now)) end
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
local got_it = try('PUBLISH', ARGV[1], ARGV[2])
return {now, got_it or 0, no_fence, unpack(refused)}
