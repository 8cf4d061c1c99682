-- renew: at least a full lease from now on, for each owner that has its key (I1: the field is looked at, not the key).
-- A renewal that runs late never shortens the lease that a later call has got: GT. For GT a key without a TTL has an
-- infinite one: it gets one here.
--
-- KEYS   locks
-- ARGV   for each: owner id, lease, ms
-- reply  for each: 1 extended, 0 not the owner, -1 not known (others of the batch may be)

local out = {}
for i = 1, #KEYS do
  local has = redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1])
  if has == 1 then
    local set = redis.pcall('PEXPIRE', KEYS[i], ARGV[2 * i], 'GT')
    if set == 0 and redis.pcall('PTTL', KEYS[i]) == -1 then set = redis.pcall('PEXPIRE', KEYS[i], ARGV[2 * i]) end
    if type(set) == 'table' then has = set end
  end
  if type(has) == 'table' then
    has = string.find(has.err, 'WRONGTYPE', 1, true) and 0 or -1
  end
  out[i] = has
end
return out
