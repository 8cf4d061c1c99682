-- Included by queue.lua and renew.lua: acquisitions that newer ones of their kind replace. They
-- hold a key alone, and their ids end in `/1`.

local function is_replaceable(id)
  return string.find(id, '/1', -2, true)
end

-- Whether a newer one waits behind this one, or for its end. Of the queue, as many entries are read
-- as this crate makes.
local function has_newer(queue, id)
  local ids = is_replaceable(id) and redis.pcall('LRANGE', queue, -1024, -1) or {}
  for i = #ids, 1, -1 do
    if ids[i] == id then return false end
    if is_replaceable(ids[i]) then return true end
  end
  return false
end
