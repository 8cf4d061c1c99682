-- inspect: the holder of a key, the remaining lease, the number of waiters, and the record. Changes
-- nothing.
--
-- KEYS   1 lock
-- ARGV   on a Cluster: those that cluster.lua removes
--        1 prefix of the inboxes; 2 queue; 3 record
-- reply  {ms left (-1: no TTL; -2: free), waiting, ms left of the record (-2: none),
--        subscribers of the holder's process (-1: not known), field, value, ..}

--@single local beside = redis.call
--@cluster --@include cluster.lua
-- A lock of this crate has one field. Of a larger hash only some fields are read.
local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
local subscribers = 0
for i = 1, #fields, 2 do
  local manager = string.match(fields[i], '^(.*):%d+$')
  -- The process is subscribed to the channel of the other node.
  --@cluster if manager and is_asking then subscribers = -1 manager = nil end
  if manager then subscribers = redis.call('PUBSUB', 'NUMSUB', ARGV[1] .. manager)[2] end
end
local reply =
  {redis.call('PTTL', KEYS[1]), beside('LLEN', ARGV[2]) or 0, beside('PTTL', ARGV[3]) or -2, subscribers}
for i = 1, math.min(#fields, 32) do reply[i + 4] = fields[i] end
return reply
