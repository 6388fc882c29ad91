-- Forgets the strikes of an identity in a group, a block included, and leaves a record of zero strikes behind: a node that
-- remembers the block sees by it that the block was lifted, not lost.
--
-- KEYS[1]  the identity's hash
-- ARGV[1]  the field of the group, ARGV[2] how long in ms the longest block is of which a node may know
--
-- Returns 1 if there were strikes, else 0.

local RECORD = '>I1I2I7I7' -- as in bucket.lua

local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) == 'table' then
  if not string.find(old.err, 'WRONGTYPE', 1, true) then
    return old
  end
  redis.call('DEL', KEYS[1])
  old = false
end
local had = 0
if old and #old == 17 then
  local version, strikes = struct.unpack(RECORD, old)
  if version == 1 and strikes > 0 then
    had = 1
  end
end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], struct.pack(RECORD, 1, 0, 0, t[1] * 1000000 + t[2]))
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return had
