-- redeem: grants a key to an acquisition in place of its holder, a ticket. A repeated call finds
-- the grant of the first one (I8). No call enqueues.
--
-- KEYS   1 lock; 2 queue; 3 fence
-- ARGV   as of acquire, with the id of the holder in place of what to do if it is busy
-- reply  as of acquire: {now, 'granted', fence}, {now, 'busy', ms left} or {now, 'expired'}

local fence_key = KEYS[3]
--@include fence.lua
local now = clock()
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

local lock, id, lease_ms, ticket = KEYS[1], ARGV[6], ARGV[7], ARGV[8]
local own = redis.pcall('HGET', lock, id)
if type(own) == 'string' then
  -- A delayed copy never shortens the lease.
  redis.call('PEXPIRE', lock, lease_ms, 'GT')
  return {now, 'granted', string.match(own, '^%S*')}
end
-- Permits of the key have another type.
local is_other_type = type(own) == 'table'
if is_other_type and not string.find(own.err, 'WRONGTYPE', 1, true) then error(own) end
if is_other_type or redis.call('HEXISTS', lock, ticket) == 0 then
  return {now, 'busy', redis.call('PTTL', lock)}
end
-- The fence is the first write: without permission for it, nothing has changed.
local fence = next_fence()
redis.call('HSET', lock, id, ARGV[9] == '' and fence or fence .. ' ' .. ARGV[9])
redis.call('HDEL', lock, ticket)
redis.call('PEXPIRE', lock, lease_ms)
return {now, 'granted', fence, fence_mark}
