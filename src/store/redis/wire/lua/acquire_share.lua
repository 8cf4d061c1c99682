-- acquire_share: grants a share of a key, or enqueues. A repeated call finds the share or the queue
-- entry of the first one (I8).
--
-- KEYS   lock; queue; fence
-- ARGV   as of acquire, for one lock
-- reply  as of acquire. The fence is the time of the grant: nothing compares those of shares.

local t = redis.call('TIME')
local now = t[1] .. string.sub('00000', #t[2]) .. t[2]
if #now > #ARGV[2] or #now == #ARGV[2] and now > ARGV[2] then return {now, 'expired'} end

local lock, queue, fence_key, id, lease_ms = KEYS[1], KEYS[2], KEYS[3], ARGV[6], tonumber(ARGV[7])
--@include fence.lua
--@include queue.lua
local now_ms = math.floor(now / 1000)
local count, left = count_places(lock, now_ms), nil
if count then
  local own = count > 0 and redis.call('ZSCORE', lock, id)
  if own then
    -- A delayed copy never shortens a lease: GT.
    if redis.call('ZADD', lock, 'GT', 'CH', now_ms + lease_ms, id) == 0 then
      -- A write, although it changes nothing: WAIT covers only what this connection has written.
      redis.call('PEXPIRE', lock, redis.call('PTTL', lock))
    end
    redis.call('PEXPIRE', lock, lease_ms, 'GT')
    return now
  end
  local next
  next, count = offer(lock, queue, count, id, ARGV[3])
  if next == id or count == 0 then
    -- Its entry may be behind more dead waiters than one call drops.
    if not next then redis.call('LREM', queue, 1, id) end
    add_share(lock, id, now_ms + lease_ms, lease_ms, count)
    -- Those behind it may fit, too.
    offer(lock, queue, count + 1, false, ARGV[3])
    return fence_mark and {now, 'granted', now, fence_mark} or now
  end
  local first = redis.pcall('ZRANGE', lock, 0, 0, 'WITHSCORES')
  -- The key may have been offered to a waiter alone.
  left = first[2] and tonumber(first[2]) - now_ms
else
  -- Another type is an error.
  redis.call('HEXISTS', lock, id)
end
left = left or redis.call('PTTL', lock)
local reply = ARGV[8] == 'fail' and {'busy', left} or enqueue(queue, id, left, ARGV[4], tonumber(ARGV[5]))
if fence_mark then reply[#reply + 1] = fence_mark end
return {now, unpack(reply)}
