package ratelimit

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// This file holds the leases of this process: tokens of hot keys that were taken ahead, from which requests are served without a
// call. lease.go says why that never admits too much.

const (
	// leaseAhead is how long a lease should last at the rate that was seen, in microseconds.
	leaseAhead = 50_000
	// leaseRenew is how long before its end a lease is renewed by one request, while the others are still served.
	leaseRenew = 30_000
	// leaseMeter is how long requests are counted before the rate is believed.
	leaseMeter = 50_000
	// leaseSlots bounds how many keys are watched. Of two that share a slot, the one that came first is, while it is in use.
	leaseSlots = 1 << 12
	// leaseIdle is how long a key that nobody asks for keeps its slot.
	leaseIdle = 1_000_000
)

// leaseTable holds leases by bucket. All methods may be called at the same time.
type leaseTable struct {
	seed  maphash.Seed
	slots [leaseSlots]atomic.Pointer[hotKey]
}

func newLeaseTable() *leaseTable { return &leaseTable{seed: maphash.MakeSeed()} }

// hotKey is a bucket of which this process may hold leases. A limit that was changed is another key.
type hotKey struct {
	key bucketKey

	mu     sync.Mutex
	leases [2]lease
	// left is what the last call said that is left, less what was used since.
	left int64
	// used counts tokens since a time; rate is how many that were in leaseAhead the last time it was calculated.
	used, since, rate int64
	// asking says until when a request is on its way that asks for more.
	asking int64
	last   int64 // use
}

// lease is tokens that may be used until a time.
type lease struct{ tokens, granted, until int64 }

// find returns what is known of a charge's bucket, nil if its slot is in use for another.
func (t *leaseTable) find(now int64, c *Charge) *hotKey {
	key := keyOf(c)
	slot := &t.slots[(maphash.Bytes(t.seed, c.ID[:])^maphash.String(t.seed, c.Zone))%leaseSlots]
	h := slot.Load()
	if h != nil && h.key == key {
		return h
	}
	if h != nil && !h.isIdle(now) {
		return nil
	}
	fresh := &hotKey{key: key, since: now, last: now}
	if !slot.CompareAndSwap(h, fresh) {
		return nil
	}
	return fresh
}

func (h *hotKey) isIdle(now int64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return now-h.last > leaseIdle
}

// serve pays a request from leases, if there are some for all of its charges, and says so. If not, it notes in the charges what to
// ask for. The outcome keeps tokens, which has room for each charge.
func (t *leaseTable) serve(now int64, charges []Charge, tokens []int64) (outcome, bool) {
	served := true
	var room [usualCharges]payment
	payments := sized(room[:], len(charges))
	for i := range charges {
		c := &charges[i]
		if !c.Leases || c.DryRun || c.Patient {
			served = false
			continue
		}
		if h := t.find(now, c); h != nil {
			payments[i], c.Ask = h.take(now, c.Cost)
		}
		tokens[i] = payments[i].left
		served = served && payments[i].from != nil
	}
	if served {
		return outcome{now: now, tokens: tokens}, true
	}
	for i := range payments {
		payments[i].putBack()
	}
	return outcome{}, false
}

// payment is what was paid from a lease.
type payment struct {
	from        *hotKey // nil: nothing was
	cost, until int64   // of the lease
	left        int64
}

// putBack returns it, because another charge of the request cannot be paid here.
func (p *payment) putBack() {
	if p.from == nil {
		return
	}
	h := p.from
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.leases {
		if l := &h.leases[i]; l.until == p.until { // no other: it would live longer
			l.tokens += p.cost
			h.left += p.cost
			return
		}
	}
}

// take pays from a lease, if one holds enough. If not, or if it is time to renew the lease, it returns how much to ask for.
func (h *hotKey) take(now, cost int64) (p payment, ask int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.meter(now, cost)
	l := h.lease(now, cost)
	if now >= h.asking && h.wants(now, l) {
		h.asking = now + leasePeriod
		return payment{}, h.rate
	}
	if l == nil {
		return payment{}, 0
	}
	l.tokens -= cost
	h.left -= cost
	return payment{from: h, cost: cost, until: l.until, left: max(h.left, 0)}, 0
}

// meter counts a use.
func (h *hotKey) meter(now, cost int64) {
	if elapsed := now - h.since; elapsed >= leaseMeter {
		h.rate = int64(float64(h.used)*leaseAhead/float64(elapsed)) / Token * Token
		h.used, h.since = 0, now
	}
	h.used += cost
	h.last = now
}

// lease returns the lease that ends first of those that hold enough, nil if none does.
func (h *hotKey) lease(now, cost int64) (first *lease) {
	for i := range h.leases {
		l := &h.leases[i]
		if l.until > now && l.tokens >= cost && (first == nil || l.until < first.until) {
			first = l
		}
	}
	return first
}

// wants says whether it is worth to ask for a lease: two tokens or more will be used in its time, and what there is, is used up
// or ends soon.
func (h *hotKey) wants(now int64, l *lease) bool {
	if h.rate < 2*Token {
		return false
	}
	if l == nil {
		return true
	}
	for _, other := range h.leases {
		if other.until-now >= leaseRenew && other.tokens >= other.granted/4 {
			return false
		}
	}
	return true
}

// learn notes the end of a call that was sent at a time: what is left, and what was leased.
func (t *leaseTable) learn(sent int64, charges []Charge, d *Decision) {
	for i := range charges {
		c := &charges[i]
		if !c.Leases || len(d.tokens) != len(charges) && c.Ask == 0 {
			continue
		}
		if h := t.find(sent, c); h != nil {
			h.learn(sent, c, i, d)
		}
	}
}

func (h *hotKey) learn(sent int64, c *Charge, i int, d *Decision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.Ask > 0 {
		h.asking = 0
	}
	if i < len(d.tokens) {
		h.left = unmarked(d.tokens[i])
	}
	if i >= len(d.grants) || d.grants[i] == 0 {
		return
	}
	oldest := &h.leases[0]
	if h.leases[1].until < oldest.until {
		oldest = &h.leases[1]
	}
	*oldest = lease{tokens: d.grants[i], granted: d.grants[i], until: sent + leasePeriod}
}
