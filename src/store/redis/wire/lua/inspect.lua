-- inspect: the holders of a key, the remaining lease, the number of waiters, and the record.
-- Changes nothing.
--
-- KEYS   1 lock; 2 queue; 3 record
-- ARGV   1 prefix of the channels of processes
-- reply  {ms left (-1: no TTL; -2: free), waiting, ms left of the record (-2: none),
--        subscribers of the holder's process, field, value, ..}
--        of a shared key {.. as above, 0, {number of holders, acquisition id, subscribers, ..}}

local reply = {redis.call('PTTL', KEYS[1]), redis.call('LLEN', KEYS[2]), redis.call('PTTL', KEYS[3]), 0}

local function subscribers(id)
  local manager = string.match(id, '^(.*):[%d/]+$')
  return manager and redis.call('PUBSUB', 'NUMSUB', ARGV[1] .. manager)[2] or 0
end

-- A lock of this crate has one field. Of a larger hash only some fields are read.
local page = redis.pcall('HSCAN', KEYS[1], 0, 'COUNT', 16)
if page.err then
  local t = redis.call('TIME')
  local now_ms = t[1] * 1000 + math.floor(t[2] / 1000)
  local shares = {0}
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1], '(' .. now_ms, '+inf', 'BYSCORE', 'LIMIT', 0, 1100)) do
    if not string.find(id, ':end$') and not string.find(id, ':forced$') then
      shares[1] = shares[1] + 1
      if #shares < 129 then
        shares[#shares + 1] = id
        shares[#shares + 1] = subscribers(id)
      end
    end
  end
  reply[5] = shares
  return reply
end
local fields = page[2]
for i = 1, #fields, 2 do
  if string.find(fields[i], ':[%d/]+$') then reply[4] = subscribers(fields[i]) end
end
for i = 1, math.min(#fields, 32) do reply[i + 4] = fields[i] end
return reply
