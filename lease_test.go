package ratelimit

import (
	"context"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// slowStore is a remote store at the test's clock, which keeps leases. Calls take time on the way there and back, and replies
// get lost.
type slowStore struct {
	scriptedStore
	model       *plain
	now         *int64
	there, back func() int64
	lose        func() bool
}

func (s *slowStore) Take(_ context.Context, charges []Charge) (Decision, error) {
	s.calls++
	*s.now += s.there()
	d := s.model.decide(*s.now, charges)
	*s.now += s.back()
	if s.lose() {
		return Decision{}, errTimeout
	}
	return d, nil
}

// decide is take, in the words of a remote store.
func (m *plain) decide(now int64, charges []Charge) Decision {
	out := m.take(now, charges)
	for i, leased := range out.grants {
		out.tokens[i] += leased
	}
	d := out.decision(charges, SourceRedis)
	d.tokens, d.grants = out.tokens, out.grants
	return d
}

// meter holds admissions to a limit over every interval: a bucket that starts full and pays for each never lacks a token.
type meter struct {
	limit    Limit
	tokens   int64
	at       int64
	admitted int64
}

func (m *meter) admit(now, cost int64) error {
	// A refill is rounded up here: what the store rounds down may not count against it.
	m.tokens = min(m.limit.Burst, m.tokens+refilled(now-m.at, m.limit.Num, m.limit.Den, m.limit.Burst-m.tokens)+1)
	m.at = now
	m.tokens -= cost
	m.admitted += cost
	if m.tokens < 0 {
		return errors.New("more was admitted than burst + rate × time")
	}
	return nil
}

// Whatever dies, however long calls take, and whichever replies are lost: nodes with leases together never admit more than
// burst + rate × time over any interval.
func TestLeasesNeverAdmitMore(t *testing.T) {
	steps, leased := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		now := int64(1_764_550_000_000_000)
		delay := func(name string) func() int64 {
			return func() int64 {
				return rapid.SampledFrom([]int64{10, 10, 10, 100, 100, 1000, 1000, 1000, 30_000, 120_000}).Draw(t, name)
			}
		}
		s := &slowStore{model: newPlain(), now: &now, there: delay("there"), back: delay("back"), lose: func() bool { return rapid.IntRange(0, 19).Draw(t, "lost") == 0 }}
		nodes := make([]*Limiter, 3)
		for i := range nodes {
			nodes[i], _ = newTestLimiter(s, 1)
			nodes[i].now = func() int64 { return now }
		}
		limit := Limit{
			Num: rapid.SampledFrom([]int64{1, 50, 500, 5000}).Draw(t, "num"), Den: rapid.SampledFrom([]int64{1, 3, 1000}).Draw(t, "den"),
			Burst: rapid.SampledFrom([]int64{5, 100, 1000}).Draw(t, "burst") * Token,
		}
		m := &meter{limit: limit, tokens: limit.Burst, at: now}
		c := Charge{Zone: "hot", ID: ID{1}, Limit: limit, Floor: Token, Leases: true, OnStoreError: PolicyDeny}
		for range 2000 {
			steps++
			if rapid.IntRange(0, 99).Draw(t, "kill") == 0 {
				nodes[rapid.IntRange(0, 2).Draw(t, "whom")].leases = newLeaseTable()
			}
			now += rapid.SampledFrom([]int64{1, 20, 50, 50, 50, 50, 200, 200, 1000, 90_000}).Draw(t, "idle")
			node := nodes[rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "node")]
			c.Cost = rapid.SampledFrom([]int64{1, 1, 1, 2, 5}).Draw(t, "cost") * Token
			d := node.Decide(context.Background(), []Charge{c})
			if d.Source == SourceLease {
				leased++
			}
			if d.Remaining < 0 {
				t.Fatalf("%d left", d.Remaining)
			}
			if !d.Allowed {
				continue
			}
			// What Redis allowed counts when it decided; that is what d.Now says.
			if err := m.admit(max(d.Now, m.at), c.Cost); err != nil {
				t.Fatalf("after %d tokens: %v: %+v", m.admitted/Token, err, d)
			}
		}
	})
	t.Logf("%d steps, %d of them served from leases", steps, leased)
	if steps < 100_000 || leased < 5000 {
		t.Error("too few steps of a kind for the test to mean anything")
	}
}

// What is served from a lease costs no memory.
func TestLeasesAllocateNothing(t *testing.T) {
	l, c := hotLimiter(t)
	charges := []Charge{c}
	if n := testing.AllocsPerRun(100, func() { l.Decide(context.Background(), charges) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if d := l.Decide(context.Background(), charges); d.Source != SourceLease {
		t.Errorf("not served from a lease: %+v", d)
	}
}

func BenchmarkLeased(b *testing.B) {
	l, c := hotLimiter(b)
	charges := []Charge{c}
	b.ReportAllocs()
	for b.Loop() {
		l.Decide(context.Background(), charges)
	}
}

// hotLimiter returns a limiter that holds a lease, and a charge that is served from it. Its clock stands.
func hotLimiter(t testing.TB) (*Limiter, Charge) {
	t.Helper()
	now := int64(1_764_550_000_000_000)
	zero := func() int64 { return 0 }
	s := &slowStore{model: newPlain(), now: &now, there: zero, back: zero, lose: func() bool { return false }}
	l, _ := newTestLimiter(s, 1)
	l.now = func() int64 { return now }
	c := Charge{Zone: "hot", ID: ID{1}, Limit: Limit{Num: 1_000_000_000, Den: 1, Burst: 1_000_000_000 * Token}, Cost: Token, Floor: Token, Leases: true}
	for range 100_000 {
		l.Decide(context.Background(), []Charge{c})
		now++
	}
	return l, c
}
