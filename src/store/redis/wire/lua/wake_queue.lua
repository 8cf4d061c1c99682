-- wake_queue: sends a hint to the first waiter of a key whose lock was freed on the other node,
-- while its slot moves.
--
-- KEYS   1 queue
-- ARGV   1 prefix of the channels of processes; 2 lock
-- reply  1, or 0: the queue is empty

local head = redis.call('LRANGE', KEYS[1], 0, 0)[1]
if not head then return 0 end
local channel = ARGV[1] .. (string.match(head, '^(.*):%d+$') or head)
redis.call('PUBLISH', channel, '1 offered 0 ' .. head .. ' ' .. ARGV[2])
return 1
