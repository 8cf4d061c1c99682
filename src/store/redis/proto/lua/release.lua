-- release: ends an acquisition: releases the key that it holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   1 fence; 2 lock; 3 queue; 4 record, if one is left
-- ARGV   1 acquisition id; 2 block, ms; 3 lease of an offer, ms; 4 TTL of the record, ms;
--        5 its head; 6 its body, or absent
-- reply  {'freed'}, {'handed on'}, {'not owner'} or {'recorded before'}; each may end in
--        {'healed'}: see fence.lua

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
if KEYS[4] and ignore_wrong_type('HEXISTS', KEYS[2], ARGV[1]) == 1 then
  redis.call('HSET', KEYS[4], 'id', ARGV[1], 'head', ARGV[5])
  if ARGV[6] then redis.call('HSET', KEYS[4], 'body', ARGV[6]) else redis.call('HDEL', KEYS[4], 'body') end
  redis.call('PEXPIRE', KEYS[4], ARGV[4])
end
-- HDEL is first, because Redis accepts it when it is out of memory, and then accepts the writes of
-- the rest of the script, too.
if ignore_wrong_type('HDEL', KEYS[2], ARGV[1]) ~= 1 then
  ignore_wrong_type('LREM', KEYS[3], 1, ARGV[1])
  if KEYS[4] and redis.call('HGET', KEYS[4], 'id') == ARGV[1] then return {'recorded before'} end
  return {'not owner'}
end
if ARGV[2] ~= '0' then
  redis.call('HSET', KEYS[2], ARGV[1] .. ':end', 1)
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {'freed'}
end
if redis.call('EXISTS', KEYS[3]) == 0 then return {'freed'} end

--@include fence.lua
--@include queue.lua
local outcome = offer_next(KEYS[1], KEYS[2], KEYS[3], false, ARGV[3]) and 'handed on' or 'freed'
return {outcome, replaced and {'healed'} or nil}
