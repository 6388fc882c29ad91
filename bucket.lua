-- The atomic take: all charges of one request are paid, or none is. take.go and bucket.go are its
-- executable specification; whoever changes one changes the other.
--
-- KEYS[k]   one hash per identity. Its fields:
--             z<zone>   a bucket: version 1, tokens left (i7, millionths), counted at (I7, Redis µs),
--                       rate since then (I4 millionths every I4 µs)
--             p<group>  strikes: version 1, strikes (I2), blocked until (I7, Redis µs), last strike (I7, Redis µs)
-- ARGV[1]   a clock in µs for tests; '' for Redis TIME, the only clock in production
-- ARGV[2]   number of charges, ARGV[3] number of penalty groups
-- then for each charge: index of its key, zone, rate num, rate den, burst, cost (millionths of a token; below 0
--           gives back), flags (1 refusals strike, 2 dry run), index of its group or 0, µs that a block still lasts of
--           which the caller knows: set again if the record is not there
-- then for each group: name, strikes forgiven, base, max, window, every (µs)
--
-- Returns integers: verdict (0 allowed, 1 limited, 2 blocked), now, index of the blocking charge or 0, end of
-- that block or 0, strikes or 0, 1 if a block started, 1 if a key of a wrong type was deleted, then for
-- each charge the millionths of a token left (0 where blocked before: not looked at).
--
-- Numbers: everything Go passes, and all products here, are validated to be integers below 2^53. What was
-- stored may be anything; it is clamped on reading, and a time in the future is rewritten as now.
-- Nothing is written for a refusal but strikes and repairs.

local BUCKET, RECORD = '>I1i7I7I4I4', '>I1I2I7I7'
local EXACT = 9007199254740992 -- 2^53
local MARGIN = 1000 -- ms that a key outlives its use
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max

local now = tonumber(ARGV[1])
if not now then
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
end

-- millionths that flow in during elapsed µs, at most room
local function refilled(elapsed, num, den, room)
  local periods = floor(elapsed / den)
  if periods > floor(room / num) then
    return room
  end
  return min(periods * num + floor((elapsed - periods * den) * num / den), room)
end

-- µs until missing millionths have flowed in
local function wait(missing, num, den)
  local whole = floor(missing / num)
  return whole * den + ceil((missing - whole * num) * den / num)
end

local groups = {}
local n = 3 + ARGV[2] * 9
for g = 1, tonumber(ARGV[3]) do
  groups[g] = {
    field = 'p' .. ARGV[n + 1], after = tonumber(ARGV[n + 2]), base = tonumber(ARGV[n + 3]),
    max = tonumber(ARGV[n + 4]), window = tonumber(ARGV[n + 5]), every = tonumber(ARGV[n + 6]),
  }
  n = n + 6
end

local healed = 0
local need = {}   -- per key: µs for which its state must be kept
local writes = {} -- per key: fields and values to set
for k = 1, #KEYS do
  need[k], writes[k] = 0, {}
end

-- reads the fields of a charge; a key that is no hash is nobody's state
local function read(key, zone, group)
  local reply = redis.pcall('HMGET', key, zone, group)
  if reply.err then
    if not string.find(reply.err, 'WRONGTYPE', 1, true) then
      return nil, nil, reply
    end
    redis.call('DEL', key)
    healed = 1
    return false, false
  end
  return reply[1], reply[2]
end

-- a bucket as it is now: tokens, and whether what is stored describes it no longer
local function settleBucket(c, raw)
  local version, tokens, at, num, den
  if raw and #raw == 23 then
    version, tokens, at, num, den = struct.unpack(BUCKET, raw)
  end
  if version ~= 1 then
    return c.burst, false
  end
  local stale = num ~= c.num or den ~= c.den
  if num < 1 or den < 1 or num * den >= EXACT then
    num, den = c.num, c.den
  end
  if at > now then
    at, stale = now, true
  end
  tokens = min(max(tokens, 0), c.burst)
  return tokens + refilled(now - at, num, den, c.burst - tokens), stale
end

-- strikes as they are now, and whether what is stored had to be repaired or set again
local function settleRecord(g, raw, known)
  local version, strikes, till, last
  if not raw and known > 0 then
    return { strikes = g.after + 1, till = now + min(known, g.max), last = now }, true
  end
  if raw and #raw == 17 then
    version, strikes, till, last = struct.unpack(RECORD, raw)
  end
  if version ~= 1 then
    return { strikes = 0, till = 0, last = 0 }, false
  end
  local stale = false
  if last > now then
    last, stale = now, true
  end
  if till > now + g.max then
    till, stale = now + g.max, true
  end
  if now >= max(last, till) + g.window then
    return { strikes = 0, till = 0, last = 0 }, false
  end
  return { strikes = strikes, till = till, last = last }, stale
end

local function writeBucket(c)
  local w = writes[c.key]
  w[#w + 1] = c.field
  w[#w + 1] = struct.pack(BUCKET, 1, c.tokens, now, c.num, c.den)
end

local function writeRecord(r, g)
  local w = writes[r.key]
  w[#w + 1] = g.field
  w[#w + 1] = struct.pack(RECORD, 1, r.strikes, r.till, r.last)
end

-- read
local charges, records = {}, {}
for i = 1, tonumber(ARGV[2]) do
  local a = 3 + (i - 1) * 9
  local flags = tonumber(ARGV[a + 7])
  local c = {
    key = tonumber(ARGV[a + 1]), field = 'z' .. ARGV[a + 2], num = tonumber(ARGV[a + 3]), den = tonumber(ARGV[a + 4]),
    burst = tonumber(ARGV[a + 5]), cost = tonumber(ARGV[a + 6]), strikes = flags % 2 == 1, dry = flags >= 2,
    group = groups[tonumber(ARGV[a + 8])], tokens = 0,
  }
  local bucket, record, failure = read(KEYS[c.key], c.field, c.group and c.group.field or 'p')
  if failure then
    return failure
  end
  c.bucket = bucket
  if c.group then
    local id = c.key .. c.group.field
    if not records[id] then
      local r, stale = settleRecord(c.group, record, tonumber(ARGV[a + 9]))
      r.key, records[id] = c.key, r
      if stale then
        writeRecord(r, c.group)
      end
    end
    c.record = records[id]
  end
  charges[i] = c
end

-- decide
local verdict, blocking, till, strikes, started = 0, 0, now, 0, 0
for i, c in ipairs(charges) do
  if c.record and not c.dry and c.record.till > till then
    verdict, blocking, till = 2, i, c.record.till
  end
end
if verdict == 0 then
  for _, c in ipairs(charges) do
    c.tokens, c.stale = settleBucket(c, c.bucket)
    need[c.key] = max(need[c.key], wait(c.burst - c.tokens, c.num, c.den))
    if c.tokens < c.cost and not c.dry then
      verdict = 1
    end
  end
  if verdict == 0 then
    for _, c in ipairs(charges) do
      if c.tokens >= c.cost then
        c.tokens, c.stale = min(c.tokens - c.cost, c.burst), true
        need[c.key] = max(need[c.key], wait(c.burst - c.tokens, c.num, c.den))
      end
    end
  else
    for i, c in ipairs(charges) do
      local r, g = c.record, c.group
      if g and c.strikes and not c.dry and c.tokens < c.cost and not r.considered then
        r.considered = true
        if r.strikes == 0 or now - r.last >= g.every then
          r.strikes, r.last = min(r.strikes + 1, 65535), now
          if r.strikes > g.after then
            r.till = now + min(g.base * 2 ^ min(r.strikes - g.after, 64), g.max)
          end
          writeRecord(r, g)
          strikes = max(strikes, r.strikes)
          if r.till > now then
            started = 1
            if r.till > till then
              verdict, blocking, till = 2, i, r.till
            end
          end
        end
      end
    end
  end
  for _, c in ipairs(charges) do
    if c.stale then
      writeBucket(c)
    end
  end
end

-- write, with a TTL on every key: the latest time at which any of its state still matters
for _, c in ipairs(charges) do
  local r = c.record
  if r and r.strikes > 0 then
    need[c.key] = max(need[c.key], max(r.last, r.till) + c.group.window - now)
  end
end
for k, key in ipairs(KEYS) do
  if #writes[k] > 0 then
    redis.call('HSET', key, unpack(writes[k]))
  end
  local ttl = redis.call('PTTL', key)
  local want = ceil(need[k] / 1000) + MARGIN
  -- a refusal alone changes nothing here, unless it asks under a larger burst than any before: that bucket is full later
  local short = ttl < want and (#writes[k] > 0 or ttl < want - MARGIN)
  if ttl == -1 or (ttl >= 0 and short) then
    redis.call('PEXPIRE', key, want)
  end
end

local reply = { verdict, now, blocking, verdict == 2 and till or 0, strikes, started, healed }
for i, c in ipairs(charges) do
  reply[7 + i] = c.tokens
end
return reply
