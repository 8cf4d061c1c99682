-- acquire_free: grants those of several keys of a Cluster that are free, and finds those that are
-- busy. It changes nothing of the others: each of them has a call of its own.
--
-- The keys are in many slots, so none is declared. A node then executes the script although some of
-- its names belong to other nodes, and each command for such a name fails alone. The first command
-- succeeds only if the slot is on this node and does not move: a node of a slot that moves refuses
-- commands for names that it lacks. So all names of the key are here, and its grant is complete.
--
-- ARGV   1 time at which the call expires, in microseconds of the server's clock
--        for each lock: its name; its queue; the fence of its slot; acquisition id; lease, ms;
--        if it is busy: 'fail', or anything else to have a call of its own
-- reply  now: all keys are granted, and this is their fence
--        {now, 'expired'}
--        {now, other ..}: all keys are granted, except for those at these positions, from 1:
--        position, or {position, ms left} of a busy key

-- A text, as in acquire.lua.
local t = redis.call('TIME')
local now = t[1] .. string.sub('00000', #t[2]) .. t[2]
if #now > #ARGV[1] or #now == #ARGV[1] and now > ARGV[1] then return {now, 'expired'} end

local run, is_fenced, reply = redis.pcall, {}, {now}

-- Only a valid fence is raised. That of a slot that has none, or the value of another program, is
-- for acquire.lua, which reports it. So is a fence ahead of the clock.
local function raise(fence)
  local stored = run('SET', fence, now, 'XX', 'GET')
  if type(stored) ~= 'string' then return false end
  if #stored == #now and stored < now and tonumber(stored) then return true end
  run('SET', fence, stored)
  return false
end

for i = 2, #ARGV, 6 do
  local lock, fence = ARGV[i], ARGV[i + 2]
  local is_granted, position = false, (i + 4) / 6
  if run('EXISTS', lock, ARGV[i + 1]) == 0 then
    -- Keys of one slot have one fence: it is larger than each one before it of any key.
    is_fenced[fence] = is_fenced[fence] or raise(fence)
    if is_fenced[fence] then
      run('HSET', lock, ARGV[i + 3], now)
      is_granted = run('PEXPIRE', lock, ARGV[i + 4]) == 1
    end
  elseif ARGV[i + 5] == 'fail' and run('HEXISTS', lock, ARGV[i + 3]) == 0 then
    -- A lock that is here is not on another node, also while its slot moves.
    local left = run('PTTL', lock)
    if type(left) == 'number' and left ~= -2 then position = {position, left} end
  end
  if not is_granted then reply[#reply + 1] = position end
end
return reply[2] and reply or now
