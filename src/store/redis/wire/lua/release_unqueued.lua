-- release_unqueued: releases those of several keys of a Cluster that are held and have no waiters.
-- It changes nothing of the others: each of them has a call of its own.
--
-- No key is declared, as in acquire_free.lua. The first command succeeds with 0 only if the slot is
-- on this node and does not move: so the queue is not on another node, and the lock is here.
--
-- ARGV   for each lock: its name; its queue; acquisition id
-- reply  'freed': all keys
--        {position ..}: those at these positions, from 1, are not released, and all others are

local run, reply = redis.pcall, {}
for i = 1, #ARGV, 3 do
  local is_unqueued = run('EXISTS', ARGV[i + 1]) == 0
  if not is_unqueued or run('HDEL', ARGV[i], ARGV[i + 2]) ~= 1 then reply[#reply + 1] = (i + 2) / 3 end
end
return reply[1] and reply or 'freed'
