-- acquire: grants a key, or leaves a place in its line. Asked again by the same owner it finds what it made (I8).
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 owner id; 2 until, in microseconds of the server's clock: what runs later does nothing; 3 lease, ms;
--        4 '1' to line up; 5 offer, ms; 6 place, ms; 7 places
-- reply  {now, 'late'}
--        {now, 'granted', fence}
--        {now, 'line', ms left, before}     {now, 'held', ms left}     {now, 'full', ms left, waiting}     (-1 ms: it has no end)
--        each may end in {'healed'}: see fence.lua

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if now > tonumber(ARGV[2]) then return {now, 'late'} end

--@include fence.lua

-- Nobody has it and nobody waits: the way of almost every request, before anything else is even defined.
if redis.call('EXISTS', KEYS[2], KEYS[3]) == 0 then
  local fence = mint(KEYS[1])
  redis.call('HSET', KEYS[2], ARGV[1], text(fence))
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return {now, 'granted', fence, healed and {'healed'} or nil}
end

--@include give_on.lua
local got = take(KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
if healed then got[#got + 1] = {'healed'} end
return {now, unpack(got)}
