-- Included by the scripts of raw keys: messages to Redisson, and turns for it. The lines after
-- `--@raw` are only in these scripts: composed keys have other ones.
--
-- A thread of Redisson that waits is subscribed to the channel of its lock, and asks after each
-- message there. A process that waits is subscribed to that channel, too, and to one beside it, so
-- that the difference of their subscribers is the number of other programs that wait.
--
-- Other programs do not use the queue. So the processes in it must let them have their turn: a
-- waiter that finds the key free gets an even fence, an offer at a release has an odd one, and a
-- release of an odd fence reserves the key for other programs, if one of them waits. At least every
-- second release does.

-- The reservation is the last key. Three arguments precede the others: the channel of Redisson, the
-- channel beside it, and '1' on a Cluster, where Redisson may use the sharded channel. This crate
-- never does.
local reservation = table.remove(KEYS)
local channel, own_channel, is_sharded = table.remove(ARGV, 1), table.remove(ARGV, 1), table.remove(ARGV, 1) == '1'

-- How long a key is reserved. Redisson needs a round trip and a thread that runs. A waiter that
-- enqueues later, when the key is free again, waits for the rest of this time.
local reserved_ms = 30

local function others_wait()
  local subscribers = redis.call('PUBSUB', 'NUMSUB', channel, own_channel)
  local sharded = is_sharded and redis.pcall('PUBSUB', 'SHARDNUMSUB', channel)
  if sharded and not sharded.err and sharded[2] > 0 then return true end
  return subscribers[2] > subscribers[4]
end

local function is_odd(fence)
  return type(fence) == 'string' and string.find(fence, '[13579]$') ~= nil
end

-- Wakes the waiters of Redisson. It decodes no other text than a number. Without permission for the
-- channel they wait until the TTL that they saw.
local function announce()
  redis.pcall('PUBLISH', channel, '0')
  if is_sharded then redis.pcall('SPUBLISH', channel, '0') end
end

-- Reserves a key without a holder for other programs. The reservation ends with the first poll of a
-- waiter, so its process must not poll because of this message, but because of the next one.
local function reserve()
  redis.call('SET', reservation, 1, 'PX', reserved_ms)
  redis.pcall('PUBLISH', own_channel, 'reserved')
  announce()
end

-- Whether the holder of this fence lets other programs have their turn.
local function must_reserve(fence)
  return is_odd(fence) and others_wait()
end

-- A key is free, and no process waits for it.
local function leave_free()
  if others_wait() then reserve() else announce() end
end
