-- Fills a bucket. What was leased of it stays noted, so that bucket and leases together are never more than the burst.
--
-- KEYS[1]  the identity's hash
-- ARGV[1]  the field of the bucket
--
-- Returns 1 if there was a bucket, else 0. The TTL stays: it lasts at least until the bucket would have been full by itself.

local BUCKET, LEASED = '>I1i7I7I4I4', '>I1i7I7I4I4I7I7' -- as in bucket.lua
local FULL = 9007199254740991 -- tokens are clamped to the burst on reading

local raw = redis.pcall('HGET', KEYS[1], ARGV[1])
if type(raw) == 'table' then
  if not string.find(raw.err, 'WRONGTYPE', 1, true) then
    return raw
  end
  raw = false -- nobody's state
end
if raw and #raw == 23 then
  local version, _, counted, num, den = struct.unpack(BUCKET, raw)
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack(BUCKET, version, FULL, counted, num, den))
elseif raw and #raw == 37 then
  local version, _, counted, num, den, leased, before = struct.unpack(LEASED, raw)
  redis.call('HSET', KEYS[1], ARGV[1], struct.pack(LEASED, version, FULL, counted, num, den, leased, before))
else
  return 0
end
return 1
