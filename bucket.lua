-- The atomic take of a batch of requests: each is decided after the one before it, and of each all charges are paid, or none
-- is. take.go and bucket.go are its executable specification; whoever changes one changes the other.
--
-- KEYS[k]   one hash per identity. Its fields:
--             z<zone>   a bucket: version 1, tokens left (i7, millionths), counted at (I7, Redis µs),
--                       rate since then (I4 millionths every I4 µs); version 2 has also the tokens leased in the period
--                       of 100 ms in which it was counted, and in the one before (I7 millionths each)
--             p<group>  strikes: version 1, strikes (I2), blocked until (I7, Redis µs), last strike (I7, Redis µs)
-- ARGV[1]   a clock in µs for tests; '' for Redis TIME, the only clock in production
-- ARGV[2]   the batch, packed, big-endian:
--             numbers of groups (I1), policies (I2) and requests (I2)
--             group: strikes forgiven (I2), base, max, window, every (I7 µs each), field of its record (I1 length, text)
--             policy: rate num (I4), den (I4), burst (I7), cost (i7; millionths of a token, below 0 gives back),
--               flags (I1: 1 refusals strike, 2 dry run, 4 leases), number of its group or 0 (I1), field of its bucket (I1 length, text)
--             request: number of charges (I1); charge: number of its key (I2), of its policy (I2), and for how long a block
--               still lasts of which the caller knows (I7 µs): set again if the record is not there; with flag 4 also how many
--               tokens it wants to lease (I7 millionths)
--
-- Returns integers: now, the number of keys of a wrong type that were deleted, and for each request its verdict and
--   0 allowed   the millionths of a token left for each charge
--   1 limited   the strikes if it was one, else 0, and what is left for each charge
--   3 leased    as 0, and what was leased for each charge, which is not among what is left
--   2 blocked   the number of the charge that blocks, until when, the strikes if it was one, and 1 if a block started
--
-- Leases: who leased tokens may use them for 100 ms from before he asked. What is left never counts as more than the burst less
-- what was leased in this and in the previous period, so that bucket and leases together are never more than the burst.
--
-- Numbers: everything Go passes, and all products here, are validated to be integers below 2^53. What was
-- stored may be anything; it is clamped on reading, and a time in the future is rewritten as now.
-- Nothing is written for a refusal but strikes and repairs. All writes come last: where Redis refuses them, it refuses all.

local BUCKET, LEASED, RECORD = '>I1i7I7I4I4', '>I1i7I7I4I4I7I7', '>I1I2I7I7'
local GROUP, POLICY, CHARGE = '>I2I7I7I7I7I1c0', '>I4I4I7i7I1I1I1c0', '>I2I2I7'
local EXACT = 9007199254740992 -- 2^53
local PERIOD = 100000 -- µs that a lease lives
local PART = 4 -- of what is left, at most one in so many is leased
-- ms that a key outlives its use: the first, and a sixteenth of its use but no more than the second, so that few requests have to
-- set it; an hour at most
local MARGIN, LONGER = 1000, 3599000
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local pack, unpack = struct.pack, struct.unpack
local call, pcall = redis.call, redis.pcall

local now = tonumber(ARGV[1])
if not now then
  local t = call('TIME')
  now = t[1] * 1000000 + t[2]
end
local batch, at = ARGV[2], 1

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

-- what the batch says that holds for several requests
local ngroups, npolicies, nrequests
ngroups, npolicies, nrequests, at = unpack('>I1I2I2', batch, at)
local groups, policies = {}, {}
for i = 1, ngroups do
  local g = {}
  g.after, g.base, g.max, g.window, g.every, g.field, at = unpack(GROUP, batch, at)
  groups[i] = g
end
for i = 1, npolicies do
  local p, flags, group = {}, 0, 0
  p.num, p.den, p.burst, p.cost, flags, group, p.field, at = unpack(POLICY, batch, at)
  p.strikes, p.dry, p.leases, p.group = flags % 2 == 1, flags % 4 >= 2, flags >= 4, groups[group]
  policies[i] = p
end

-- per key: for how many µs its state must be kept, and its buckets and records by their fields, as they are now
local states, healed = {}, 0
for k = 1, #KEYS do
  states[k] = { need = 0, buckets = {}, records = false }
end

-- reads a field; a key that is no hash is nobody's state
local function read(key, field)
  local raw = pcall('HGET', key, field)
  if type(raw) ~= 'table' then
    return raw
  end
  if not string.find(raw.err, 'WRONGTYPE', 1, true) then
    return call('HGET', key, field) -- as an error
  end
  call('DEL', key)
  healed = healed + 1
  return false
end

-- A bucket, at first as what is stored comes to now. Its tokens may be more than a burst: which one, the policy says that asks.
-- It is dirty where what is stored describes it no longer, and without a rate where nothing is stored.
local function bucketOf(k, p)
  local b = states[k].buckets[p.field]
  if b then
    return b
  end
  local raw = read(KEYS[k], p.field)
  local version, tokens, counted, num, den, leased, before = nil, 0, 0, 0, 0, 0, 0
  if raw and #raw == 23 then
    version, tokens, counted, num, den = unpack(BUCKET, raw)
  elseif raw and #raw == 37 then
    version, tokens, counted, num, den, leased, before = unpack(LEASED, raw)
    version = version - 1
  end
  if version ~= 1 then
    b = { tokens = EXACT, leased = 0, before = 0 }
  else
    b = { num = num, den = den, leased = min(leased, EXACT), before = min(before, EXACT) }
    if counted > now then
      counted, b.repair = now, true
    end
    if num < 1 or den < 1 or num * den >= EXACT then
      num, den = p.num, p.den
    end
    b.tokens = max(tokens, 0)
    if leased + before > 0 then
      b.counted, b.rate, b.per = counted, num, den
    else
      b.tokens = b.tokens + refilled(now - counted, num, den, EXACT - b.tokens)
    end
  end
  states[k].buckets[p.field] = b
  return b
end

-- What a bucket of which tokens were leased holds now, and what counts as leased in this period and in the one before: until a
-- period has ended, the bucket fills only up to what was leased in it and before it.
local function withoutLeases(b, burst)
  local tokens, leased, before, at = b.tokens, b.leased, b.before, b.counted
  local ends = (floor(at / PERIOD) + 1) * PERIOD
  for _ = 1, 2 do
    local cap = max(burst - leased - before, 0)
    local to = min(now, ends)
    tokens = min(tokens, cap)
    tokens = tokens + refilled(to - at, b.rate, b.per, cap - tokens)
    if now < ends then
      return tokens, leased, before
    end
    at, ends, leased, before = to, ends + PERIOD, 0, leased
  end
  tokens = min(tokens, burst)
  return tokens + refilled(now - at, b.rate, b.per, burst - tokens), 0, 0
end

-- A record, at first as what is stored comes to now. A block that the caller knows of is set again where there is none.
local function recordOf(k, g, known)
  local records = states[k].records
  if not records then
    records = {}
    states[k].records = records
  end
  local r = records[g.field]
  if not r then
    local raw = read(KEYS[k], g.field)
    local version, strikes, till, last
    if raw and #raw == 17 then
      version, strikes, till, last = unpack(RECORD, raw)
    end
    if version == 1 then
      r = { strikes = strikes, till = till, last = last, there = true }
      if last > now then
        r.last, r.dirty = now, true
      end
      if till > now + g.max then
        r.till, r.dirty = now + g.max, true
      end
      if now >= max(r.last, r.till) + g.window then
        r.strikes, r.till, r.last, r.dirty = 0, 0, 0, nil
      end
    else
      r = { strikes = 0, till = 0, last = 0, there = raw and true }
    end
    r.window = 0
    records[g.field] = r
  end
  r.window = max(r.window, g.window) -- of whoever asks, as while a change of the penalty spreads
  if known > 0 and not r.there then
    r.strikes, r.till, r.last, r.dirty, r.there = g.after + 1, now + min(known, g.max), now, true, true
  end
  return r
end

-- the request that is decided: keys, policies, buckets and records of its charges, and the tokens that they find
local n, ks, ps, bs, rs, ts, asks = 0, {}, {}, {}, {}, {}, {}
local reply, replies = { now, 0 }, 2

local function answer(value)
  replies = replies + 1
  reply[replies] = value
end

-- the charge whose block ends last, and when
local function longestBlock()
  local longest, till = 0, now
  for i = 1, n do
    if rs[i] and not ps[i].dry and rs[i].till > till then
      longest, till = i, rs[i].till
    end
  end
  return longest, till
end

local function setBucket(b, tokens, p)
  b.tokens, b.num, b.den, b.dirty, b.repair = tokens, p.num, p.den, true, nil
  b.counted, b.rate, b.per = now, p.num, p.den
end

-- finds the tokens of a charge, and says whether they suffice
local function settle(i)
  local p = ps[i]
  local b = bucketOf(ks[i], p)
  local tokens, leased, before = b.tokens, 0, 0
  if b.leased + b.before > 0 then
    tokens, leased, before = withoutLeases(b, p.burst)
  end
  tokens = min(tokens, p.burst)
  b.leasedNow, b.beforeNow = leased, before
  if b.repair or b.num and (b.num ~= p.num or b.den ~= p.den) then
    setBucket(b, tokens, p)
    b.leased, b.before = leased, before
  end
  bs[i], ts[i] = b, tokens
  return tokens >= p.cost or p.dry
end

-- notes for how long the key of a charge must be kept: until its bucket is full
local function keep(i)
  local p, s = ps[i], states[ks[i]]
  local full = wait(p.burst - ts[i], p.num, p.den)
  if full > s.need then
    s.need = full
  end
end

-- debits a charge, and returns what is leased beside it
local function pay(i)
  local p, b = ps[i], bs[i]
  if ts[i] < p.cost then
    keep(i)
    return 0
  end
  local left = min(ts[i] - p.cost, max(p.burst - b.leasedNow - b.beforeNow, 0))
  local grant = min(asks[i], floor(left / PART / 1000000) * 1000000)
  ts[i] = left - grant
  setBucket(b, ts[i], p)
  b.leased, b.before = b.leasedNow + grant, b.beforeNow
  b.leasedNow = b.leased
  keep(i)
  return grant
end

-- counts a refusal, once for each record, and returns the highest count and what blocks for it
local function strike()
  local strikes, longest, till, considered = 0, 0, now, {}
  for i = 1, n do
    local p, r, g = ps[i], rs[i], ps[i].group
    if g and p.strikes and not p.dry and ts[i] < p.cost and not considered[r] then
      considered[r] = true
      if r.strikes == 0 or now - r.last >= g.every then
        r.strikes, r.last, r.dirty, r.there = min(r.strikes + 1, 65535), now, true, true
        if r.strikes > g.after then
          r.till = now + min(g.base * 2 ^ min(r.strikes - g.after, 64), g.max)
        end
        strikes = max(strikes, r.strikes)
        if r.till > till then
          longest, till = i, r.till
        end
      end
    end
  end
  return strikes, longest, till
end

local function decide()
  local longest, till = longestBlock()
  if longest > 0 then
    answer(2) answer(longest) answer(till) answer(0) answer(0)
    return
  end
  local allowed = true
  for i = 1, n do
    allowed = settle(i) and allowed
  end
  if allowed then
    local verdict, granted = replies + 1, false
    answer(0)
    for i = 1, n do
      local grant = pay(i)
      asks[i], granted = grant, granted or grant > 0
      answer(ts[i])
    end
    if granted then
      reply[verdict] = 3
      for i = 1, n do
        answer(asks[i])
      end
    end
    return
  end
  local strikes
  strikes, longest, till = strike()
  for i = 1, n do
    keep(i)
  end
  if longest > 0 then
    answer(2) answer(longest) answer(till) answer(strikes) answer(1)
    return
  end
  answer(1) answer(strikes)
  for i = 1, n do
    answer(ts[i])
  end
end

for _ = 1, nrequests do
  n, at = unpack('>I1', batch, at)
  for i = 1, n do
    local k, p, known
    k, p, known, at = unpack(CHARGE, batch, at)
    p = policies[p]
    ks[i], ps[i], asks[i] = k, p, 0
    if p.leases then
      asks[i], at = unpack('>I7', batch, at)
    end
    rs[i] = p.group and recordOf(k, p.group, known) or false
  end
  decide()
end

-- write, with a TTL on every key: the latest time at which any of its state still matters
for k, s in ipairs(states) do
  local key, wrote = KEYS[k], false
  for field, r in pairs(s.records or {}) do
    if r.strikes > 0 then
      s.need = max(s.need, max(r.last, r.till) + r.window - now)
    end
    if r.dirty then
      call('HSET', key, field, pack(RECORD, 1, r.strikes, r.till, r.last))
      wrote = true
    end
  end
  for field, b in pairs(s.buckets) do
    if b.dirty then
      if b.leased + b.before > 0 then
        call('HSET', key, field, pack(LEASED, 2, b.tokens, now, b.num, b.den, b.leased, b.before))
      else
        call('HSET', key, field, pack(BUCKET, 1, b.tokens, now, b.num, b.den))
      end
      wrote = true
    end
  end
  -- a refusal alone changes nothing here, unless it asks under a larger burst than any before: that bucket is full later
  local ttl, need = call('PTTL', key), ceil(s.need / 1000)
  if ttl == -1 or ttl >= 0 and ttl < need then
    call('PEXPIRE', key, need + floor(min(need / 16, LONGER)) + MARGIN)
  end
end

reply[2] = healed
return reply
