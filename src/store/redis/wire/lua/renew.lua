-- renew: extends each lease to at least a full one, if the acquisition holds its key (I1: the field
-- is checked, not only the key). A delayed renewal never shortens the lease that a later call has
-- set: GT. For GT, a key without a TTL has an infinite one: it gets one here.
--
-- KEYS   locks
-- ARGV   for each: acquisition id; lease, ms
-- reply  for each: 1 extended, 0 not the holder, -1 unknown (others of the batch may be known)

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
