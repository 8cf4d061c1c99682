-- inspect: the holder of a key, the remaining lease, and the number of waiters. Changes nothing.
--
-- KEYS   1 lock; 2 queue
-- reply  {ms left (-1: no TTL; -2: free), waiting, field, value, ..}

local reply = {redis.call('PTTL', KEYS[1]), redis.call('LLEN', KEYS[2])}
-- A lock of this crate has one field. Of a larger hash only some fields are read.
local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
for i = 1, math.min(#fields, 32) do reply[i + 2] = fields[i] end
return reply
