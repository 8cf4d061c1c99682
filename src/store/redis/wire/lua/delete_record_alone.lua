-- delete_record_alone: deletes the record of a key whose lock is on the other node, while its slot
-- moves.
--
-- KEYS   1 record
-- ARGV   1 acquisition id: only the record that it has left. Absent: any
-- reply  1, or 0: there was none

if ARGV[1] and redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
