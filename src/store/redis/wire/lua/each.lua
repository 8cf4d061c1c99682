-- Included by the scripts of several keys, where they have more than one. A key of another type
-- fails alone: the others would be left without their blocks and offers, and a repeated call could
-- not make up for it. Another error is that of the whole call.

-- Appends the reply for each key to those in front of them.
local function for_each(n, reply_for, replies)
  for i = 1, n do
    local ok, one = pcall(reply_for, i)
    if not ok then
      local text = type(one) == 'table' and one.err or tostring(one)
      if not string.find(text, 'WRONGTYPE', 1, true) then error({err = text}) end
      one = {'error', text}
    end
    replies[#replies + 1] = one
  end
  return replies
end
