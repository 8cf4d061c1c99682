-- delete_record: deletes the record of a key that has no holder.
--
-- KEYS   1 lock
-- ARGV   1 record
-- reply  {'deleted'}, {'not found'} or {'busy'}

local fields = redis.call('HSCAN', KEYS[1], 0, 'COUNT', 16)[2]
for i = 1, #fields, 2 do
  if not string.find(fields[i], ':end$') then return {'busy'} end
end
return {redis.call('DEL', ARGV[1]) == 1 and 'deleted' or 'not found'}
