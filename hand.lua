-- What an operator does to an identity in a penalty group: he blocks it for a time, or he lifts every block and forgets the
-- strikes, with an amnesty or without. take.go says what becomes of it.
--
-- KEYS[1]  the identity's hash
-- ARGV[1]  the field of the group
-- ARGV[2]  above 0 a block for so many µs, which leaves the strikes as they are; 0 lifts; below 0 lifts with an amnesty for so many
-- ARGV[3]  how long in ms the key must live at least. What was lifted leaves a record behind: a node that remembers the block sees
--          by it that the block was lifted, not lost
-- ARGV[4]  the same where nothing was stored of the identity in the group
--
-- Returns integers: now (Redis µs), 1 if there were strikes or a block before, else 0, and when the latest block ends that is now
--   there, 0 for none.

local RECORD, HAND = '>I1I2I7I7', '>I1I2I7I7i7' -- as in bucket.lua

local old = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(old) == 'table' then
  if not string.find(old.err, 'WRONGTYPE', 1, true) then
    return old
  end
  redis.call('DEL', KEYS[1])
  old = false
end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local version, strikes, till, last, hand = 0, 0, 0, 0, 0
if old and #old == 17 then
  version, strikes, till, last = struct.unpack(RECORD, old)
elseif old and #old == 24 then
  version, strikes, till, last, hand = struct.unpack(HAND, old)
  version = version - 1
end
if version ~= 1 then
  strikes, till, last, hand = 0, 0, 0, 0
end
local had = (strikes > 0 or hand > now) and 1 or 0

local time = tonumber(ARGV[2])
if time > 0 then
  hand = now + time
else
  strikes, till, last, hand = 0, 0, now, time < 0 and time - now or 0
end
if hand ~= 0 then
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack(HAND, 2, strikes, till, last, hand))
else
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack(RECORD, 1, strikes, till, last))
end
local keep = old and ARGV[3] or ARGV[4]
if redis.call('PTTL', KEYS[1]) < tonumber(keep) then
  redis.call('PEXPIRE', KEYS[1], keep)
end
local ends = math.max(till, hand)
return { now, had, ends > now and ends or 0 }
