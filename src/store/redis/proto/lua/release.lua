-- release: ends an acquisition: releases the key that it holds, or removes its queue entry. Changes
-- nothing of other acquisitions (I1).
--
-- A blocked key has another field, so that no delayed copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   1 fence; 2 lock; 3 queue
-- ARGV   1 acquisition id; 2 block, ms; 3 lease of an offer, ms
-- reply  {'freed'}, {'handed on'} or {'not owner'}; each may end in {'healed'}: see fence.lua

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

-- HDEL is first, because Redis accepts it when it is out of memory, and then accepts the writes of
-- the rest of the script, too.
if ignore_wrong_type('HDEL', KEYS[2], ARGV[1]) ~= 1 then
  ignore_wrong_type('LREM', KEYS[3], 1, ARGV[1])
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
