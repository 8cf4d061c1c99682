-- read_record: the record of a lock whose slot moves.
--
-- KEYS   1 record
-- reply  {acquisition id, head, body or nil}, or {} without a record

local beside = redis.call
--@include record.lua
local head = redis.call('HGET', KEYS[1], 'head')
if not head then return {} end
return {redis.call('HGET', KEYS[1], 'id') or '', read_record(KEYS[1], head)}
