-- The atomic take of a batch of requests: each is decided after the one before it, and of each all charges are paid, or none
-- is. take.go and bucket.go are its executable specification; whoever changes one changes the other.
--
-- KEYS[k]   one hash per identity. Its fields:
--             z<zone>   a bucket: version 1, tokens left (i7, millionths), counted at (I7, Redis µs),
--                       rate since then (I4 millionths every I4 µs); version 2 has also the tokens leased in the period
--                       of 100 ms in which it was counted, and in the one before (I7 millionths each)
--             p<group>  strikes: version 1, strikes (I2), blocked until (I7, Redis µs), last strike (I7, Redis µs); version 2
--                       has also what an operator did (i7, Redis µs): above 0 a block until then, below 0 an amnesty
-- ARGV[1]   a clock in µs for tests; '' for Redis TIME, the only clock in production
-- ARGV[2]   the batch, packed, big-endian:
--             numbers of groups (I1), and of policies, buckets, records and requests (I2 each)
--             group: strikes forgiven (I2), base, max, window, every (I7 µs each), field of its record (I1 length, text)
--             policy: rate num (I4), den (I4), burst (I7), cost (i7; millionths of a token, below 0 gives back),
--               flags (I1: 1 refusals strike, 2 dry run, 4 leases), number of its group or 0 (I1), field of its bucket (I1 length, text)
--             bucket: number of its key (I2), of a policy that names its field (I2); each once
--             record: number of its key (I2), of a group that names its field (I1); each once
--             request: number of charges (I1); charge: number of its bucket (I2), its policy (I2), its record or 0 (I2), and
--               for how long a block still lasts of which the caller knows (i7 µs; below 0 one by hand; 0 none); if one, when
--               it was told of (I7, Redis µs), since it is set again where what is stored is older; with flag 4 also how many
--               tokens it wants to lease (I7 millionths)
--
-- Returns integers: now, the number of keys of a wrong type that were deleted, and for each request its verdict and
--   0 allowed   the millionths of a token left for each charge
--   1 limited   the strikes if it was one, else 0, and what is left for each charge
--   3 leased    as 0, and what was leased for each charge, which is not among what is left
--   2 blocked   the number of the charge that blocks, until when, the strikes if it was one, and 1 if a block started or 2 if
--               an operator set it
-- What is left for a charge in a dry run that could not be paid is marked: it is -left - 1.
--
-- Leases: who leased tokens may use them for 100 ms from before he asked. What is left never counts as more than the burst less
-- what was leased in this and in the previous period, so that bucket and leases together are never more than the burst.
--
-- Numbers: everything Go passes, and all products here, are validated to be integers below 2^53. What was
-- stored may be anything; it is clamped on reading, and a time in the future is rewritten as now.
-- Nothing is written for a refusal but strikes and repairs. All writes come last: where Redis refuses them, it refuses all.

-- Shape: this is one straight chunk with few functions on purpose. Each run makes every function and every table anew, and that
-- of a dozen would cost Redis more than all its commands for a request do. What belongs together is a table that is made at once,
-- with all its fields.

local BUCKET, LEASED, RECORD, HAND = '>I1i7I7I4I4', '>I1i7I7I4I4I7I7', '>I1I2I7I7', '>I1I2I7I7i7'
local GROUP, POLICY, CHARGE = '>I2I7I7I7I7I1c0', '>I4I4I7i7I1I1I1c0', '>I2I2I2i7'
local EXACT = 9007199254740992 -- 2^53
local PERIOD = 100000 -- µs that a lease lives
local BYHAND = 2592000000000 -- µs of the longest block by hand
local PART = 4 -- of what is left, at most one in so many is leased
-- ms that a key outlives its use: the first, and a quarter of its use but no more than the second, so that few requests have to
-- set it; an hour at most
local MARGIN, LONGER = 10000, 3590000
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

-- reads a field; a key that is no hash is nobody's state
local healed = 0
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

-- What a bucket of which tokens were leased holds now, and what counts as leased in this period and in the one before: until a
-- period has ended, the bucket fills only up to what was leased in it and before it.
local function withoutLeases(b, counted, num, den, burst)
  local tokens, leased, before = b.tokens, b.leased, b.before
  local ends = (floor(counted / PERIOD) + 1) * PERIOD
  for _ = 1, 2 do
    local cap = max(burst - leased - before, 0)
    local to = min(now, ends)
    tokens = min(tokens, cap)
    tokens = tokens + refilled(to - counted, num, den, cap - tokens)
    if now < ends then
      return tokens, leased, before
    end
    counted, ends, leased, before = to, ends + PERIOD, 0, leased
  end
  tokens = min(tokens, burst)
  return tokens + refilled(now - counted, num, den, burst - tokens), 0, 0
end

-- what the batch says that holds for several requests
local ngroups, npolicies, nbuckets, nrecords, nrequests
ngroups, npolicies, nbuckets, nrecords, nrequests, at = unpack('>I1I2I2I2I2', batch, at)
local groups, policies = {}, {}
for i = 1, ngroups do
  local after, base, most, window, every, field
  after, base, most, window, every, field, at = unpack(GROUP, batch, at)
  groups[i] = { after = after, base = base, max = most, window = window, every = every, field = field }
end
for i = 1, npolicies do
  local num, den, burst, cost, flags, group, field
  num, den, burst, cost, flags, group, field, at = unpack(POLICY, batch, at)
  policies[i] = { num = num, den = den, burst = burst, cost = cost, field = field, group = groups[group],
    strikes = flags % 2 == 1, dry = flags % 4 >= 2, leases = flags >= 4 }
end

-- for how many µs the state of each key must be kept
local needs = {}
for k = 1, #KEYS do
  needs[k] = 0
end

-- Buckets as they are stored. Without a rate, nothing is. Tokens may be more than a burst: which one, the policy says that asks.
-- Dirty is one that what is stored describes no longer.
local buckets = {}
for i = 1, nbuckets do
  local k, field
  k, field, at = unpack('>I2I2', batch, at)
  field = policies[field].field
  local raw = read(KEYS[k], field)
  local version, tokens, counted, num, den, leased, before = 0, 0, 0, 0, 0, 0, 0
  if raw and #raw == 23 then
    version, tokens, counted, num, den = unpack(BUCKET, raw)
  elseif raw and #raw == 37 then
    version, tokens, counted, num, den, leased, before = unpack(LEASED, raw)
    version = version - 1
  end
  if version ~= 1 then
    tokens, counted, num, leased, before = EXACT, now, false, 0, 0
  end
  buckets[i] = { key = k, field = field, tokens = max(tokens, 0), counted = counted, num = num, den = den,
    leased = min(leased, EXACT), before = min(before, EXACT), dirty = false }
end

-- records as what is stored comes to now; written is the latest time that it speaks of
local records = {}
for i = 1, nrecords do
  local k, g
  k, g, at = unpack('>I2I1', batch, at)
  g = groups[g]
  local raw = read(KEYS[k], g.field)
  local version, strikes, till, last, hand, written, dirty = 0, 0, 0, 0, 0, 0, false
  if raw and #raw == 17 then
    version, strikes, till, last = unpack(RECORD, raw)
  elseif raw and #raw == 24 then
    version, strikes, till, last, hand = unpack(HAND, raw)
    version = version - 1
  end
  if version == 1 then
    written = till > last and till or last
    if hand > written then
      written = hand
    end
    if last > now then
      last, dirty = now, true
    end
    if till > now + g.max then
      till, dirty = now + g.max, true
    end
  end
  local overlong = false
  if hand ~= 0 then
    local most = now + BYHAND + g.max
    if version ~= 1 or max(hand, -hand) <= now then
      hand = 0
    elseif max(hand, -hand) > most then
      hand, overlong = min(max(hand, -most), most), true
    end
  end
  if version ~= 1 or now >= max(last, till) + g.window then
    strikes, till, last, dirty = 0, 0, hand ~= 0 and max(last, till) or 0, false
  end
  records[i] = { key = k, field = g.field, strikes = strikes, till = till, last = last, window = 0, hand = hand,
    written = written, dirty = dirty or overlong }
end

-- of each charge of a request: its bucket, policy, record (false for none) and what it asks to lease; the tokens that it finds, and
-- what counts as leased beside them
local bs, ps, rs, asks, ts, leasedNow, beforeNow = { 0 }, { 0 }, { 0 }, { 0 }, { 0 }, { 0 }, { 0 }
local reply, replies = { now, 0 }, 2

for _ = 1, nrequests do
  local n
  n, at = unpack('>I1', batch, at)

  -- the charges, and the block that ends last
  for i = 1, n do
    local b, p, r, known
    b, p, r, known, at = unpack(CHARGE, batch, at)
    b, p, r = buckets[b], policies[p], records[r] or false
    bs[i], ps[i], rs[i], asks[i] = b, p, r, 0
    local told = 0
    if known ~= 0 then
      told, at = unpack('>I7', batch, at)
    end
    if p.leases then
      asks[i], at = unpack('>I7', batch, at)
    end
    if r then
      local g = p.group
      r.window = max(r.window, g.window) -- of whoever asks, as while a change of the penalty spreads
      -- a block that was lost: take.go says how that is known
      if told > max(r.written, now - BYHAND) and (told <= now or r.written == 0) and max(r.till, r.hand) <= now then
        if known < 0 then
          r.hand = now + min(-known, BYHAND)
        else
          r.strikes, r.till, r.last = max(r.strikes, g.after + 1), now + min(known, g.max), now
        end
        r.written, r.dirty = max(r.last, r.till, r.hand), true
      end
    end
  end
  local longest, till = 0, now
  for i = 1, n do
    local r = rs[i]
    if r and not ps[i].dry and (r.till > till or r.hand > till) then
      longest, till = i, max(r.till, r.hand)
    end
  end

  -- the tokens of each charge, and whether they all suffice
  local allowed = longest == 0
  for i = 1, allowed and n or 0 do
    local p, b = ps[i], bs[i]
    local burst, num, tokens, leased, before = p.burst, b.num, b.tokens, 0, 0
    if not num then
      tokens = min(tokens, burst)
    else
      local den, counted, repair = b.den, b.counted, false
      if counted > now then
        counted, repair = now, true
      end
      if num < 1 or den < 1 or num * den >= EXACT then
        num, den, repair = p.num, p.den, true
      end
      if b.leased + b.before > 0 then
        tokens, leased, before = withoutLeases(b, counted, num, den, burst)
      else
        tokens = min(tokens, burst)
        tokens = tokens + refilled(now - counted, num, den, burst - tokens)
      end
      if repair or num ~= p.num or den ~= p.den then
        b.tokens, b.counted, b.num, b.den, b.leased, b.before, b.dirty = tokens, now, p.num, p.den, leased, before, true
      end
    end
    ts[i], leasedNow[i], beforeNow[i] = tokens, leased, before
    allowed = allowed and (tokens >= p.cost or p.dry)
  end

  local verdict, strikes, granted = replies + 1, 0, false
  if allowed then
    replies = verdict
    for i = 1, n do
      local p, b, tokens = ps[i], bs[i], ts[i]
      local grant = asks[i]
      if tokens < p.cost then
        grant, tokens = 0, -tokens - 1
      else
        local leased, before = leasedNow[i], beforeNow[i]
        tokens = min(tokens - p.cost, max(p.burst - leased - before, 0))
        if grant > 0 then
          grant = min(grant, floor(tokens / PART / 1000000) * 1000000)
          tokens, granted = tokens - grant, granted or grant > 0
        end
        ts[i] = tokens
        b.tokens, b.counted, b.num, b.den, b.leased, b.before, b.dirty = tokens, now, p.num, p.den, leased + grant, before, true
      end
      asks[i] = grant
      replies = replies + 1
      reply[replies] = tokens
    end
    reply[verdict] = granted and 3 or 0
    for i = 1, granted and n or 0 do
      replies = replies + 1
      reply[replies] = asks[i]
    end
  elseif longest > 0 then
    local byhand = rs[longest].hand == till and 2 or 0
    reply[verdict], reply[verdict + 1], reply[verdict + 2], reply[verdict + 3], reply[verdict + 4] = 2, longest, till, 0, byhand
    replies = verdict + 4
  else
    -- a strike in each record, once
    local considered = {}
    for i = 1, n do
      local p, r = ps[i], rs[i]
      if r and p.strikes and not p.dry and ts[i] < p.cost and r.hand >= 0 and not considered[r] then
        local g = p.group
        considered[r] = true
        if r.strikes == 0 or now - r.last >= g.every then
          r.strikes, r.last, r.dirty = min(r.strikes + 1, 65535), now, true
          if r.strikes > g.after then
            r.till = now + min(g.base * 2 ^ min(r.strikes - g.after, 64), g.max)
          end
          r.written = max(now, r.till)
          strikes = max(strikes, r.strikes)
          if r.till > till then
            longest, till = i, r.till
          end
        end
      end
    end
    if longest > 0 then
      reply[verdict], reply[verdict + 1], reply[verdict + 2], reply[verdict + 3], reply[verdict + 4] = 2, longest, till, strikes, 1
      replies = verdict + 4
    else
      reply[verdict], reply[verdict + 1] = 1, strikes
      for i = 1, n do
        local short = ps[i].dry and ts[i] < ps[i].cost
        reply[verdict + 1 + i] = short and -ts[i] - 1 or ts[i]
      end
      replies = verdict + 1 + n
    end
  end

  -- until when the keys must be kept: until the buckets that were looked at are full
  for i = 1, (allowed or strikes > 0 or longest == 0) and n or 0 do
    local p, k = ps[i], bs[i].key
    local missing, num = p.burst - ts[i], p.num
    local whole = floor(missing / num)
    local full = whole * p.den + ceil((missing - whole * num) * p.den / num)
    if full > needs[k] then
      needs[k] = full
    end
  end
end

-- write, with a TTL on every key: the latest time at which any of its state still matters
for i = 1, nrecords do
  local r = records[i]
  if r.strikes > 0 then
    needs[r.key] = max(needs[r.key], max(r.last, r.till) + r.window - now)
  end
  if r.hand ~= 0 then
    needs[r.key] = max(needs[r.key], max(r.hand, -r.hand) - now)
  end
  if not r.dirty then
    -- it is what is stored
  elseif r.hand ~= 0 then
    call('HSET', KEYS[r.key], r.field, pack(HAND, 2, r.strikes, r.till, r.last, r.hand))
  else
    call('HSET', KEYS[r.key], r.field, pack(RECORD, 1, r.strikes, r.till, r.last))
  end
end
for i = 1, nbuckets do
  local b = buckets[i]
  if not b.dirty then
    -- it is what is stored
  elseif b.leased + b.before > 0 then
    call('HSET', KEYS[b.key], b.field, pack(LEASED, 2, b.tokens, now, b.num, b.den, b.leased, b.before))
  else
    call('HSET', KEYS[b.key], b.field, pack(BUCKET, 1, b.tokens, now, b.num, b.den))
  end
end
for k, key in ipairs(KEYS) do
  -- a refusal alone changes nothing here, unless it asks under a larger burst than any before: that bucket is full later
  local ttl, need = call('PTTL', key), ceil(needs[k] / 1000)
  if ttl == -1 or ttl >= 0 and ttl < need then
    call('PEXPIRE', key, need + floor(min(need / 4, LONGER)) + MARGIN)
  end
end

reply[2] = healed
return reply
