-- renew: extends each lease to at least a full one, if the acquisition holds its key (I1: the field
-- is checked, not only the key). A delayed renewal never shortens the lease that a later call has
-- set: GT. For GT, a key without a TTL has an infinite one: it gets one here.
--
-- KEYS   locks; the queue of each whose acquisition a newer one may replace, or none
-- ARGV   for each lock: acquisition id; lease, ms
-- reply  for each: 1 extended, 2 the same, and a newer one waits, 0 not the holder, -1 unknown
--        (others of the batch may be known)

--@include newest.lua
local out, n = {}, #ARGV / 2
local queues = n

-- A share has its own end, and the lock that of the latest one.
local function renew_share(lock, id, lease_ms)
  local t = redis.call('TIME')
  local now_ms = t[1] * 1000 + math.floor(t[2] / 1000)
  local ends = redis.pcall('ZSCORE', lock, id)
  if type(ends) == 'table' then return ends end
  if not ends or tonumber(ends) <= now_ms then return 0 end
  local set = redis.pcall('ZADD', lock, 'XX', 'GT', now_ms + lease_ms, id)
  if type(set) ~= 'table' then set = redis.pcall('PEXPIRE', lock, lease_ms, 'GT') end
  return type(set) == 'table' and set or 1
end

for i = 1, n do
  local queue
  if is_replaceable(ARGV[2 * i - 1]) then
    queues = queues + 1
    queue = KEYS[queues]
  end
  local is_share = not is_replaceable(ARGV[2 * i - 1]) and string.find(ARGV[2 * i - 1], '/', 1, true)
  local has
  if is_share then
    has = renew_share(KEYS[i], ARGV[2 * i - 1], ARGV[2 * i])
  else
    has = redis.pcall('HEXISTS', KEYS[i], ARGV[2 * i - 1])
  end
  if has == 1 and not is_share then
    local set = redis.pcall('PEXPIRE', KEYS[i], ARGV[2 * i], 'GT')
    if set == 0 and redis.pcall('PTTL', KEYS[i]) == -1 then set = redis.pcall('PEXPIRE', KEYS[i], ARGV[2 * i]) end
    if type(set) == 'table' then has = set end
    if has == 1 and queue and has_newer(queue, ARGV[2 * i - 1]) then has = 2 end
  end
  if type(has) == 'table' then
    has = string.find(has.err, 'WRONGTYPE', 1, true) and 0 or -1
  end
  out[i] = has
end
return out
