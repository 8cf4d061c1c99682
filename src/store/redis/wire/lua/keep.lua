-- keep: ends an acquisition, and leaves its key to a ticket, under the same fence. A repeated call
-- finds the ticket. Changes nothing of other acquisitions (I1).
--
-- KEYS   1 lock; 2 queue; 3 fence
-- ARGV   1 prefix of the channels of processes; 2 acquisition id; 3 id of the ticket; 4 its lease,
--        ms
-- reply  'freed' or 'not holder'

local lock, id, ticket = KEYS[1], ARGV[2], ARGV[3]
local fence = redis.pcall('HGET', lock, id)
if type(fence) == 'string' then
  -- PEXPIRE is first, because Redis accepts it when it is out of memory, and then accepts the rest.
  -- HSET is before HDEL: the lock never ends in between.
  redis.call('PEXPIRE', lock, ARGV[4])
  redis.call('HSET', lock, ticket, fence)
  redis.call('HDEL', lock, id)
  return 'freed'
end
-- Permits of the key have another type.
local is_other_type = type(fence) == 'table'
if is_other_type and not string.find(fence.err, 'WRONGTYPE', 1, true) then error(fence) end
redis.call('LREM', KEYS[2], 1, id)
return not is_other_type and redis.call('HEXISTS', lock, ticket) == 1 and 'freed' or 'not holder'
