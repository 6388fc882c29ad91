package ratelimit

import "sync"

// This file says whether a store is worth a try. It knows nothing of what it protects; times are microseconds
// by the caller's monotonic clock.

// tripAfter is how many round trips in a row must fail until a store counts as down. One slow reply is not down.
const tripAfter = 3

// breaker counts failures of round trips, not of calls: when a connection dies, everything in flight on it
// fails at once, and that is one failure. The zero value is a store that is up.
type breaker struct {
	mu sync.Mutex
	// down is whether calls are pointless, and since when this is so or not so.
	down  bool
	since int64
	// failures in a row, the last of them counted at lastFailure.
	failures    int
	lastFailure int64
	// waiting calls have no answer yet; silentSince is the last answer, or the start of the first of them.
	waiting     int
	silentSince int64
}

// start notes that a call begins, unless the store is down.
func (b *breaker) start(now int64) (ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return false
	}
	if b.waiting == 0 {
		b.silentSince = now
	}
	b.waiting++
	return true
}

// answered notes that a call got an answer, whatever it said.
func (b *breaker) answered(now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting--
	b.silentSince = now
	b.failures = 0
}

// failed notes that the call begun at started got no answer, and reports whether the store is down from now on: three
// round trips in a row failed, or nobody got an answer for 2 × timeout.
func (b *breaker) failed(started, now, timeout int64) (tripped bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting--
	if b.down {
		return false
	}
	if started >= b.lastFailure { // begun after the last failure was seen: another round trip
		b.failures++
		b.lastFailure = now
	}
	if b.failures < tripAfter && now-b.silentSince < 2*timeout {
		return false
	}
	b.tripLocked(now)
	return true
}

// trip makes the store count as down until a probe succeeds, and reports whether it was up.
func (b *breaker) trip(now int64) (tripped bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.down {
		return false
	}
	b.tripLocked(now)
	return true
}

func (b *breaker) tripLocked(now int64) {
	b.down, b.since = true, now
}

// reset notes that a probe succeeded, and returns for how long the store was down.
func (b *breaker) reset(now int64) (outage int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	outage = now - b.since
	b.down, b.since, b.failures, b.silentSince = false, now, 0, now
	return outage
}

// doubted says whether the store is down, or gave no answer to the last call, which ended at most so long ago.
func (b *breaker) doubted(now, ago int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.down || b.failures > 0 && now-b.lastFailure <= ago
}

// state returns whether the store is down, and since when that is so or not so.
func (b *breaker) state() (down bool, since int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.down, b.since
}
