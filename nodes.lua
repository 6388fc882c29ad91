-- Announces a process among those that share the limits, and counts them. Redis' clock says who is still there.
--
-- KEYS[1]   a sorted set: who announced itself, by the time until which that holds (Redis ms)
-- ARGV[1]   what the process announces, ARGV[2] how long that holds, in ms
-- ARGV[3…]  what it announced before, and no longer does
--
-- Returns how many processes there are, this one included.

local key, life = KEYS[1], tonumber(ARGV[2])
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)

local added = redis.pcall('ZADD', key, now + life, ARGV[1])
if type(added) == 'table' then
  if not string.find(added.err, 'WRONGTYPE', 1, true) then
    return added
  end
  redis.call('DEL', key) -- another program wrote under this name
  redis.call('ZADD', key, now + life, ARGV[1])
end
for i = 3, #ARGV do
  if ARGV[i] ~= ARGV[1] then
    redis.call('ZREM', key, ARGV[i])
  end
end
-- What holds for longer than an announcement can was made while the clock was ahead. Who is alive makes another one soon.
redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
redis.call('ZREMRANGEBYSCORE', key, '(' .. string.format('%.0f', now + life), '+inf')
redis.call('PEXPIRE', key, life)
return redis.call('ZCARD', key)
