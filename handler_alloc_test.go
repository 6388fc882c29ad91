//go:build !race

package ratelimit

import "testing"

// Under the race detector, pools forget things at random.

// What a request costs in the handler, all in all: what is known of it, and the text of the headers. A second zone adds nothing,
// a refusal its own headers and body.
func TestRequestAllocatesLittle(t *testing.T) {
	for name, test := range map[string]struct {
		zones map[string]*Zone
		most  float64
	}{
		"allowed":     {map[string]*Zone{"api": zoneOf(t, "1000000/s")}, 2},
		"three zones": {map[string]*Zone{"a": zoneOf(t, "1000000/s"), "b": zoneOf(t, "1000000/s"), "c": zoneOf(t, "1000000/s")}, 2},
		"refused":     {map[string]*Zone{"api": zoneOf(t, "1/day")}, 5},
	} {
		a := newArrival(t, test.zones)
		a.again(t)
		if n := testing.AllocsPerRun(200, func() { a.again(t) }); n > test.most {
			t.Errorf("%s: %v allocations, want at most %v", name, n, test.most)
		}
	}
}

// Whoever wants to know who asks for most pays with a lock, not with memory.
func TestTopAllocatesNothing(t *testing.T) {
	a := newArrival(t, map[string]*Zone{"api": zoneOf(t, "1000000/s")})
	a.handler.app.topClients = newTopSketch(a.handler.limiter.now(), 1)
	a.again(t)
	if n := testing.AllocsPerRun(200, func() { a.again(t) }); n > 2 {
		t.Errorf("%v allocations, want at most 2", n)
	}
}
