-- renew: a full lease from now on, for each owner that has its key (I1: the field is looked at, not the key).
--
-- KEYS   locks
-- ARGV   for each: owner id, lease, ms
-- reply  for each: 1 extended, 0 not the owner

local out = {}
for i = 1, #KEYS do
  local has = redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1]) == 1
  out[i] = has and redis.call('PEXPIRE', KEYS[i], ARGV[2 * i]) or 0
end
return out
