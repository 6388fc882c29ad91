package ratelimit

// This file holds the token bucket's arithmetic, the way bucket.lua does it in Redis: integers only, time
// passed in. Both sides stay below 2^53, where Lua's doubles count exactly.
//
// The algorithm is the token bucket of ITU-T I.371 (the "leaky bucket as a meter"), refilled continuously.
// What is stored is tokens and the time at which they were counted, not a theoretical arrival time: that
// way a change of the limit leaves the tokens as they are.

// Token is one token in the unit of all bucket arithmetic, millionths of a token.
const Token = 1_000_000

// maxExact bounds every number and every product in bucket arithmetic: doubles count exactly below it.
const maxExact = 1 << 53

// Limit says how fast a bucket refills and how much it holds.
type Limit struct {
	// Num and Den are the refill rate as a reduced fraction: Num millionths of a token every Den
	// microseconds. Both are at least 1 and below 2^32, their product is below 2^53.
	Num, Den int64
	// Burst is the most that the bucket holds, in millionths of a token, at least 1. The time in which it
	// fills is below 2^53 microseconds.
	Burst int64
}

// Bucket is what is left of a limit for one identity. The zero value is a full bucket.
type Bucket struct {
	// Tokens were left at time At, in millionths of a token.
	Tokens int64
	// At is in microseconds, by the clock of the store.
	At int64
	// Num and Den are the rate that applies since At. They are kept because tokens, not time, must survive
	// a change of the limit: the time before the change counts at the old rate, even if nobody asked then.
	Num, Den int64
}

// exact says whether a rate can be calculated with. What is read from Redis may be anything.
func exact(num, den int64) bool {
	return num >= 1 && den >= 1 && num <= (maxExact-1)/den
}

// refilled returns what flows into a bucket in elapsed microseconds, floor(elapsed × num ÷ den), but at most
// room. The product itself may exceed 2^53, so whole multiples of den are counted first.
func refilled(elapsed, num, den, room int64) int64 {
	periods := elapsed / den
	if periods > room/num {
		return room
	}
	return min(periods*num+elapsed%den*num/den, room)
}

// wait returns the microseconds until so many millionths of a token have flowed in, rounded up.
func (l Limit) wait(missing int64) int64 {
	rest := missing % l.Num * l.Den
	return missing/l.Num*l.Den + (rest+l.Num-1)/l.Num
}

// settled returns the bucket as it is now under the limit, and whether the stored one is no longer a
// faithful description of it: made under another rate, or repaired.
func (b Bucket) settled(l Limit, now int64) (_ Bucket, stale bool) {
	if b == (Bucket{}) {
		return Bucket{Tokens: l.Burst, At: now, Num: l.Num, Den: l.Den}, false
	}
	stale = b.Num != l.Num || b.Den != l.Den
	if !exact(b.Num, b.Den) {
		b.Num, b.Den = l.Num, l.Den
	}
	// A time in the future (a clock that jumped at a failover, garbage) is rewritten, not only clamped on
	// reading: otherwise the bucket stands still until that time is reached.
	if b.At > now {
		b.At, stale = now, true
	}
	tokens := min(max(b.Tokens, 0), l.Burst)
	tokens += refilled(now-b.At, b.Num, b.Den, l.Burst-tokens)
	return Bucket{Tokens: tokens, At: now, Num: l.Num, Den: l.Den}, stale
}

// full returns how long, in microseconds from its time, the bucket needs to be full again. A store may then
// forget it.
func (b Bucket) full(l Limit) int64 {
	return l.wait(l.Burst - b.Tokens)
}

// share returns one of so many equal parts of a limit. Its burst is never below floor, the largest cost of the zone.
func (l Limit) share(nodes, floor int64) Limit {
	common := gcd(l.Num, nodes)
	s := Limit{Num: l.Num / common, Den: l.Den * (nodes / common), Burst: max(l.Burst/nodes, floor)}
	for !exact(s.Num, s.Den) { // an odd rate over very many nodes: a little slower, so that it can be calculated with
		s.Num, s.Den = max(s.Num/2, 1), s.Den/2+1
	}
	return s
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
