-- Included by acquire and yield. A record is a hash: the acquisition id that left it, its head, and
-- mostly a body. It needs queue.lua. KEYS as in the script: 1 fence; 2 lock; 3 queue; 4 record, if
-- the call wants a grant only without one.

-- The bounds of a head and a body. The connection is closed after a longer reply, so a value of
-- another program must not be sent: the head is then empty, and the body is left out.
local max_head, max_body = 65536, 1048576

-- The reply with the record, or nil. The acquisition then holds nothing: an offer to it, or the
-- free key, goes to the next waiter, which gets the record, too.
local function recorded(id, offer_ms)
  local head = KEYS[4] and redis.call('HGET', KEYS[4], 'head')
  if not head then return nil end
  drop_foreign(KEYS[3])
  redis.call('LREM', KEYS[3], 1, id)
  redis.call('HDEL', KEYS[2], id)
  if redis.call('EXISTS', KEYS[2]) == 0 then offer_next(KEYS[1], KEYS[2], KEYS[3], false, offer_ms) end
  local body = redis.call('HGET', KEYS[4], 'body')
  if #head > max_head then head = '' end
  return {'recorded', head, body and #body <= max_body and body}
end
