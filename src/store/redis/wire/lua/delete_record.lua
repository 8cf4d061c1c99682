-- delete_record: deletes the record of a key that has no holder.
--
-- KEYS   1 lock; 2 record
-- reply  {'deleted'}, {'not found'} or {'busy'}

-- A key without a holder has no lock, or one whose only field is that of a block. Any other form is
-- busy, also a large hash, of which one page is read.
if redis.call('EXISTS', KEYS[1]) == 1 then
  local page = redis.pcall('HSCAN', KEYS[1], 0, 'COUNT', 16)
  local fields = page[2]
  if page.err or page[1] ~= '0' or #fields ~= 2 or not string.find(fields[1], ':end$') then return {'busy'} end
end
return {redis.call('DEL', KEYS[2]) == 1 and 'deleted' or 'not found'}
