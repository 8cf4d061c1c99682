-- leave_queue: removes the entry of an acquisition whose lock is on the other node, while its slot
-- moves.
--
-- KEYS   1 queue
-- ARGV   1 acquisition id
-- reply  1, or 0: there was none

return redis.call('LREM', KEYS[1], 1, ARGV[1])
