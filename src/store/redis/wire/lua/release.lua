-- release: ends acquisitions: releases the key that each holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   n locks; their queues; the record of a single lock, if its holder leaves one; fence
--        of a raw key: its reservation, which raw.lua removes
-- ARGV   of a raw key: those that raw.lua removes
--        1 prefix of the channels of processes; 2 lease of an offer, ms
--        for each lock: acquisition id; block, ms; trace of the section, or ''
--        with a record: its TTL, ms; its head; its body, or absent
-- reply  'freed': all keys
--        {'freed'}, {'handed off'}, {'not holder'} or {'recorded before'}
--        {'each', reply ..} of several requests: as above, or {'error', text}
--        Each may end in a mark of the fence: see fence.lua

-- The fast path of almost every release: no record, no block, no waiter. HDEL is first, because
-- Redis accepts it when it is out of memory, and then accepts the writes of the rest of the script,
-- too. To take the first waiter is one command less than to look first. If the script ends between
-- the two, the key is free: its waiters poll, and a repeated release finds nothing to do.
--@raw --@include raw.lua
local n, fence_key = math.floor((#KEYS - 1) / 2), KEYS[#KEYS]
local record = n == 1 and KEYS[4] and KEYS[3]
local held, is_other_type, first = {}, {}, nil
--@raw local fence = redis.pcall('HGET', KEYS[1], ARGV[3])
if n == 1 and ARGV[4] == '0' and not record then
  held[1] = redis.pcall('HDEL', KEYS[1], ARGV[3])
  if held[1] == 1 then
    --@raw if must_reserve(fence) then reserve() return 'freed' end
    first = redis.call('LPOP', KEYS[2])
    --@raw if not first then leave_free() end
    if not first then return 'freed' end
  end
end

-- A key of another type holds nothing of this acquisition, and its error would be permanent. Any
-- other error is returned, and the caller repeats the release.
local function ignore_wrong_type(result)
  if type(result) == 'table' and result.err then
    if not string.find(result.err, 'WRONGTYPE', 1, true) then error(result) end
    return 0
  end
  return result
end

-- With a record, the key is released only if the record is stored: an error changes nothing.
if record and ignore_wrong_type(redis.pcall('HEXISTS', KEYS[1], ARGV[3])) == 1 then
  redis.call('HSET', record, 'id', ARGV[3], 'head', ARGV[7])
  if ARGV[8] then redis.call('HSET', record, 'body', ARGV[8]) else redis.call('HDEL', record, 'body') end
  redis.call('PEXPIRE', record, ARGV[6])
end

-- All keys are blocked before the first queue is read: an error at a queue leaves free keys, whose
-- waiters poll, and no key without its block (I10).
local all_freed, pcall_redis = true, redis.pcall
for i = 1, n do
  local id, block_ms = ARGV[3 * i], ARGV[3 * i + 1]
  local has_block = block_ms ~= '0'
  -- Before HDEL: a lock that was deleted cannot be made again while its slot moves. PEXPIRE is
  -- first, because Redis accepts it when it is out of memory, too.
  if has_block and pcall_redis('HEXISTS', KEYS[i], id) == 1 then
    redis.call('PEXPIRE', KEYS[i], block_ms)
    redis.call('HSET', KEYS[i], id .. ':end', 1)
  end
  held[i] = held[i] or pcall_redis('HDEL', KEYS[i], id)
  if held[i] ~= 1 then
    is_other_type[i] = type(held[i]) == 'table'
    held[i] = ignore_wrong_type(held[i])
  end
  all_freed = all_freed and held[i] == 1 and not has_block
end
if n > 1 and all_freed and redis.call('EXISTS', unpack(KEYS, n + 1, 2 * n)) == 0 then return 'freed' end

--@include fence.lua
--@include queue.lua
local function finish(i)
  local lock, queue, id, block_ms = KEYS[i], KEYS[n + i], ARGV[3 * i], ARGV[3 * i + 1]
  if held[i] ~= 1 then
    ignore_wrong_type(redis.pcall('LREM', queue, 1, id))
    -- The waiters behind it may fit beside the holders of a shared key.
    local count = is_other_type[i] and count_places(lock, math.floor(clock() / 1000))
    if count and count > 0 then offer(lock, queue, count, false, ARGV[2]) end
    local left_by = record and redis.call('HGET', record, 'id')
    if record and left_by == id then return {'recorded before'} end
    return {'not holder'}
  end
  --@raw if block_ms ~= '0' then announce() end
  if block_ms ~= '0' then return {'freed'} end
  --@raw if must_reserve(fence) then reserve() return {'freed'} end
  ended = ARGV[3 * i + 2]
  if offer(lock, queue, 0, false, ARGV[2], first) then return {'handed off'} end
  --@raw leave_free()
  return {'freed'}
end

local reply
if n == 1 then
  reply = finish(1)
else
  --@include each.lua
  reply = for_each(n, finish, {'each'})
end
if fence_mark then reply[#reply + 1] = fence_mark end
return reply
