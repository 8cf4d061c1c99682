-- inspect: who has it, for how long yet, and how many wait. Changes nothing.
--
-- KEYS   1 lock; 2 line
-- reply  {ms left (-1: it has no end; -2: it is free), how many wait, field, value, ..}

local found = {redis.call('PTTL', KEYS[1]), redis.call('LLEN', KEYS[2])}
-- Of a hash of ours it is everything. Of a larger one that a stranger has written it is some of it.
local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
for i = 1, math.min(#fields, 32) do found[i + 2] = fields[i] end
return found
