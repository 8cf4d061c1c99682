-- inspect: the holder of a key, the remaining lease, the number of waiters, and the record. Changes
-- nothing.
--
-- KEYS   1 lock; 2 queue; 3 record
-- ARGV   1 prefix of the channels of processes
-- reply  {ms left (-1: no TTL; -2: free), waiting, ms left of the record (-2: none),
--        subscribers of the holder's process, field, value, ..}

-- A lock of this crate has one field. Of a larger hash only some fields are read.
local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
local subscribers = 0
for i = 1, #fields, 2 do
  local manager = string.match(fields[i], '^(.*):%d+$')
  if manager then subscribers = redis.call('PUBSUB', 'NUMSUB', ARGV[1] .. manager)[2] end
end
local reply =
  {redis.call('PTTL', KEYS[1]), redis.call('LLEN', KEYS[2]), redis.call('PTTL', KEYS[3]), subscribers}
for i = 1, math.min(#fields, 32) do reply[i + 4] = fields[i] end
return reply
