-- delete_record: deletes the record of a key that has no holder.
--
-- KEYS   1 lock; 2 record
-- reply  {'deleted'}, {'not found'} or {'held'}

local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
for i = 1, #fields, 2 do
  if not string.find(fields[i], ':end$') then return {'held'} end
end
return {redis.call('DEL', KEYS[2]) == 1 and 'deleted' or 'not found'}
