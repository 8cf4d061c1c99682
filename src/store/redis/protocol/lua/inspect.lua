-- inspect: who has it, for how long yet, and how many wait. Changes nothing.
--
-- KEYS   1 lock; 2 line
-- reply  {ms left (-1: it has no end; -2: it is free), how many wait, field, value, ..}

return {redis.call('PTTL', KEYS[1]), redis.call('LLEN', KEYS[2]), unpack(redis.call('HGETALL', KEYS[1]))}
