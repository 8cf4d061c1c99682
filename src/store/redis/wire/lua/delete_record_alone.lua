-- delete_record_alone: deletes the record of a key whose lock is on the other node, while its slot
-- moves.
--
-- KEYS   1 record
-- reply  1, or 0: there was none

return redis.call('DEL', KEYS[1])
