package ratelimit

import (
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// however small the bound: it holds, and whoever comes is limited.
func TestMemoryBound(t *testing.T) {
	for _, maxKeys := range []int{1, 2, 10, 1000} {
		m := newMemoryStore()
		for client := range uint64(3 * maxKeys) {
			c := zone("api", rare(t)).by(client)
			if first, again := answer(m, 0, maxKeys, c), answer(m, 0, maxKeys, c); first != "allowed, 0 left" || again[:7] != "limited" {
				t.Fatalf("%d keys: client %d: %s, then %s", maxKeys, client, first, again)
			}
			if got, want := stored(t, m, maxKeys), min(int(client)+1, maxKeys); got != want {
				t.Fatalf("%d keys: %d stored after %d clients, want %d", maxKeys, got, client+1, want)
			}
		}
		if got, want := m.evicted(), uint64(2*maxKeys); got != want {
			t.Fatalf("%d keys: %d evicted, want %d", maxKeys, got, want)
		}
	}
}

// Charges of one request may need more room than there is.
func TestMemoryBoundOfManyCharges(t *testing.T) {
	for _, maxKeys := range []int{1, 2, 3, 10} {
		m := newMemoryStore()
		for client := range uint64(100) {
			charges := zone("a", rare(t)).by(client).striking("p").together(zone("b", rare(t)).by(client+1000).striking("q"), zone("c", rare(t)).by(client))
			m.take(1, charges, maxKeys)
			m.take(1, charges, maxKeys)
			stored(t, m, maxKeys)
		}
	}
}

// keeps checks that a client still owes what it has spent.
func keeps(t *testing.T, m *memoryStore, at time.Duration, maxKeys int, c Charge, why string) {
	t.Helper()
	if got := answer(m, at, maxKeys, c); got[:7] != "limited" {
		t.Errorf("%s, but: %s", why, got)
	}
}

func TestMemoryEvictsWhatIsFullSoonest(t *testing.T) {
	m, maxKeys := newMemoryStore(), 100
	hour := limit(t, "1/h", 100)
	for client := range uint64(100) {
		// Client n owes n+1 tokens, so it is full in n+1 hours.
		answer(m, 0, maxKeys, zone("api", hour).by(client).costing(int64(client)+1))
	}
	for client := range uint64(50) {
		answer(m, 0, maxKeys, zone("api", hour).by(client+1000).costing(100))
	}
	if m.evicted() != 50 {
		t.Fatalf("%d evicted, want one for each new client", m.evicted())
	}
	for client := range uint64(50) {
		keeps(t, m, 0, maxKeys, zone("api", hour).by(client+50).costing(100), "the 50 that owe most are kept")
		keeps(t, m, 0, maxKeys, zone("api", hour).by(client+1000), "new clients are stored")
	}
}

// A debit moves a bucket in the order at once, however many were debited since the last eviction.
func TestMemoryEvictsByTheLatestDebit(t *testing.T) {
	m, maxKeys := newMemoryStore(), 1000
	hour := limit(t, "1/h", 100)
	for client := range uint64(1000) {
		answer(m, 0, maxKeys, zone("api", hour).by(client))
	}
	for client := range uint64(999) {
		answer(m, 0, maxKeys, zone("api", hour).by(client).costing(99))
	}
	answer(m, 0, maxKeys, zone("api", hour).by(5000).costing(100))
	if m.evicted() != 1 {
		t.Fatalf("%d evicted, want 1", m.evicted())
	}
	for client := range uint64(999) {
		keeps(t, m, 0, maxKeys, zone("api", hour).by(client), "only the one that owed one token went")
	}
}

func TestMemoryForgetsFullBuckets(t *testing.T) {
	m := newMemoryStore()
	second, hour := limit(t, "1/s", 1), limit(t, "1/h", 1)
	for client := range uint64(1000) {
		answer(m, 0, 2000, zone("api", second).by(client).striking("p"))
		answer(m, 0, 2000, zone("api", second).by(client).striking("p"))
	}
	for client := range uint64(5000) {
		answer(m, 2*time.Hour, 2000, zone("api", hour).by(client+5000))
		stored(t, m, 2000)
	}
	buckets, records := m.len()
	if records != 0 {
		t.Errorf("%d of 1000 records are there after their time", records)
	}
	if got, want := m.evicted(), uint64(5000-2000); got != want {
		t.Errorf("%d evicted, want %d: those that were full cost nobody anything", got, want)
	}
	for range 100 {
		// Requests at the full bound: everything that is stored is full, so two go for each that comes.
		answer(m, 100*time.Hour, 2000, zone("api", hour).by(rand.Uint64()))
	}
	if got, _ := m.len(); got > buckets-80 {
		t.Errorf("%d buckets, of %d that were full", got, buckets)
	}
}

// Below the bound too, what does not matter any more goes little by little.
func TestMemoryForgetsBelowTheBound(t *testing.T) {
	m := newMemoryStore()
	second := limit(t, "1/s", 1)
	for client := range uint64(100) {
		answer(m, 0, million, zone("api", second).by(client).striking("p"))
		answer(m, 0, million, zone("api", second).by(client).striking("p"))
	}
	for client := range uint64(1000) {
		answer(m, 2*time.Hour+time.Duration(client)*time.Second, million, zone("api", second).by(client+1000))
	}
	if buckets, records := m.len(); buckets > 50 || records != 0 || m.evicted() != 0 {
		t.Errorf("%d buckets and %d records, want those of the last few seconds, and none of 100 old records", buckets, records)
	}
}

// A full bucket is full to everybody, whether it is still in memory or not.
func TestMemoryFullAtTheBound(t *testing.T) {
	m, maxKeys := newMemoryStore(), 10
	for client := range uint64(10) {
		answer(m, 0, maxKeys, zone("api", limit(t, "1/s", 1)).by(client))
	}
	for client := range uint64(10) {
		answer(m, time.Second, maxKeys, zone("api", rare(t)).by(client+100))
	}
	if m.evicted() != 0 {
		t.Errorf("%d evicted: full buckets are no loss", m.evicted())
	}
	if got := stored(t, m, maxKeys); got != 10 {
		t.Errorf("%d stored, want 10", got)
	}
}

// block drains a client until it is blocked.
func block(m *memoryStore, at time.Duration, maxKeys int, c Charge) string {
	for range 4 {
		answer(m, at, maxKeys, c)
	}
	return answer(m, at, maxKeys, c)
}

func TestMemoryKeepsBlocksLongest(t *testing.T) {
	m, maxKeys := newMemoryStore(), 100
	login := zone("login", rare(t)).striking("p")
	for client := range uint64(49) {
		if got := block(m, 0, maxKeys, login.by(client)); got[:7] != "blocked" {
			t.Fatalf("client %d: %s", client, got)
		}
	}
	for client := range uint64(5000) {
		// A flood that drains its buckets and is struck for it, but not blocked.
		answer(m, time.Minute, maxKeys, login.by(client+1000))
		answer(m, time.Minute, maxKeys, login.by(client+1000))
		stored(t, m, maxKeys)
	}
	for client := range uint64(49) {
		if got := answer(m, time.Minute, maxKeys, login.by(client)); got != "blocked, wait 1m0s" {
			t.Fatalf("client %d: %s: a blocked client stays blocked through a flood", client, got)
		}
	}
}

func TestMemoryRecordsTakeHalf(t *testing.T) {
	m, maxKeys := newMemoryStore(), 100
	login := zone("login", rare(t)).striking("p")
	for client := range uint64(60) {
		got := block(m, time.Duration(client)*time.Second, maxKeys, login.by(client))
		if blocked := got[:7] == "blocked"; blocked != (client < 50) {
			t.Errorf("client %d: %s: a strike displaces no live block", client, got)
		}
	}
	if _, records := m.len(); records != 50 {
		t.Fatalf("%d records, want half of %d", records, maxKeys)
	}
	if got, want := m.evicted(), uint64(10+10*4); got != want {
		t.Errorf("%d evicted, want %d: the buckets for ten more, and their strikes, that found no room", got, want)
	}
	// Two minutes later the blocks end, one after the other, and make room for others.
	if got := block(m, 2*time.Minute+time.Second, maxKeys, login.by(100)); got[:7] != "blocked" {
		t.Errorf("%s: strikes that block nobody any more go before a block", got)
	}
	for client := range uint64(50) {
		got := answer(m, 2*time.Minute+time.Second, maxKeys, login.by(client))
		if blocked := got[:7] == "blocked"; blocked != (client > 1) {
			t.Errorf("client %d: %s: blocks that have not ended stay", client, got)
		}
	}
}

// Half is the bound of strikes also while the other half is empty, since buckets are forgotten sooner.
func TestMemoryRecordsTakeHalfOfAnEmptyStore(t *testing.T) {
	m, maxKeys := newMemoryStore(), 100
	for client := range uint64(200) {
		at := time.Duration(client) * 10 * time.Second
		c := zone("api", limit(t, "1/s", 1)).by(client).striking("p")
		answer(m, at, maxKeys, c)
		if got := answer(m, at, maxKeys, c); got != "limited, wait 1s, strike 1" {
			t.Fatal(got)
		}
		stored(t, m, maxKeys)
	}
	if _, records := m.len(); records != 50 {
		t.Errorf("%d records, want half of %d", records, maxKeys)
	}
	for client := range uint64(50) {
		c := zone("api", limit(t, "1/s", 1)).by(client + 150).striking("p")
		answer(m, 2000*time.Second, maxKeys, c)
		if got := answer(m, 2000*time.Second, maxKeys, c); got != "limited, wait 1s, strike 2" {
			t.Errorf("client %d: %s: the latest strikes are kept", client+150, got)
		}
	}
}

// A bound that a reload lowers is reached by displacing two for each that comes; one that is raised acts at once.
func TestMemoryChangeOfBound(t *testing.T) {
	m := newMemoryStore()
	api := zone("api", rare(t)).striking("p")
	for client := range uint64(500) {
		answer(m, 0, 1000, api.by(client))
		answer(m, 0, 1000, api.by(client))
	}
	if got := stored(t, m, 1000); got != 1000 {
		t.Fatalf("%d stored, want a bucket and a record for each", got)
	}
	for client := range uint64(1000) {
		answer(m, 0, 100, zone("api", rare(t)).by(client+1000))
		buckets, records := m.len()
		if got, want := buckets+records, max(1000-int(client)-1, 100); got != want {
			t.Fatalf("%d buckets and %d records after %d new clients, want %d", buckets, records, client+1, want)
		}
	}
	stored(t, m, 100)
	for client := range uint64(1000) {
		answer(m, 0, 200, zone("api", rare(t)).by(client+5000))
	}
	if got := stored(t, m, 200); got != 200 {
		t.Errorf("%d stored, want 200", got)
	}
}

// An attacker with a fresh identity for each request frees neither himself nor anybody else.
func TestMemoryFlood(t *testing.T) {
	maxKeys, flood := size(100_000), size(2_000_000)
	m := newMemoryStore()
	hour, minute := limit(t, "100/h", 100), limit(t, "100/m", 100)
	drained, blocked := zone("api", hour).by(1), zone("login", rare(t)).by(2).striking("p")
	answer(m, 0, maxKeys, drained.costing(100))
	if got := block(m, 0, maxKeys, blocked); got[:7] != "blocked" {
		t.Fatal(got)
	}

	before := heap()
	charges := zone("api", minute).together()
	for i := range int64(flood) {
		charges[0].ID = testID(rand.Uint64())
		m.take(i/10, charges, maxKeys) // ten a microsecond: none is full before the flood is over
	}
	grown := heap() - before
	stored(t, m, maxKeys)
	t.Logf("%d keys, at most %d stored: heap grew by %d kB, %d evicted", flood, maxKeys, grown>>10, m.evicted())
	if grown > int64(maxKeys)*200 {
		t.Errorf("heap grew by %d kB", grown>>10)
	}
	keeps(t, m, time.Second, maxKeys, drained, "a drained client whose bucket refills later than those of the flood stays limited")
	if got := answer(m, time.Second, maxKeys, blocked); got != "blocked, wait 1m59s" {
		t.Errorf("a blocked client: %s", got)
	}
	runtime.KeepAlive(m)
}

func TestMemoryBytesPerBucket(t *testing.T) {
	m, bytes := filled(t, size(million))
	t.Logf("%d bytes a bucket, its key twice among them", bytes)
	if bytes > 150 {
		t.Errorf("%d bytes a bucket, want at most 150", bytes)
	}
	stored(t, m, million)
}

// filled returns a store with so many buckets, and how many bytes each of them takes.
func filled(t testing.TB, buckets int) (m *memoryStore, bytesEach int64) {
	before := heap()
	m = newMemoryStore()
	charges := zone("api", rare(t)).together()
	for i := range uint64(buckets) {
		charges[0].ID = testID(i)
		m.take(1, charges, million)
	}
	return m, (heap() - before) / int64(buckets)
}

// heap returns the bytes in use.
func heap() int64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// size returns n, or a twentieth under the race detector, which makes everything that much slower.
func size(n int) int {
	info, _ := debug.ReadBuildInfo()
	for _, s := range info.Settings {
		if s.Key == "-race" && s.Value == "true" {
			return n / 20
		}
	}
	return n
}
