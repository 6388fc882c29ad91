package ratelimit

import "testing"

const ms = 1000 // µs

// A breaker's life as a timeline of calls; timeout is 50 ms everywhere.
func TestBreaker(t *testing.T) {
	const timeout = 50 * ms
	type step struct {
		why     string
		at      int64
		do      func(b *breaker, at int64) (tripped bool)
		tripped bool
		down    bool
	}
	start := func(b *breaker, at int64) bool { b.start(at); return false }
	answered := func(b *breaker, at int64) bool { b.answered(at); return false }
	failedSince := func(started int64) func(*breaker, int64) bool {
		return func(b *breaker, at int64) bool { return b.failed(started, at, timeout) }
	}
	for name, steps := range map[string][]step{
		"one slow reply is not down": {
			{why: "a call", at: 0, do: start},
			{why: "times out", at: 50 * ms, do: failedSince(0)},
			{why: "the next is answered", at: 60 * ms, do: start},
			{at: 61 * ms, do: answered},
			{why: "so the count begins again", at: 70 * ms, do: start},
			{at: 71 * ms, do: failedSince(70 * ms)},
			{at: 72 * ms, do: start},
			{why: "second in a row", at: 73 * ms, do: failedSince(72 * ms)},
		},
		"three refused connections in a row": {
			{at: 0, do: start}, {at: 1, do: failedSince(0)},
			{at: 1, do: start}, {at: 2, do: failedSince(1)},
			{at: 2, do: start}, {why: "the third", at: 3, do: failedSince(2), tripped: true, down: true},
		},
		"a dead connection fails a batch at once, which is one failure": {
			{at: 0, do: start}, {at: 1, do: start}, {at: 2, do: start}, {at: 3, do: start},
			{at: 10, do: failedSince(0)}, {at: 10, do: failedSince(1)}, {at: 11, do: failedSince(2)}, {at: 11, do: failedSince(3)},
		},
		"silence while somebody waits": {
			{why: "the first of a steady stream", at: 0, do: start},
			{at: 40 * ms, do: start},
			{why: "one round trip failed", at: 50 * ms, do: failedSince(0)},
			{at: 60 * ms, do: start},
			{why: "the same silence", at: 90 * ms, do: failedSince(40 * ms)},
			{why: "nobody got an answer for 2 × timeout", at: 110 * ms, do: failedSince(60 * ms), tripped: true, down: true},
		},
		"an idle store has not been silent": {
			{at: 0, do: start}, {at: 1, do: answered},
			{why: "an hour later", at: 3600_000 * ms, do: start},
			{why: "one timeout", at: 3600_050 * ms, do: failedSince(3600_000 * ms)},
		},
		"what fails after the change is not a second change": {
			{at: 0, do: start}, {at: 0, do: start},
			{at: 100 * ms, do: failedSince(0), tripped: true, down: true},
			{at: 100 * ms, do: failedSince(0), down: true},
		},
		"back after a probe": {
			{at: 0, do: start},
			{at: 100 * ms, do: failedSince(0), tripped: true, down: true},
			{at: 900 * ms, do: func(b *breaker, at int64) bool { return b.reset(at) != 800*ms }},
			{why: "a single failure does not count what was before", at: 901 * ms, do: start},
			{at: 902 * ms, do: failedSince(901 * ms)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := new(breaker)
			for i, s := range steps {
				if tripped := s.do(b, s.at); tripped != s.tripped {
					t.Fatalf("step %d (%s): tripped %v, want %v", i, s.why, tripped, s.tripped)
				}
				if down, _ := b.state(); down != s.down {
					t.Fatalf("step %d (%s): down %v, want %v", i, s.why, down, s.down)
				}
			}
		})
	}
}

func TestBreakerLetsNobodyThroughWhileDown(t *testing.T) {
	b := new(breaker)
	b.trip(5)
	if b.start(6) {
		t.Error("a call began while the store was down")
	}
	if b.reset(7); !b.start(8) {
		t.Error("no call could begin after the store came back")
	}
}

func TestBreakerDoubted(t *testing.T) {
	var b breaker
	doubted := func(why string, now int64, want bool) {
		t.Helper()
		if got := b.doubted(now, 1000); got != want {
			t.Errorf("%s: doubted is %v, want %v", why, got, want)
		}
	}
	doubted("nothing happened", 0, false)
	b.start(10)
	b.failed(10, 20, 100)
	doubted("a call got no answer", 20, true)
	doubted("that is long ago", 1021, false)
	b.start(1030)
	b.answered(1040)
	doubted("the next one got one", 1040, false)
	b.trip(1050)
	doubted("it is down", 5000, true)
}
