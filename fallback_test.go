package ratelimit

import (
	"context"
	"testing"
	"time"
)

// scriptedStore is a remote store that answers what it is told to.
type scriptedStore struct {
	decision Decision
	err      error
	calls    int
}

func (s *scriptedStore) Take(context.Context, []Charge) (Decision, error) {
	s.calls++
	return s.decision, s.err
}

func (*scriptedStore) split([]Charge) [][]Charge          { return nil }
func (*scriptedStore) giveBack(context.Context, []Charge) {}
func (*scriptedStore) budget([]Charge) time.Duration      { return time.Second }
func (*scriptedStore) retryAfter(*Charge) time.Duration   { return 3 * time.Second }

// newTestLimiter returns a limiter with a clock that stands until it is moved.
func newTestLimiter(remote remoteStore, nodes int64) (*Limiter, *int64) {
	now := int64(1_764_550_000_000_000)
	return &Limiter{
		remote: remote, local: newMemoryStore(), shares: newMemoryStore(), known: newKnownBlocks(), refusals: newRefusalCache(), leases: newLeaseTable(),
		nodes: func() int64 { return nodes }, maxKeys: 1000, now: func() int64 { return now },
	}, &now
}

func testCharge(zone string, burst int64) Charge {
	return Charge{Zone: zone, ID: ID{1}, Limit: Limit{Num: 1, Den: 3600, Burst: burst * Token}, Cost: Token, Floor: Token}
}

// admitted counts how many of n requests in a row are allowed.
func admitted(l *Limiter, n int, charges ...Charge) int {
	count := 0
	for range n {
		if l.Decide(context.Background(), charges).Allowed {
			count++
		}
	}
	return count
}

// A refusal by the remote store is final: if it led to the fallback, every client would have its limit twice.
func TestRefusalIsNoFailure(t *testing.T) {
	l, _ := newTestLimiter(&scriptedStore{decision: Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: time.Second, tokens: []int64{0}}}, 1)
	if n := admitted(l, 10, testCharge("api", 5)); n != 0 {
		t.Errorf("%d requests passed after the store refused them", n)
	}
	if buckets, _ := l.shares.len(); buckets != 0 {
		t.Errorf("%d buckets of the fallback were touched", buckets)
	}
}

func TestWhatHoldsWhileTheStoreIsDown(t *testing.T) {
	down := &scriptedStore{err: errDown}
	for name, test := range map[string]struct {
		policy Policy
		nodes  int64
		floor  int64
		want   int // of 100 requests at a burst of 40
	}{
		"the share":                          {PolicyShare, 4, 1, 10},
		"the share of one node is all":       {PolicyShare, 1, 1, 40},
		"a share holds the largest cost":     {PolicyShare, 100, 7, 7},
		"the whole limit":                    {PolicyFull, 4, 1, 40},
		"refused":                            {PolicyDeny, 4, 1, 0},
		"let through":                        {PolicyAllow, 4, 1, 100},
		"a share that is not a whole number": {PolicyShare, 16, 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := newTestLimiter(down, test.nodes)
			c := testCharge("api", 40)
			c.OnStoreError, c.Floor = test.policy, test.floor*Token
			if n := admitted(l, 100, c); n != test.want {
				t.Errorf("%d admitted, want %d", n, test.want)
			}
		})
	}
}

func TestUnavailableSaysWhenToTryAgain(t *testing.T) {
	l, _ := newTestLimiter(&scriptedStore{err: errTimeout}, 1)
	c := testCharge("login", 40)
	c.OnStoreError = PolicyDeny
	d := l.Decide(context.Background(), []Charge{testCharge("api", 40), c})
	if d.Allowed || d.Reason != ReasonUnavailable || d.RetryAfter != 3*time.Second {
		t.Errorf("got %+v", d)
	}
	if buckets, _ := l.shares.len(); buckets != 0 {
		t.Error("a refused request was charged in the fallback")
	}
}

// A single failed call uses the same bucket as an outage does, and the bucket refills between outages.
func TestSharePersistsBetweenOutages(t *testing.T) {
	remote := &scriptedStore{err: errTimeout}
	l, now := newTestLimiter(remote, 2)
	c := testCharge("api", 20) // 1/h: a share of 10, refilled at 1 in 2 h
	if n := admitted(l, 100, c); n != 10 {
		t.Fatalf("%d admitted in the first outage, want 10", n)
	}
	remote.err, remote.decision = nil, Decision{Allowed: true}
	*now += 2 * 3600 * 1e6
	if n := admitted(l, 5, c); n != 5 {
		t.Fatalf("%d of 5 admitted by the store", n)
	}
	remote.err = errTimeout
	if n := admitted(l, 100, c); n != 1 {
		t.Errorf("%d admitted in the second outage two hours later, want 1", n)
	}
}

func TestBlockIsKnownWhileTheStoreIsDown(t *testing.T) {
	remote := &scriptedStore{decision: Decision{Reason: ReasonBlocked, Zone: "api", RetryAfter: 2 * time.Minute}}
	l, now := newTestLimiter(remote, 1)
	c := testCharge("api", 5)
	c.Penalty = &penaltyRules{after: 3, base: 60e6, max: 3600e6, window: 3600e6}
	admitted(l, 1, c)
	remote.err = errDown
	*now += 119e6
	if d := l.Decide(context.Background(), []Charge{c}); d.Reason != ReasonBlocked || d.RetryAfter != time.Second {
		t.Errorf("a second before the end of the block: %+v", d)
	}
	*now += 1e6
	if n := admitted(l, 100, c); n != 5 {
		t.Errorf("%d admitted after the end of the block, want the share of 5", n)
	}
	if d := l.Decide(context.Background(), []Charge{c}); d.Strikes != 0 || d.Reason != ReasonLimited {
		t.Errorf("a refusal by a share was a strike: %+v", d)
	}
}

// What a zone lets pass while the store is down, it does not let pass for a client that is blocked.
func TestBlockHoldsWhereRequestsAreLetThrough(t *testing.T) {
	remote := &scriptedStore{decision: Decision{Reason: ReasonBlocked, Zone: "api", RetryAfter: 2 * time.Minute}}
	l, now := newTestLimiter(remote, 1)
	c := testCharge("api", 5)
	c.OnStoreError = PolicyAllow
	c.Penalty = &penaltyRules{after: 3, base: 60e6, max: 3600e6, window: 3600e6}
	admitted(l, 1, c)
	remote.err = errDown
	*now += 119e6
	if d := l.Decide(context.Background(), []Charge{c}); d.Allowed || d.Reason != ReasonBlocked || d.RetryAfter != time.Second || d.Zone != "api" {
		t.Errorf("a second before the end of the block: %+v", d)
	}
	other, dry := c, c
	other.ID, dry.DryRun = ID{2}, true
	if n := admitted(l, 10, other) + admitted(l, 10, dry); n != 20 {
		t.Errorf("%d of 20 let through that are not blocked", n)
	}
	*now += 1e6
	if n := admitted(l, 100, c); n != 100 {
		t.Errorf("%d of 100 let through after the end of the block", n)
	}
}

// Zones in the process and zones in Redis are charged together or not at all.
func TestLocalZoneGetsItsTokensBack(t *testing.T) {
	remote := &scriptedStore{decision: Decision{Reason: ReasonLimited, Zone: "fine", RetryAfter: time.Second, tokens: []int64{0}}}
	l, _ := newTestLimiter(remote, 1)
	coarse := testCharge("coarse", 10)
	coarse.Local = true
	if n := admitted(l, 100, coarse, testCharge("fine", 5)); n != 0 {
		t.Fatalf("%d admitted against the will of the remote store", n)
	}
	calls := remote.calls
	if n := admitted(l, 100, coarse); n != 10 {
		t.Errorf("%d admitted by the local zone afterwards, want all 10", n)
	}
	if remote.calls != calls {
		t.Error("a request of local zones only went to the remote store")
	}
	admitted(l, 1, coarse, testCharge("fine", 5))
	if remote.calls != calls {
		t.Error("a request that the local zone refuses went to the remote store")
	}
}

func TestTighterZoneIsShown(t *testing.T) {
	remote := &scriptedStore{decision: Decision{Allowed: true, Zone: "fine", Limit: 10, Remaining: 8, fraction: 0.8}}
	l, _ := newTestLimiter(remote, 1)
	coarse := testCharge("coarse", 10)
	coarse.Local = true
	want := []string{"fine", "coarse", "coarse", "coarse"} // coarse has 0.9, 0.8 (as tight), 0.7, 0.6 left
	for i, zone := range want {
		if d := l.Decide(context.Background(), []Charge{coarse, testCharge("fine", 10)}); d.Zone != zone {
			t.Errorf("request %d: zone %q binds, want %q", i, d.Zone, zone)
		}
	}
}

func TestShareIsExactlyCalculable(t *testing.T) {
	for _, nodes := range []int64{1, 2, 3, 7, 10, 40, 1000, 65_536} {
		for _, rate := range []string{"1/h", "100/m", "1/day", "123457/day", "999999937/s", "1/1500ms"} {
			r, err := ParseRate(rate)
			if err != nil {
				t.Fatal(err)
			}
			l := Limit{Num: r.num, Den: r.den, Burst: 100 * Token}
			s := l.share(nodes, Token)
			if !exact(s.Num, s.Den) || s.Burst < Token {
				t.Errorf("%s over %d nodes: %+v", rate, nodes, s)
			}
			whole, part := float64(l.Num)/float64(l.Den), float64(s.Num)/float64(s.Den)*float64(nodes)
			if part > whole*(1+1e-12) || part < whole*0.999 {
				t.Errorf("%s over %d nodes adds up to %g of %g", rate, nodes, part, whole)
			}
		}
	}
}
