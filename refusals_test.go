package ratelimit

import (
	"context"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// remoteMemory is a remote store that keeps buckets in memory, at the test's clock, and counts its calls.
type remoteMemory struct {
	scriptedStore
	memory *memoryStore
	now    *int64
}

func (s *remoteMemory) Take(_ context.Context, charges []Charge) (Decision, error) {
	s.calls++
	out := takeNow(s.memory, *s.now, charges, 1000)
	d := out.decision(charges, SourceRedis)
	d.tokens = out.tokens
	return d, nil
}

func newRemoteMemory() (*remoteMemory, *Limiter) {
	s := &remoteMemory{memory: newMemoryStore()}
	l, now := newTestLimiter(s, 1)
	s.now = now
	return s, l
}

// hammer sends a request a millisecond and returns how many were admitted.
func (s *remoteMemory) hammer(l *Limiter, milliseconds int, charges ...Charge) (count int) {
	for range milliseconds {
		count += admitted(l, 1, charges...)
		*s.now += 1000
	}
	return count
}

// A flood of refused requests costs the store two calls a second, and what flows in is admitted all the same.
func TestRefusedFloodIsServedHere(t *testing.T) {
	s, l := newRemoteMemory()
	c := testCharge("api", 5)
	c.Limit = Limit{Num: 1, Den: 10, Burst: 5 * Token} // a token in 10 s
	if n := s.hammer(l, 100, c); n != 5 {
		t.Fatalf("%d admitted, want the burst of 5", n)
	}
	s.calls = 0
	if n := s.hammer(l, 60_000, c); n != 6 {
		t.Errorf("%d admitted in a minute, want 6", n)
	}
	if s.calls > 60*2 {
		t.Errorf("%d calls in a minute, want 2 a second at most", s.calls)
	}
	t.Logf("%d calls for 60000 requests in a minute", s.calls)
}

// What was refused for a cost is not refused for a smaller one, and each is told its own time to wait.
func TestRefusalsKnowCosts(t *testing.T) {
	s, l := newRemoteMemory()
	one := testCharge("api", 10)
	one.Limit = Limit{Num: 1, Den: 1, Burst: 10 * Token}
	seven, ten := one, one
	seven.Cost, ten.Cost = 7*Token, 10*Token
	admitted(l, 1, seven)
	s.calls = 0
	for _, test := range []struct {
		charge Charge
		wait   time.Duration
	}{{ten, 7 * time.Second}, {seven, 4 * time.Second}, {one, 0}, {seven, 5 * time.Second}} {
		if d := l.Decide(context.Background(), []Charge{test.charge}); d.RetryAfter != test.wait {
			t.Errorf("cost %d: told to wait %s, want %s", test.charge.Cost/Token, d.RetryAfter, test.wait)
		}
	}
	if s.calls != 2 && s.calls != 3 {
		t.Errorf("%d calls", s.calls)
	}
}

// A limit that was raised, tokens that were given back, and requests of others act as if there were no memory of refusals, given
// back ones within a second.
func TestRefusalsAreForgotten(t *testing.T) {
	s, l := newRemoteMemory()
	c := testCharge("api", 2)
	if n := s.hammer(l, 10, c); n != 2 {
		t.Fatalf("%d admitted", n)
	}
	faster := c
	faster.Limit.Num, faster.Limit.Den = 1000, 1
	*s.now += 1000
	if n := s.hammer(l, 1, faster); n != 0 { // the millisecond before it counts at the old rate
		t.Fatalf("%d admitted", n)
	}
	if n := s.hammer(l, 10, faster); n != 10 {
		t.Errorf("%d of 10 admitted after the limit was raised", n)
	}
	other := c
	other.ID = ID{9}
	s.hammer(l, 10, other)
	s.memory.giveBack(*s.now, []Charge{other})
	if n := s.hammer(l, 1001, other); n != 1 {
		t.Errorf("%d admitted in the second after one was given back", n)
	}
}

// A refusal that is a strike is the store's to count, every time.
func TestStrikesAreNotCached(t *testing.T) {
	s, l := newRemoteMemory()
	c := testCharge("api", 1)
	c.Penalty = &penaltyRules{after: 3, base: 60e6, max: 3600e6, window: 3600e6}
	admitted(l, 1, c)
	for strikes := int64(1); strikes <= 4; strikes++ {
		if d := l.Decide(context.Background(), []Charge{c}); d.Strikes != strikes || d.BlockStarted != (strikes == 4) {
			t.Errorf("strike %d: %+v", strikes, d)
		}
	}
	s.calls = 0
	if n := s.hammer(l, 4000, c); n != 0 || s.calls > 1 {
		t.Errorf("%d admitted and %d calls under the block", n, s.calls)
	}
	early := c // early data is never a strike
	early.NoStrike, early.ID = true, ID{7}
	s.hammer(l, 1, early)
	s.calls = 0
	if s.hammer(l, 100, early); s.calls > 1 {
		t.Errorf("%d calls for refusals that are no strikes", s.calls)
	}
}

// Whatever is asked: what the memory of refusals refuses, the store would refuse, and who waits as long as he is told gets in.
func TestRefusalsAreTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, l := newRemoteMemory()
		kinds := make([]Charge, 3)
		for i := range kinds {
			limit := Limit{Num: rapid.Int64Range(1, 50).Draw(t, "num"), Den: rapid.Int64Range(1, 50).Draw(t, "den"), Burst: rapid.Int64Range(7, 20).Draw(t, "burst") * Token}
			kinds[i] = Charge{Zone: string(rune('a' + i)), ID: ID{1}, Limit: limit, Floor: Token, DryRun: rapid.IntRange(0, 5).Draw(t, "dry") == 0}
		}
		for range 300 {
			var charges []Charge
			for _, c := range kinds {
				if rapid.Bool().Draw(t, "zone") {
					c.Cost = rapid.Int64Range(1, 7).Draw(t, "cost") * Token
					charges = append(charges, c)
				}
			}
			if len(charges) == 0 {
				continue
			}
			*s.now += rapid.SampledFrom([]int64{0, 1000, 50_000, 900_000}).Draw(t, "idle")
			d := l.Decide(context.Background(), charges)
			if d.Source != SourceCache {
				continue
			}
			// Two zones may ask for nearly the same wait, and each of them be the one that is named. So the named one is asked alone, too.
			named := slices.IndexFunc(charges, func(c Charge) bool { return c.Zone == d.Zone })
			for _, asked := range [][]Charge{charges, charges[named : named+1]} {
				fresh := takeNow(s.memory, *s.now, asked, 1000)
				want := fresh.decision(asked, SourceCache)
				if want.Allowed || want.RetryAfter > d.RetryAfter || want.RetryAfter < d.RetryAfter-100*time.Microsecond {
					t.Fatalf("refused with %+v, the store says %+v of %+v", d, want, asked)
				}
			}
		}
	})
}

// What floods cost that are answered here, in the limiter alone: nothing that lasts.
func TestFloodsAllocateLittle(t *testing.T) {
	s, l := newRemoteMemory()
	limited := testCharge("api", 1)
	blocked := testCharge("login", 1)
	blocked.Penalty = &penaltyRules{after: 0, base: 60e6, max: 3600e6, window: 3600e6}
	s.hammer(l, 3, limited)
	s.hammer(l, 3, blocked)
	for name, charges := range map[string][]Charge{"limited": {limited}, "blocked": {blocked}} {
		if n := testing.AllocsPerRun(100, func() { l.Decide(context.Background(), charges) }); n > 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkRefusedHere(b *testing.B) {
	s, l := newRemoteMemory()
	charges := []Charge{testCharge("api", 1)}
	s.hammer(l, 3, charges...)
	b.ReportAllocs()
	for b.Loop() {
		l.Decide(context.Background(), charges)
	}
}

func BenchmarkBlockedHere(b *testing.B) {
	s, l := newRemoteMemory()
	c := testCharge("login", 1)
	c.Penalty = &penaltyRules{after: 0, base: 60e6, max: 3600e6, window: 3600e6}
	charges := []Charge{c}
	s.hammer(l, 3, charges...)
	b.ReportAllocs()
	for b.Loop() {
		l.Decide(context.Background(), charges)
	}
}
