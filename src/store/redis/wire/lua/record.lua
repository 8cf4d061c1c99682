-- Included by acquire and yield. A record is a hash: the acquisition id that left it, its head, and
-- mostly a body. It needs queue.lua.

-- The bounds of a head and a body. The connection is closed after a longer reply, so a value of
-- another program must not be sent: the head is then empty, and the body is left out.
local max_head, max_body = 65536, 1048576

local function read_record(record, head)
  local body = redis.call('HGET', record, 'body')
  if #head > max_head then head = '' end
  return head, body and #body <= max_body and body
end

-- The reply with the record, or nil. The acquisition then holds nothing: an offer to it, the free
-- key, or a place that it kept from others goes to the next waiter, which gets the record, too.
-- `record` is nil if the call wants a grant with or without one.
local function recorded(lock, queue, record, id, offer_ms)
  local head = record and redis.call('HGET', record, 'head')
  if not head then return nil end
  drop_foreign(queue)
  redis.call('LREM', queue, 1, id)
  redis.pcall('HDEL', lock, id)
  local count = count_places(lock, math.floor(clock() / 1000))
  if count then
    local offered = offer(lock, queue, count, false, offer_ms)
    --@raw if count == 0 and not offered then leave_free() end
  end
  return {'recorded', read_record(record, head)}
end
