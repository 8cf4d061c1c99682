-- Included by the scripts of a Cluster. There, a call is refused if its declared keys may be on two
-- nodes, so that the lock is the only one. Of a slot that moves, the queue, the fence or the record
-- may be on the other node: a command for it fails in the middle of the script, and what was
-- executed before must be a complete step.
--
-- A call that was sent with ASKING is executed by the node to which the slot moves. It makes
-- nothing but the lock: a fence, a queue or a record that the former node also has would stop the
-- move (`BUSYKEY`). So its waiters poll, and its fence is incomplete: it ends in `?`, and the
-- caller completes the grant before it counts (complete.lua).

-- They precede the other arguments: the prefix of the channels of processes at this node, and
-- whether the call was sent with ASKING.
local inbox_prefix, is_asking = table.remove(ARGV, 1), table.remove(ARGV, 1) == '1'
-- The queue was needed, and is on the other node.
local is_queue_elsewhere = false
-- The record was needed, and may be on the other node.
local is_record_unknown = false

-- Redis 8 and Valkey 8 have another text if the command names several keys, and some are here.
local function is_elsewhere(result)
  local text = type(result) == 'table' and result.err
  return text and (string.find(text, 'non local key', 1, true) or string.find(text, 'rehashing of the slot', 1, true))
end

-- A command for a key beside the lock. The result is nil if that key is on the other node.
local function beside(...)
  local result = redis.pcall(...)
  if is_elsewhere(result) then return nil end
  if type(result) == 'table' and result.err then error(result) end
  return result
end

-- A grant beside a record that may be elsewhere is incomplete, too.
local function mark_unknown_record(reply)
  if is_record_unknown and reply[1] == 'granted' and tonumber(reply[2]) then reply[2] = reply[2] .. '?' end
end
