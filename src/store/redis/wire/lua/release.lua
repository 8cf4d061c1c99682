-- release: ends acquisitions: releases the key that each holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, if one is left
--        for each further request, none of which has a record: lock; queue
-- ARGV   1 acquisition id; 2 block, ms; 3 lease of an offer, ms; 4 TTL of the record, ms;
--        5 its head; 6 its body, or absent
--        for each further request, from 4 on: acquisition id; block, ms
-- reply  {'freed'}: all keys
--        {'handed on'}, {'not owner'} or {'recorded before'}
--        {'each', reply ..} of several requests: as above, or {'error', text}
--        Each may end in {'healed'}: see fence.lua

-- A key of another type holds nothing of this acquisition, and its error would be permanent. Any
-- other error is returned, and the caller repeats the release.
local function ignore_wrong_type(command, ...)
  local result = redis.pcall(command, ...)
  if type(result) == 'table' and result.err then
    if not string.find(result.err, 'WRONGTYPE', 1, true) then error(result) end
    return 0
  end
  return result
end

-- With a record, the key is released only if the record is stored: an error changes nothing.
local has_record = #KEYS == 4
if has_record and ignore_wrong_type('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  redis.call('HSET', KEYS[4], 'id', ARGV[1], 'head', ARGV[5])
  if ARGV[6] then redis.call('HSET', KEYS[4], 'body', ARGV[6]) else redis.call('HDEL', KEYS[4], 'body') end
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end

-- HDEL is first, because Redis accepts it when it is out of memory, and then accepts the writes of
-- the rest of the script, too.
local held = {ignore_wrong_type('HDEL', KEYS[2], ARGV[1])}
local queues = {KEYS[3]}
local all_freed = held[1] == 1 and ARGV[2] == '0'
for i = 2, (#KEYS - 1) / 2 do
  held[i] = ignore_wrong_type('HDEL', KEYS[2 * i], ARGV[2 * i])
  queues[i] = KEYS[2 * i + 1]
  all_freed = all_freed and held[i] == 1 and ARGV[2 * i + 1] == '0'
end
-- The first waiter of a single queue: to take it is one command less than to look first.
local first
if all_freed and #queues == 1 then
  first = redis.call('LPOP', queues[1])
  if not first then return {'freed'} end
elseif all_freed and redis.call('EXISTS', unpack(queues)) == 0 then
  return {'freed'}
end

--@include fence.lua
--@include queue.lua
local function finish(i, id, block_ms)
  local lock, queue = KEYS[2 * i], queues[i]
  if held[i] ~= 1 then
    ignore_wrong_type('LREM', queue, 1, id)
    if has_record and redis.call('HGET', KEYS[4], 'id') == id then return {'recorded before'} end
    return {'not owner'}
  end
  if block_ms ~= '0' then
    redis.call('HSET', lock, id .. ':end', 1)
    redis.call('PEXPIRE', lock, block_ms)
    return {'freed'}
  end
  return {offer_next(KEYS[1], lock, queue, false, ARGV[3], first) and 'handed on' or 'freed'}
end

local reply
if #queues == 1 then
  reply = finish(1, ARGV[1], ARGV[2])
else
  -- A queue of another type fails alone: the others would be left without their blocks and offers,
  -- and a repeated call could not make up for it.
  local function finish_one(i, id, block_ms)
    local ok, one = pcall(finish, i, id, block_ms)
    if ok then return one end
    local text = type(one) == 'table' and one.err or tostring(one)
    if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
    return {'error', text}
  end
  reply = {'each', finish_one(1, ARGV[1], ARGV[2])}
  for i = 2, #queues do reply[i + 1] = finish_one(i, ARGV[2 * i], ARGV[2 * i + 1]) end
end
if replaced then reply[#reply + 1] = {'healed'} end
return reply
