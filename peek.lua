-- Reads what is stored for charges, and changes nothing. redis_state.go reads the fields as bucket.lua writes them.
--
-- KEYS[k]   one hash per identity
-- ARGV      pairs: the number of a key, and the name of a field in it
--
-- Returns now (Redis µs), and for each pair what the field holds: a text, or nil where there is none or the key is no hash.

local t = redis.call('TIME')
local reply = { t[1] * 1000000 + t[2] }
for i = 1, #ARGV, 2 do
  local raw = redis.pcall('HGET', KEYS[tonumber(ARGV[i])], ARGV[i + 1])
  if type(raw) == 'table' then
    if not string.find(raw.err, 'WRONGTYPE', 1, true) then
      return raw
    end
    raw = false
  end
  reply[#reply + 1] = raw
end
return reply
