//go:build soak

package ratelimit

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"
)

// Five million clients that nobody has seen before, while a known client goes on: memory stays within max_keys, the known one
// does not feel it, and who is blocked stays blocked. The numbers are in the log: this machine may be busy.
func TestSoakFloodOfFreshIdentities(t *testing.T) {
	const flood, maxKeys = 5_000_000, 100_000
	m := newMemoryStore()
	now := int64(1_764_550_000_000_000)
	known, blocked := limited("api", 1, "1/h", 1_000_000_000), limited("api", 2, "1/h", 1)
	blocked.Penalty = defaultRules()
	for range 5 {
		takeNow(m, now, []Charge{blocked}, maxKeys)
	}
	measure := func(n int, between func(i int)) (p50, p99 time.Duration) {
		took := make([]time.Duration, n)
		for i := range took {
			between(i)
			begun := time.Now()
			takeNow(m, now, []Charge{known}, maxKeys)
			took[i] = time.Since(begun)
		}
		slices.Sort(took)
		return took[n/2], took[n*99/100]
	}
	p50, p99 := measure(flood/10, func(int) {})
	t.Logf("a known client before: p50 %s, p99 %s", p50, p99)
	before := heap()
	fresh := limited("api", 0, "1/m", 5)
	p50, p99 = measure(flood/10, func(i int) {
		for j := range 10 {
			binary.BigEndian.PutUint64(fresh.ID[4:], uint64(i*10+j)*0x9E3779B97F4A7C15)
			takeNow(m, now, []Charge{fresh}, maxKeys)
		}
		now++
	})
	t.Logf("a known client during the flood: p50 %s, p99 %s", p50, p99)
	grown := heap() - before
	buckets, records := m.len()
	t.Logf("%d fresh identities: heap grown by %d MB, %d buckets and %d records kept, %d lost", flood, grown>>20, buckets, records, m.evicted())
	if buckets+records > maxKeys || grown > maxKeys*400 {
		t.Errorf("%d entries, %d bytes", buckets+records, grown)
	}
	out := takeNow(m, now, []Charge{blocked}, maxKeys)
	if out.verdict != verdictBlocked {
		t.Error("the flood displaced a block")
	}
}

// Redis hangs for a minute at a thousand requests a second, after it was slow for a while.
func TestSoakStalls(t *testing.T) {
	stallsUnderLoad(t, stallTimes{well: 10 * time.Second, slow: 20 * time.Second, hung: time.Minute})
}
