-- renew: a full lease from now on, for each owner that has its key (I1: the field is looked at, not the key).
--
-- KEYS   locks
-- ARGV   for each: owner id, lease, ms
-- reply  for each: 1 extended, 0 not the owner, -1 not known (others of the batch may be)

local out = {}
for i = 1, #KEYS do
  local has = redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1])
  if has == 1 then has = redis.pcall('PEXPIRE', KEYS[i], ARGV[2 * i]) end
  if type(has) == 'table' then
    has = string.find(has.err, 'WRONGTYPE', 1, true) and 0 or -1
  end
  out[i] = has
end
return out
