package ratelimit

import (
	"context"
	"strings"
	"testing"
	"time"
)

// partedStore is a remote store of which each identity is kept somewhere else, as on a Cluster. What is kept, it keeps in
// memory; parts of it can be down.
type partedStore struct {
	*memoryStore
	now  *int64
	down map[ID]bool
	log  []string
}

func (s *partedStore) Take(_ context.Context, charges []Charge) (Decision, error) {
	s.note("take", charges)
	if s.down[charges[0].ID] {
		return Decision{}, errDown
	}
	out := takeNow(s.memoryStore, *s.now, charges, 1000)
	d := out.decision(charges, SourceRedis)
	d.tokens = out.tokens
	return d, nil
}

func (s *partedStore) note(what string, charges []Charge) {
	for i := range charges {
		what += " " + charges[i].Zone
	}
	s.log = append(s.log, what)
}

// split keeps every zone apart.
func (s *partedStore) split(charges []Charge) (parts [][]Charge) {
	for i := range charges {
		parts = append(parts, charges[i:i+1])
	}
	return parts
}

func (s *partedStore) giveBack(_ context.Context, charges []Charge) {
	s.note("give back", charges)
	s.memoryStore.giveBack(*s.now, charges)
}

func (*partedStore) budget([]Charge) time.Duration    { return 10 * time.Second }
func (*partedStore) retryAfter(*Charge) time.Duration { return 3 * time.Second }

func newPartedStore() (*partedStore, *Limiter) {
	s := &partedStore{memoryStore: newMemoryStore(), down: map[ID]bool{}}
	l, now := newTestLimiter(s, 2)
	s.now = now
	return s, l
}

// lift ends a block the way that operators do: a record of no strikes stays.
func (s *partedStore) lift(c *Charge) {
	s.change(*s.now, c.ID, c.Penalty, 1000, liftedAt)
}

func liftedAt(now int64, _ strikeRecord) strikeRecord { return strikeRecord{last: now} }

// chargeOf returns a charge of an identity that is its own.
func chargeOf(zone string, burst int64) Charge {
	c := testCharge(zone, burst)
	c.ID = ID{zone[0]}
	return c
}

func (s *partedStore) wantLog(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(s.log, ", "); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	s.log = nil
}

// Parts are asked in the order of their zones; a later refusal gives back what earlier ones took, and none is struck for it but
// the first.
func TestPartsAreChargedTogetherOrNotAtAll(t *testing.T) {
	s, l := newPartedStore()
	rules := &penaltyRules{after: 0, base: 60e6, max: 60e6, window: 60e6}
	a, b, c := chargeOf("a", 10), chargeOf("b", 2), chargeOf("c", 10)
	a.Penalty, b.Penalty, c.Penalty = rules, rules, rules
	if n := admitted(l, 2, a, b, c); n != 2 {
		t.Fatalf("%d of 2 admitted", n)
	}
	s.log = nil
	if d := l.Decide(context.Background(), []Charge{a, b, c}); d.Reason != ReasonLimited || d.Zone != "b" || d.Strikes != 0 {
		t.Errorf("got %+v", d)
	}
	s.wantLog(t, "take a, take b, give back a")
	if n := admitted(l, 8, a); n != 8 {
		t.Errorf("%d of the 8 left admitted: a refused request took some", n)
	}
	if n := admitted(l, 8, c); n != 8 {
		t.Errorf("%d of the 8 left admitted: c was charged for a refused request", n)
	}
	if d := l.Decide(context.Background(), []Charge{a, b, c}); d.Reason != ReasonBlocked || d.Zone != "a" || d.Strikes != 1 {
		t.Errorf("the first one asked: %+v", d)
	}
}

// While the server of one zone is down, the others are exact; a sensitive zone that is down refuses, and the others get back what
// they gave.
func TestPartThatIsDown(t *testing.T) {
	s, l := newPartedStore()
	a, b, c := chargeOf("a", 10), chargeOf("b", 4), chargeOf("c", 10)
	s.down[b.ID] = true
	if n := admitted(l, 10, a, b, c); n != 2 {
		t.Errorf("%d admitted, want the share of b: 2", n)
	}
	s.log = nil
	if n := admitted(l, 10, a, c); n != 8 {
		t.Errorf("%d admitted, want what 2 left: 8", n)
	}
	s.log = nil
	b.OnStoreError = PolicyDeny
	if d := l.Decide(context.Background(), []Charge{chargeOf("aa", 1), b}); d.Reason != ReasonUnavailable {
		t.Errorf("got %+v", d)
	}
	s.wantLog(t, "take aa, take b, give back aa")

	// What a share took is given back, too.
	s.down = map[ID]bool{a.ID: true}
	a = chargeOf("ax", 4)
	full := chargeOf("d", 1)
	admitted(l, 1, full)
	if n := admitted(l, 5, a, full); n != 0 {
		t.Errorf("%d admitted", n)
	}
	if n := admitted(l, 5, a); n != 2 {
		t.Errorf("%d admitted, want the whole share: 2", n)
	}
}

// A block that is known is refused without a call, for everything that it refuses; every four seconds one request asks.
func TestKnownBlockIsAskedAboutSeldom(t *testing.T) {
	s, l := newPartedStore()
	c := chargeOf("z", 1)
	c.Penalty = &penaltyRules{after: 0, base: 30e6, max: 60e6, window: 60e6}
	admitted(l, 1, c)
	local := chargeOf("local", 5)
	local.Local = true
	s.log = nil
	wantRefused := func(calls int) {
		t.Helper()
		s.log = nil
		for range 100 {
			if d := l.Decide(context.Background(), []Charge{local, chargeOf("a", 1000), c}); d.Reason != ReasonBlocked || d.Zone != "z" {
				t.Fatalf("got %+v", d)
			}
		}
		if len(s.log) != calls {
			t.Errorf("%d calls, want %d: %v", len(s.log), calls, s.log)
		}
	}
	if d := l.Decide(context.Background(), []Charge{c}); !d.BlockStarted || d.RetryAfter != time.Minute {
		t.Fatalf("got %+v", d)
	}
	wantRefused(0)
	*s.now += 4e6
	wantRefused(1) // its part first: nothing has to be given back
	*s.now += 3_999_999
	wantRefused(0)
	s.down[c.ID] = true
	*s.now += 1
	wantRefused(1) // no answer: the block holds, and is asked about again a second later
	*s.now += 999_999
	wantRefused(0)
	*s.now += 1
	wantRefused(1)
	*s.now += 5e6
	s.down[c.ID] = false
	s.lift(&c)
	c.Limit.Burst = 2 * Token
	if d := l.Decide(context.Background(), []Charge{c}); d.Reason == ReasonBlocked && !d.BlockStarted {
		t.Errorf("after it was lifted: %+v", d)
	}
	if n := admitted(l, 5, local); n != 5 {
		t.Errorf("%d of 5 admitted: a blocked request took tokens", n)
	}
}

// Two blocks of one request are asked about at once; while one of them is fresh, none is.
func TestKnownBlocksOfTwoIdentities(t *testing.T) {
	s, l := newPartedStore()
	rules := &penaltyRules{after: 0, base: 30e6, max: 60e6, window: 60e6}
	a, b := chargeOf("a", 1), chargeOf("b", 1)
	a.Penalty, b.Penalty, b.Limit.Den = rules, rules, 1 // b has its token back after a second
	admitted(l, 2, a)
	*s.now += 3e6
	admitted(l, 2, b)
	s.log = nil
	for _, step := range []struct {
		after int64
		want  string
	}{
		{1, ""},
		{2, ""}, // a has been known for 6 s, but b is fresh
		{1, "take b"},
		{3, ""},
	} {
		*s.now += step.after * 1e6
		admitted(l, 10, a, b)
		s.wantLog(t, step.want)
	}
	*s.now += 1e6
	s.lift(&b)
	admitted(l, 10, a, b)
	s.wantLog(t, "take b, take a, give back b")
	*s.now += 5e6
	s.lift(&a)
	a.Limit.Burst = 2 * Token
	*s.now += 7200 * 1e6
	if n := admitted(l, 1, a, b); n != 1 {
		t.Error("both are lifted, and one still blocks")
	}
}

// Zones with one key share a record of strikes: a request that is charged by several of them asks about its block once, and
// does not take itself for somebody else who asks.
func TestKnownBlockOfSeveralZonesIsLifted(t *testing.T) {
	s, l := newRemoteMemory()
	rules := &penaltyRules{after: 0, base: 600e6, max: 3600e6, window: 3600e6}
	a, b := testCharge("a", 1), testCharge("b", 10)
	a.Penalty, b.Penalty = rules, rules
	admitted(l, 2, a, b)
	if d := l.Decide(context.Background(), []Charge{a, b}); d.Reason != ReasonBlocked || d.Source != SourceCache {
		t.Fatalf("got %+v, want a known block", d)
	}
	s.memory.change(*s.now, a.ID, rules, 1000, liftedAt)
	*s.now += 60e6
	if d := l.Decide(context.Background(), []Charge{a, b}); d.Reason == ReasonBlocked && !d.BlockStarted {
		t.Errorf("a minute after the block was lifted elsewhere: %+v", d)
	}
}
