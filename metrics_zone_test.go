package ratelimit

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"testing"
)

// counted returns what a zone has counted.
func (n *zoneCounts) counted() (all []string) {
	add := func(count uint64, what ...any) {
		if count > 0 {
			all = append(all, fmt.Sprintln(append(what, count)...))
		}
	}
	add(n.requests.Load(), "requests")
	add(n.near.Load(), "near")
	add(n.strikes.Load(), "strikes")
	add(n.blocks.Load(), "blocks")
	for r := range n.wouldDeny {
		add(n.wouldDeny[r].Load(), "would be", refusalReasons[r])
	}
	for r := range n.decisions {
		for s := range n.decisions[r] {
			add(n.decisions[r][s].Load(), resultNames[r], Source(s))
		}
	}
	return all
}

// Each decision is counted once, at the zone that decided, and each zone counts what concerns it.
func TestCountDecided(t *testing.T) {
	set := func(places ...uint8) (s chargeSet) {
		for _, place := range places {
			s.add(place)
		}
		return s
	}
	for _, c := range []struct {
		why  string
		d    Decision
		want [2]string
	}{
		{"the zone that binds", Decision{Allowed: true, Zone: "b", Source: SourceLease}, [2]string{"[requests 1\n]", "[requests 1\n allowed lease 1\n]"}},
		{"nobody shows its numbers: the first", Decision{Allowed: true, Source: SourceMemory}, [2]string{"[requests 1\n allowed memory 1\n]", "[requests 1\n]"}},
		{"near the limit", Decision{Allowed: true, Zone: "a", Source: SourceRedis, near: set(1)}, [2]string{"[requests 1\n allowed redis 1\n]", "[requests 1\n near 1\n]"}},
		{"a strike", Decision{Reason: ReasonLimited, Zone: "b", Source: SourceRedis, Strikes: 2}, [2]string{"[requests 1\n]", "[requests 1\n strikes 1\n limited redis 1\n]"}},
		{"a block", Decision{Reason: ReasonBlocked, Zone: "b", Source: SourceRedis, Strikes: 4, BlockStarted: true}, [2]string{"[requests 1\n]", "[requests 1\n strikes 1\n blocks 1\n blocked redis 1\n]"}},
		{"a block that is known", Decision{Reason: ReasonBlocked, Zone: "a", Source: SourceCache}, [2]string{"[requests 1\n blocked cache 1\n]", "[requests 1\n]"}},
		{"two dry runs", Decision{Allowed: true, Source: SourceRedis, short: set(0, 1)}, [2]string{"[requests 1\n would be limited 1\n allowed redis 1\n]", "[requests 1\n would be limited 1\n]"}},
		{"a closed zone and a share in dry runs", Decision{Allowed: true, Source: SourceShare, short: set(0, 1), closed: set(0)}, [2]string{"[requests 1\n would be unavailable 1\n allowed share 1\n]", "[requests 1\n would be limited 1\n]"}},
		{"a closed zone", Decision{Reason: ReasonUnavailable, Zone: "a"}, [2]string{"[requests 1\n unavailable none 1\n]", "[requests 1\n]"}},
	} {
		charges := placed(Charge{Zone: "a", counts: new(zoneCounts)}, Charge{Zone: "b", counts: new(zoneCounts)})
		countDecided(charges, &c.d)
		for i, want := range c.want {
			if got := fmt.Sprint(charges[i].counts.counted()); got != want {
				t.Errorf("%s: zone %s counted %q, want %q", c.why, charges[i].Zone, got, want)
			}
		}
	}
}

// What no zone decided is counted without one; an error of the user's own matchers is no decision.
func TestCountWithoutAZone(t *testing.T) {
	h := newArrival(t, map[string]*Zone{"api": zoneOf(t, "1/s")}).handler
	h.app.unzoned = new(zoneCounts) // tests that run before have counted
	r := httptest.NewRequest("GET", "/", nil)
	for _, err := range []error{errEarlyData, errIdentityRequired, errNoAddress, errors.New("a matcher failed")} {
		h.watch.unclaimed(r, err)
	}
	h.watch.exempt()
	want := "[unavailable none 1\n exempt none 1\n rejected none 2\n]"
	if got := fmt.Sprint(h.app.unzoned.counted()); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
