-- yield: between two sections of one process. If others wait, the key goes to the first of them and our next owner id to the
-- end of the line; else we go on, with a full lease and a new fence. What was lost is asked for again under the next id.
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 next owner id; 2 until, as for acquire; 3 lease, ms; 4 the owner id that has it; 5 offer, ms; 6 place, ms; 7 places;
--        8 the fence under which it has it
-- reply  {now, 'late'}
--        {now, 'extended', fence}
--        as of acquire, for the next owner id: the old one has nothing any more
--        each may end in {'healed'}: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'late'} end

--@include fence.lua
--@include give_on.lua
local stands = redis.call('HGET', KEYS[2], ARGV[4])
if stands and stands ~= ARGV[8] then
  -- A copy: it was done, and a section may run under the fence that it minted. To give the key away now would be to let two in.
  return {now, 'extended', tonumber(stands)}
end
if not stands then
  local got = take(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], '1', ARGV[5], ARGV[6], ARGV[7])
  if healed then got[#got + 1] = {'healed'} end
  return {now, unpack(got)}
end
if give_on(KEYS[1], KEYS[2], KEYS[3], false, ARGV[5]) then
  redis.call('HDEL', KEYS[2], ARGV[4])
  -- It may have gone to our own next one, which has asked already, because this yield was thought to be lost: the key, or a place, and not both.
  local got = take(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], '1', ARGV[5], ARGV[6], ARGV[7])
  if healed then got[#got + 1] = {'healed'} end
  return {now, unpack(got)}
end
-- The lease first: it is a write that works when Redis is out of memory, and then the rest does.
redis.call('PEXPIRE', KEYS[2], ARGV[3])
local fence = mint(KEYS[1])
redis.call('HSET', KEYS[2], ARGV[4], text(fence))
return {now, 'extended', fence, healed and {'healed'} or nil}
