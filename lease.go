package ratelimit

// This file holds the arithmetic of leases, the way bucket.lua does it in Redis; pure, with the time passed in.
//
// A lease is tokens that one node takes ahead, to serve requests from them without a call. It lives leasePeriod, by the node's
// own clock from before its call was sent, so that it is over before that time has passed at the store, whatever the way to it
// takes. The store keeps what was leased in this and in the previous period, and lets a bucket fill only up to the burst less
// that sum: bucket and live leases together are never more than the burst, whatever dies. Without this, tokens that are held
// while the bucket refills would be spent on top of a full one.

const (
	// leasePeriod is how long a lease lives, in microseconds.
	leasePeriod = 100_000
	// leasePart bounds a lease: at most one part in so many of what is left.
	leasePart = 4
)

// leaseSums are the tokens leased in the period in which a bucket was counted, and in the period before, in millionths.
type leaseSums struct{ this, before int64 }

func (s leaseSums) total() int64 { return s.this + s.before }

// settledBeside returns a bucket as it is now beside what was leased of it, that sum as it is now, and whether what is stored is
// no longer a faithful description.
func (b Bucket) settledBeside(s leaseSums, l Limit, now int64) (_ Bucket, _ leaseSums, stale bool) {
	if s.total() == 0 {
		b, stale = b.settled(l, now)
		return b, s, stale
	}
	stale = b.Num != l.Num || b.Den != l.Den || b.At > now
	if !exact(b.Num, b.Den) {
		b.Num, b.Den = l.Num, l.Den
	}
	tokens, at := max(b.Tokens, 0), min(b.At, now)
	ends := (at/leasePeriod + 1) * leasePeriod
	for range 2 {
		room := max(l.Burst-s.total(), 0)
		to := min(now, ends)
		tokens = min(tokens, room)
		tokens += refilled(to-at, b.Num, b.Den, room-tokens)
		if now < ends {
			return Bucket{Tokens: tokens, At: now, Num: l.Num, Den: l.Den}, s, stale
		}
		at, ends, s = to, ends+leasePeriod, leaseSums{before: s.this}
	}
	tokens = min(tokens, l.Burst)
	tokens += refilled(now-at, b.Num, b.Den, l.Burst-tokens)
	return Bucket{Tokens: tokens, At: now, Num: l.Num, Den: l.Den}, leaseSums{}, stale
}

// lease takes up to ask millionths ahead, in whole tokens, and returns how many.
func (s *state) lease(ask int64) int64 {
	grant := min(ask, s.bucket.Tokens/leasePart/Token*Token)
	s.bucket.Tokens -= grant
	s.leased.this += grant
	return grant
}
