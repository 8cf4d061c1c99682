-- release: gives back whatever this owner has there, the key or its place, and touches nothing else (I1).
--
-- A key that stays taken does so under another field, so that no late copy of a renewal, an acquire or a release
-- matches it (I10).
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 owner id; 2 ms to keep it taken by nobody; 3 offer, ms
-- reply  {'freed'}, {'handed on'}, or {'not owner'}; each may end in {'healed'}: see fence.lua

-- At a key of another type this owner has nothing, and an error would come for ever. Any other one is told, and the release repeated.
local function unless_it_is_another_type(command, ...)
  local got = redis.pcall(command, ...)
  if type(got) == 'table' and got.err then
    if not string.find(got.err, 'WRONGTYPE', 1, true) then error(got) end
    return 0
  end
  return got
end

-- First of all, because it works when Redis is out of memory, and what follows a first write does, too.
if unless_it_is_another_type('HDEL', KEYS[2], ARGV[1]) ~= 1 then
  unless_it_is_another_type('LREM', KEYS[3], 1, ARGV[1])
  return {'not owner'}
end
if ARGV[2] ~= '0' then
  redis.call('HSET', KEYS[2], ARGV[1] .. ':end', 1)
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
  return {'freed'}
end
if redis.call('EXISTS', KEYS[3]) == 0 then return {'freed'} end

--@include fence.lua
--@include give_on.lua
local what = give_on(KEYS[1], KEYS[2], KEYS[3], false, ARGV[3]) and 'handed on' or 'freed'
return {what, healed and {'healed'} or nil}
