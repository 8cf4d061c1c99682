-- complete: gives a grant of a slot that moves its fence.
--
-- KEYS   1 lock
-- ARGV   1 acquisition id; 2 fence
-- reply  1, or 0: not the holder

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
