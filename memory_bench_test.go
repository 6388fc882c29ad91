package ratelimit

import (
	"math/rand/v2"
	"runtime"
	"testing"
)

// The hostile cases of the memory store: what one request takes.

// A request allocates the list of what is left, and nothing else.
func TestMemoryAllocations(t *testing.T) {
	m := newMemoryStore()
	api := zone("api", limit(t, "1000/s", 1000))
	four := api.together(zone("search", api.Limit), zone("login", rare(t)).by(2).striking("p"), zone("web", api.Limit).by(3))
	for range 10 {
		m.take(0, four, million)
	}
	for why, charges := range map[string][]Charge{
		"allowed": api.together(), "refused": zone("login", rare(t)).by(2).together(), "blocked": four,
	} {
		if got := testing.AllocsPerRun(100, func() { m.take(0, charges, million) }); got > 1 {
			t.Errorf("%s: %v allocations", why, got)
		}
	}
}

func BenchmarkMemoryAllowed(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", limit(b, "1000/s", 1000)).together()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.take(int64(i)*1000, charges, million)
	}
}

func BenchmarkMemoryAllowedTwoZones(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", limit(b, "1000/s", 1000)).together(zone("search", limit(b, "1000/s", 1000)).by(2))
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		m.take(int64(i)*1000, charges, million)
	}
}

func BenchmarkMemoryRefused(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", rare(b)).together()
	m.take(1, charges, million)
	b.ReportAllocs()
	for b.Loop() {
		m.take(2, charges, million)
	}
}

func BenchmarkMemoryBlocked(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", rare(b)).striking("p").together()
	for range 5 {
		m.take(1, charges, million)
	}
	b.ReportAllocs()
	for b.Loop() {
		m.take(2, charges, million)
	}
}

// Requests of a million clients in random order: what the caches of the processor make of it.
func BenchmarkMemoryMillionKeys(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", limit(b, "100/h", 100)).together()
	for i := range uint64(million) {
		charges[0].ID = testID(i)
		m.take(int64(i), charges, million)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		charges[0].ID = testID(rand.Uint64N(million))
		m.take(million+int64(i), charges, million)
	}
}

// What a bucket takes, of a million: the time means nothing.
func BenchmarkMemoryBytesPerBucket(b *testing.B) {
	m, bytes := filled(b, million)
	for b.Loop() {
		runtime.KeepAlive(m)
	}
	b.ReportMetric(float64(bytes), "B/bucket")
}

// Fresh keys at the bound, while nothing that is stored is full yet: each of them displaces another.
func BenchmarkMemoryFloodAtBound(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", limit(b, "100/h", 100)).together()
	b.ReportAllocs()
	for i := uint64(0); b.Loop(); i++ {
		charges[0].ID = testID(i)
		m.take(int64(i), charges, 100_000)
	}
	b.ReportMetric(float64(m.evicted())/float64(b.N), "evicted/op")
}

// The same with buckets that are full before the bound is reached.
func BenchmarkMemoryFloodBelowBound(b *testing.B) {
	m := newMemoryStore()
	charges := zone("api", limit(b, "100/s", 100)).together()
	b.ReportAllocs()
	for i := uint64(0); b.Loop(); i++ {
		charges[0].ID = testID(i)
		m.take(int64(i), charges, 100_000)
	}
}

func BenchmarkMemoryParallel(b *testing.B) {
	m, l := newMemoryStore(), limit(b, "1000/s", 1000)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		charges := zone("api", l).together()
		for i := int64(0); pb.Next(); i++ {
			charges[0].ID = testID(rand.Uint64N(1000))
			m.take(i, charges, million)
		}
	})
}
