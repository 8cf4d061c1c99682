-- force: takes the key from whoever has it, and tells that one. It stays taken by nobody for a while, so that its holder can stop.
-- What nobody has is left as it is.
--
-- KEYS   1 fences; 2 lock; 3 line
-- ARGV   1 ms to keep it taken; 2 offer, ms
-- reply  the owner id that was thrown out, or false

--@include give_on.lua
local thrown_out = false
for _, id in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not string.find(id, ':end$') then thrown_out = id end
end
if thrown_out then
  redis.call('DEL', KEYS[2])
  redis.call('PUBLISH', inbox(thrown_out), '1 taken 0 ' .. thrown_out .. ' ' .. KEYS[2])
  if ARGV[1] ~= '0' then
    redis.call('HSET', KEYS[2], thrown_out .. ':end', 1)
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
    return thrown_out
  end
end
if redis.call('EXISTS', KEYS[2]) == 0 then give_on(KEYS[1], KEYS[2], KEYS[3], false, ARGV[2]) end
return thrown_out
