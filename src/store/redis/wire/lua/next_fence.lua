-- next_fence: the fence of a grant of a slot that moves. The grant precedes it, so that each later
-- grant gets a larger one.
--
-- KEYS   1 fence
-- ARGV   1 the incomplete fence
-- reply  {fence}. May end in a mark of the fence: see fence.lua

local floor = tonumber(string.match(ARGV[1], '^%d+')) or 0
ARGV[1] = KEYS[1]
--@include fence.lua
local fence = next_fence()
if tonumber(fence) <= floor then
  fence = text(floor + 1)
  redis.call('SET', KEYS[1], fence)
end
return {fence, fence_mark}
