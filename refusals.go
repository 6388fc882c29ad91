package ratelimit

import (
	"hash/maphash"
	"slices"
	"sync/atomic"
)

// This file remembers refusals of the remote store for a moment, so that a client who hammers costs it next to nothing. What is
// kept are the buckets of the refused request: since it debited nothing, and others can only take more, a request with the same
// charges is refused while they, refilled, hold too little for it. What this process itself takes from such a bucket meanwhile
// ends that: the client would be told too short a time to wait.

const (
	// refusalLife bounds for how long tokens that somebody gave back, or a bucket that an operator reset, are not seen.
	refusalLife = 1_000_000 // µs
	// refusalRenew is the age from which on one request asks the store again, while the others are still refused.
	refusalRenew = 800_000 // µs
	// refusalSlots bounds how many refusals are kept. Two that share a slot displace each other, which costs a call.
	refusalSlots = 1 << 13
	// refusalTurns is how many counters tell apart the buckets that were taken from. Two that share one cost a call.
	refusalTurns = 1 << 14
)

// refusalCache holds the latest refusals. All methods may be called at the same time.
type refusalCache struct {
	seed  maphash.Seed
	slots [refusalSlots]atomic.Pointer[refusal]
	turns [refusalTurns]atomic.Uint32
}

func newRefusalCache() *refusalCache { return &refusalCache{seed: maphash.MakeSeed()} }

// refusal is what the store knew when it refused a request.
type refusal struct {
	of      []bucketKey
	tokens  []int64 // of each bucket, in millionths; marked as in an outcome
	at      int64   // µs by our clock, when the answer was there: the buckets hold no less than what has flowed in since
	turn    uint32  // sum of the counters of the buckets
	renewed atomic.Bool
}

// bucketKey says which bucket a charge is about, under which limit. A limit that was changed is another key: it acts at once.
type bucketKey struct {
	id    ID
	zone  string
	limit Limit
}

func keyOf(c *Charge) bucketKey { return bucketKey{c.ID, c.Zone, c.Limit} }

// hash is of a bucket.
func (c *refusalCache) hash(charge *Charge) uint64 {
	return maphash.Bytes(c.seed, charge.ID[:]) ^ maphash.String(c.seed, charge.Zone)
}

func (c *refusalCache) slot(charges []Charge) *atomic.Pointer[refusal] {
	sum := uint64(0)
	for i := range charges {
		sum = sum*31 + c.hash(&charges[i])
	}
	return &c.slots[sum%refusalSlots]
}

// turn returns the sum of the counters of buckets.
func (c *refusalCache) turn(charges []Charge) (sum uint32) {
	for i := range charges {
		sum += c.turns[c.hash(&charges[i])%refusalTurns].Load()
	}
	return sum
}

// took notes that this process took tokens.
func (c *refusalCache) took(charges []Charge) {
	for i := range charges {
		c.turns[c.hash(&charges[i])%refusalTurns].Add(1)
	}
}

// keep notes that the store refused charges, and what it left in their buckets.
func (c *refusalCache) keep(now int64, charges []Charge, tokens []int64) {
	if !cacheable(charges, tokens) {
		return
	}
	r := &refusal{of: make([]bucketKey, len(charges)), tokens: slices.Clone(tokens), at: now, turn: c.turn(charges)}
	for i := range charges {
		r.of[i] = keyOf(&charges[i])
	}
	c.slot(charges).Store(r)
}

// cacheable says whether a refusal has no more effect than to refuse: a strike is the store's to count.
func cacheable(charges []Charge, tokens []int64) bool {
	for i := range charges {
		c := &charges[i]
		if tokens[i] < c.Cost && c.Penalty != nil && !c.NoStrike && !c.DryRun {
			return false
		}
	}
	return true
}

// refuse says whether charges are refused without asking the store, and what their buckets hold. The outcome keeps tokens, which
// has room for each charge.
func (c *refusalCache) refuse(now int64, charges []Charge, tokens []int64) (outcome, bool) {
	r := c.slot(charges).Load()
	if r == nil || now-r.at >= refusalLife || !r.isOf(charges) || r.turn != c.turn(charges) {
		return outcome{}, false
	}
	out := outcome{now: now, tokens: tokens}
	for i := range charges {
		l := charges[i].Limit
		had := unmarked(r.tokens[i])
		out.found(i, &charges[i], had+refilled(max(now-r.at, 0), l.Num, l.Den, l.Burst-had))
	}
	if out.verdict != verdictLimited || !cacheable(charges, out.tokens) {
		return outcome{}, false
	}
	if now-r.at >= refusalRenew && r.renewed.CompareAndSwap(false, true) {
		return outcome{}, false
	}
	return out, true
}

func (r *refusal) isOf(charges []Charge) bool {
	if len(r.of) != len(charges) {
		return false
	}
	for i := range charges {
		if r.of[i] != keyOf(&charges[i]) {
			return false
		}
	}
	return true
}
