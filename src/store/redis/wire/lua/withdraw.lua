-- withdraw: ends incomplete grants of acquisitions that no majority of the servers has granted. A
-- grant that a later call of the acquisition has completed stays.
--
-- KEYS   n locks
-- ARGV   for each: acquisition id
-- reply  the number of grants that ended

local ended = 0
for i = 1, #KEYS do
  local fence = redis.pcall('HGET', KEYS[i], ARGV[i])
  if type(fence) == 'string' and string.sub(fence, -1) == '?' then
    ended = ended + redis.call('HDEL', KEYS[i], ARGV[i])
  end
end
return ended
