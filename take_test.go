package ratelimit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const testNow = int64(1_700_000_000_000_000)

// holding is the state of a charge whose bucket holds so many tokens now.
func holding(c Charge, tokens float64) state {
	return state{bucket: Bucket{Tokens: int64(tokens * Token), At: testNow, Num: c.Limit.Num, Den: c.Limit.Den}}
}

// struckBefore adds strikes to a state, the last of them now, and a block that ends after so long.
func struckBefore(s state, strikes int64, block time.Duration) state {
	s.record = strikeRecord{strikes: strikes, last: testNow}
	if block > 0 {
		s.record.until = testNow + us(block)
	}
	return s
}

// show prints an outcome and what take wrote: b for a bucket, r for a record, ! for a charge that its dry run
// kept from refusing.
func show(out outcome, states []state) string {
	var text strings.Builder
	switch out.verdict {
	case verdictAllowed:
		text.WriteString("allowed")
	case verdictLimited:
		text.WriteString("limited")
	case verdictBlocked:
		fmt.Fprintf(&text, "blocked by %d for %v", out.charge, micro(out.until-out.now))
	}
	if out.strikes > 0 {
		fmt.Fprintf(&text, ", strike %d", out.strikes)
	}
	if out.blockStarted {
		text.WriteString(" started")
	}
	text.WriteString("; left")
	for i, tokens := range out.tokens {
		fmt.Fprintf(&text, " %g", float64(unmarked(tokens))/Token)
		if tokens < 0 {
			text.WriteString("!")
		}
		if states[i].wroteBucket {
			text.WriteString("b")
		}
		if states[i].wroteRecord {
			text.WriteString("r")
		}
	}
	return text.String()
}

func TestTake(t *testing.T) {
	ten := limit(t, "1/s", 10)
	a := Charge{Zone: "a", ID: ID{1}, Limit: ten, Cost: Token}
	b := Charge{Zone: "b", ID: ID{2}, Limit: ten, Cost: 5 * Token}
	struck := func(c Charge, group string) Charge {
		c.Penalty = penalties(group)
		return c
	}
	with := func(c Charge, change func(*Charge)) Charge {
		change(&c)
		return c
	}
	dry := func(c *Charge) { c.DryRun = true }
	early := func(c *Charge) { c.NoStrike = true }
	sameID := func(c *Charge) { c.ID = a.ID }
	ap, bp := struck(a, "p"), struck(b, "p")

	for _, c := range []struct {
		why     string
		charges []Charge
		states  []state
		want    string
	}{
		{"no charge, nothing to refuse", nil, nil, "allowed; left"},
		{"a new client has a full bucket", []Charge{a}, []state{{}}, "allowed; left 9b"},
		{"the last token", []Charge{a}, []state{holding(a, 1)}, "allowed; left 0b"},
		{"a millionth is missing", []Charge{a}, []state{holding(a, 0.999999)}, "limited; left 0.999999"},
		{"all pay", []Charge{a, b}, []state{holding(a, 2), holding(b, 7)}, "allowed; left 1b 2b"},
		{"the second cannot pay: none does", []Charge{a, b}, []state{holding(a, 2), holding(b, 4)}, "limited; left 2 4"},
		{"the first cannot pay: none does", []Charge{a, b}, []state{holding(a, 0), holding(b, 7)}, "limited; left 0 7"},
		{"a refusal writes no new bucket", []Charge{a, b}, []state{{}, holding(b, 4)}, "limited; left 10 4"},
		{"a refusal writes repairs only", []Charge{a, b}, []state{{bucket: Bucket{Tokens: 3 * Token, At: testNow + 1, Num: 1, Den: 1}}, holding(b, 4)}, "limited; left 3b 4"},

		{"a dry run never refuses and takes nothing it has not", []Charge{with(a, dry), b}, []state{holding(a, 0.5), holding(b, 7)}, "allowed; left 0.5! 2b"},
		{"a dry run pays what it can", []Charge{with(a, dry), b}, []state{holding(a, 3), holding(b, 7)}, "allowed; left 2b 2b"},
		{"a dry run does not pay for what another refuses", []Charge{with(a, dry), b}, []state{holding(a, 3), holding(b, 1)}, "limited; left 3 1"},
		{"a dry run never strikes", []Charge{with(ap, dry), bp}, []state{holding(a, 0), holding(b, 1)}, "limited, strike 1; left 0! 1r"},

		{"a refusal is a strike", []Charge{ap}, []state{holding(a, 0)}, "limited, strike 1; left 0r"},
		{"strikes count up", []Charge{ap}, []state{struckBefore(holding(a, 0), 2, 0)}, "limited, strike 3; left 0r"},
		{"the fourth starts a block and answers as it", []Charge{ap}, []state{struckBefore(holding(a, 0), 3, 0)}, "blocked by 0 for 2m0s, strike 4 started; left 0r"},
		{"a payment is no strike", []Charge{ap}, []state{struckBefore(holding(a, 1), 3, 0)}, "allowed; left 0b"},
		{"a charge that could pay is not struck", []Charge{ap, bp}, []state{struckBefore(holding(a, 5), 3, 0), holding(b, 0)}, "limited, strike 1; left 5 0r"},
		{"early data does not strike", []Charge{with(ap, early)}, []state{struckBefore(holding(a, 0), 3, 0)}, "limited; left 0"},
		{"but is blocked", []Charge{with(ap, early)}, []state{struckBefore(holding(a, 9), 4, time.Minute)}, "blocked by 0 for 1m0s; left 0"},

		{"blocked: nothing is looked at or written", []Charge{ap, b}, []state{struckBefore(holding(a, 9), 4, time.Minute), holding(b, 9)}, "blocked by 0 for 1m0s; left 0 0"},
		{"the longest block counts", []Charge{ap, bp}, []state{struckBefore(holding(a, 9), 4, time.Minute), struckBefore(holding(b, 9), 5, time.Hour)}, "blocked by 1 for 1h0m0s; left 0 0"},
		{"of two that end together, the first", []Charge{ap, bp}, []state{struckBefore(holding(a, 9), 4, time.Minute), struckBefore(holding(b, 9), 5, time.Minute)}, "blocked by 0 for 1m0s; left 0 0"},
		{"a block that ends now has ended", []Charge{ap}, []state{{record: strikeRecord{4, testNow, testNow - 5, 0}}}, "allowed; left 9b"},
		{"a block that is too long is repaired", []Charge{ap}, []state{struckBefore(holding(a, 9), 4, 24*time.Hour)}, "blocked by 0 for 1h0m0s; left 0r"},
		{"a dry run is not blocked", []Charge{with(ap, dry), b}, []state{struckBefore(holding(a, 9), 4, time.Minute), holding(b, 9)}, "allowed; left 8b 4b"},

		{"one identity, one group: one record, one strike", []Charge{ap, with(bp, sameID)}, []state{struckBefore(holding(a, 0), 2, 0), holding(b, 0)}, "limited, strike 3; left 0r 0"},
		{"the record stands with the first even if the second strikes", []Charge{ap, with(bp, sameID)}, []state{struckBefore(holding(a, 9), 3, 0), holding(b, 0)}, "blocked by 1 for 2m0s, strike 4 started; left 9r 0"},
		{"the record blocks whichever charge is asked", []Charge{with(ap, dry), with(bp, sameID)}, []state{struckBefore(holding(a, 9), 4, time.Minute), holding(b, 9)}, "blocked by 1 for 1m0s; left 0 0"},
		{"two groups are two records", []Charge{ap, with(struck(b, "q"), sameID)}, []state{struckBefore(holding(a, 0), 2, 0), struckBefore(holding(b, 0), 3, 0)}, "blocked by 1 for 2m0s, strike 4 started; left 0r 0r"},
		{"of two blocks that start, the longer answers", []Charge{ap, bp}, []state{struckBefore(holding(a, 0), 4, 0), struckBefore(holding(b, 0), 3, 0)}, "blocked by 0 for 4m0s, strike 5 started; left 0r 0r"},
		{"two identities are two records", []Charge{ap, bp}, []state{struckBefore(holding(a, 0), 2, 0), struckBefore(holding(b, 0), 3, 0)}, "blocked by 1 for 2m0s, strike 4 started; left 0r 0r"},
	} {
		states := append([]state(nil), c.states...)
		if got := show(take(testNow, c.charges, states, make([]int64, len(c.charges))), states); got != c.want {
			t.Errorf("%s\n  got  %s\n  want %s", c.why, got, c.want)
		}
	}
}

// A request can have more charges than an integer has bits; charges that share a record strike it once.
func TestTakeManyCharges(t *testing.T) {
	charges, states := make([]Charge, 200), make([]state, 200)
	for i := range charges {
		charges[i] = Charge{Zone: fmt.Sprint(i), ID: ID{byte(i / 2)}, Limit: limit(t, "1/s", 1), Cost: Token, Penalty: penalties("p")}
		states[i] = holding(charges[i], 0)
	}
	out := take(testNow, charges, states, make([]int64, len(charges)))
	if out.verdict != verdictLimited || out.strikes != 1 {
		t.Fatalf("%d strikes, want 1 for each identity", out.strikes)
	}
}

// At most one strike in `every`, also when two charges of one request share the record.
func TestTakeStrikesEvery(t *testing.T) {
	c := Charge{Zone: "a", Limit: limit(t, "1/h", 1), Cost: Token, Penalty: penalties("p")}
	c.Penalty.every = us(10 * time.Second)
	states := []state{holding(c, 0)}
	for _, step := range []struct {
		at      time.Duration
		strikes int64
		why     string
	}{
		{0, 1, "the first"},
		{time.Second, 0, "a page loads many things at once"},
		{10*time.Second - time.Microsecond, 0, "not yet"},
		{10 * time.Second, 2, "`every` has passed"},
		{15 * time.Second, 0, "it counts from the last strike, not from the last refusal"},
		{20 * time.Second, 3, ""},
	} {
		if out := take(testNow+us(step.at), []Charge{c}, states, make([]int64, len(states))); out.strikes != step.strikes {
			t.Errorf("at %v: strike %d, want %d: %s", step.at, out.strikes, step.strikes, step.why)
		}
	}
}

func TestDecision(t *testing.T) {
	a := Charge{Zone: "a", ID: ID{1}, Limit: limit(t, "1/s", 10), Cost: Token}
	b := Charge{Zone: "b", ID: ID{2}, Limit: limit(t, "1/m", 100), Cost: 5 * Token}
	quiet, dry := b, b
	quiet.Quiet, dry.DryRun = true, true
	ap := a
	ap.Penalty = penalties("p")
	describe := func(d Decision) string {
		return fmt.Sprintf("%v%s %q quiet=%v %d/%d retry %v reset %v", d.Allowed, d.Reason, d.Zone, d.Quiet, d.Remaining, d.Limit, d.RetryAfter, d.ResetAfter)
	}
	for _, c := range []struct {
		why     string
		charges []Charge
		states  []state
		want    string
	}{
		{"no charge shows nothing", nil, nil, `true "" quiet=false 0/0 retry 0s reset 0s`},
		{"what is left after paying", []Charge{a}, []state{{}}, `true "a" quiet=false 9/10 retry 0s reset 1s`},
		{"parts of a token are not left", []Charge{a}, []state{holding(a, 3.9)}, `true "a" quiet=false 2/10 retry 0s reset 7.1s`},
		{"the least part of the burst binds, not the fewest tokens", []Charge{a, b}, []state{holding(a, 9), holding(b, 25)}, `true "b" quiet=false 20/100 retry 0s reset 1h20m0s`},
		{"a quiet zone does not show", []Charge{a, quiet}, []state{holding(a, 9), holding(b, 25)}, `true "a" quiet=false 8/10 retry 0s reset 2s`},
		{"a dry run does not show", []Charge{a, dry}, []state{holding(a, 9), holding(b, 0)}, `true "a" quiet=false 8/10 retry 0s reset 2s`},
		{"nobody shows", []Charge{quiet}, []state{{}}, `true "" quiet=false 0/0 retry 0s reset 0s`},
		{"the longest wait binds", []Charge{a, b}, []state{holding(a, 0), holding(b, 4)}, `falselimited "b" quiet=false 4/100 retry 1m0s reset 1h36m0s`},
		{"one that could pay does not bind", []Charge{a, b}, []state{holding(a, 0.25), holding(b, 5)}, `falselimited "a" quiet=false 0/10 retry 750ms reset 9.75s`},
		{"a quiet zone refuses quietly", []Charge{a, quiet}, []state{holding(a, 0), holding(b, 4)}, `falselimited "b" quiet=true 4/100 retry 1m0s reset 1h36m0s`},
		{"a dry run does not make wait", []Charge{a, dry}, []state{holding(a, 0), holding(b, 4)}, `falselimited "a" quiet=false 0/10 retry 1s reset 10s`},
		{"a block has nothing left until it ends", []Charge{ap}, []state{struckBefore(holding(a, 9), 4, time.Minute)}, `falseblocked "a" quiet=false 0/10 retry 1m0s reset 1m0s`},
		{"a block that starts answers as it", []Charge{ap}, []state{struckBefore(holding(a, 0), 3, 0)}, `falseblocked "a" quiet=false 0/10 retry 2m0s reset 2m0s`},
	} {
		out := take(testNow, c.charges, append([]state(nil), c.states...), make([]int64, len(c.states)))
		if got := describe(out.decision(c.charges, SourceMemory)); got != c.want {
			t.Errorf("%s\n  got  %s\n  want %s", c.why, got, c.want)
		}
	}
}

// A client alone on its buckets that waits as long as it was told succeeds; one microsecond less and it is
// refused again. Holds whatever limits the buckets were under before.
func TestRetryAfterIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		charges := make([]Charge, rapid.IntRange(1, 3).Draw(t, "charges"))
		states, early := make([]state, len(charges)), make([]state, len(charges))
		for i := range charges {
			l := anyLimit.Draw(t, "limit")
			charges[i] = Charge{Zone: fmt.Sprint(i), Limit: l, Cost: rapid.Int64Range(1, l.Burst).Draw(t, "cost")}
			states[i].bucket = Bucket{Tokens: rapid.Int64Range(0, charges[i].Cost).Draw(t, "tokens"), At: testNow, Num: l.Num, Den: l.Den}
		}
		first := take(testNow, charges, states, make([]int64, len(charges)))
		if first.verdict == verdictAllowed {
			t.Skip()
		}
		wait := first.decision(charges, SourceMemory).RetryAfter.Microseconds()
		copy(early, states)
		if take(testNow+wait-1, charges, early, make([]int64, len(charges))).verdict == verdictAllowed {
			t.Fatalf("waiting %d µs is more than it takes", wait)
		}
		if take(testNow+wait, charges, states, make([]int64, len(charges))).verdict != verdictAllowed {
			t.Fatalf("refused after waiting %d µs", wait)
		}
	})
}
