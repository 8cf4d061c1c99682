-- write_record: leaves the record of a lock whose slot moves. The holder releases the lock
-- afterwards.
--
-- KEYS   1 record
-- ARGV   1 acquisition id; 2 TTL, ms; 3 head; 4 body, or absent
-- reply  1

redis.call('HSET', KEYS[1], 'id', ARGV[1], 'head', ARGV[3])
if ARGV[4] then redis.call('HSET', KEYS[1], 'body', ARGV[4]) else redis.call('HDEL', KEYS[1], 'body') end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
