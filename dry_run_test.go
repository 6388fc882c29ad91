package ratelimit

import (
	"context"
	"fmt"
	"slices"
	"testing"
)

// marks says what a decision tells of charges in a dry run, and of those near their limit, by their zones.
func (d *Decision) marks(charges []Charge) string {
	var short, near, closed []string
	for i := range charges {
		if d.short.holds(charges[i].place) {
			short = append(short, charges[i].Zone)
		}
		if d.closed.holds(charges[i].place) {
			closed = append(closed, charges[i].Zone)
		}
		if d.near.holds(charges[i].place) {
			near = append(near, charges[i].Zone)
		}
	}
	text := fmt.Sprintf("%s %q of %v, near %v", d.WouldDeny, d.WouldDenyZone, short, near)
	if closed != nil {
		text += fmt.Sprintf(", closed %v", closed)
	}
	return text
}

// placed gives charges their places, as a handler does.
func placed(charges ...Charge) []Charge {
	for i := range charges {
		charges[i].place = uint8(i)
	}
	return charges
}

func TestWouldDeny(t *testing.T) {
	a := Charge{Zone: "a", ID: ID{1}, Limit: limit(t, "1/s", 10), Cost: Token}
	b := Charge{Zone: "b", ID: ID{2}, Limit: limit(t, "1/m", 100), Cost: 5 * Token}
	dryA, dryB, struck := a, b, a
	dryA.DryRun, dryB.DryRun = true, true
	struck.Penalty = penalties("p")
	one, two, most, nearlyMost := a, a, a, a
	one.Limit, two.Limit = limit(t, "1/s", 1), limit(t, "1/s", 2)
	most.Cost, nearlyMost.Cost = 8*Token, 8*Token-1
	for _, c := range []struct {
		why     string
		charges []Charge
		states  []state
		want    string
	}{
		{"nothing to tell", []Charge{a, dryB}, []state{{}, {}}, ` "" of [], near []`},
		{"a dry run that could be paid, just so", []Charge{dryA}, []state{holding(a, 1)}, ` "" of [], near [a]`},
		{"one that could not, by a millionth", []Charge{dryA}, []state{holding(a, 0.999999)}, `limited "a" of [a], near []`},
		{"no tokens at all", []Charge{dryA}, []state{holding(a, 0)}, `limited "a" of [a], near []`},
		{"of two, the one that makes wait longest", []Charge{dryA, dryB}, []state{holding(a, 0), holding(b, 4)}, `limited "b" of [a b], near []`},
		{"beside a refusal", []Charge{dryB, a}, []state{holding(b, 4), holding(a, 0)}, `limited "b" of [b], near []`},
		{"a block is decided without the tokens", []Charge{dryB, struck}, []state{holding(b, 4), struckBefore(holding(a, 0), 4, us2m)}, ` "" of [], near []`},
		{"80 % used, by this request", []Charge{a, b}, []state{holding(a, 3), holding(b, 25)}, ` "" of [], near [a b]`},
		{"not quite", []Charge{a, b}, []state{holding(a, 3.000001), holding(b, 25.5)}, ` "" of [], near []`},
		{"every request of a burst of 1 uses all of it", []Charge{one}, []state{{}}, ` "" of [], near []`},
		{"the first request of a burst of 2", []Charge{two}, []state{{}}, ` "" of [], near []`},
		{"the second", []Charge{two}, []state{holding(two, 1)}, ` "" of [], near [a]`},
		{"80 % used by one request alone", []Charge{most}, []state{{}}, ` "" of [], near []`},
		{"by one that takes a little less, and others", []Charge{nearlyMost}, []state{holding(a, 9.9)}, ` "" of [], near [a]`},
		{"a refusal is not near the limit, but over it", []Charge{a}, []state{holding(a, 0)}, ` "" of [], near []`},
	} {
		charges := placed(c.charges...)
		out := take(testNow, charges, slices.Clone(c.states), make([]int64, len(charges)))
		d := out.decision(charges, SourceMemory)
		if got := d.marks(charges); got != c.want {
			t.Errorf("%s\n  got  %s\n  want %s", c.why, got, c.want)
		}
	}
}

const us2m = 120_000_000_000 // 2 min

// The last of as many charges as a handler can have is told from the others.
func TestWouldDenyOfManyCharges(t *testing.T) {
	charges, states := make([]Charge, maxZones), make([]state, maxZones)
	for i := range charges {
		charges[i] = Charge{Zone: fmt.Sprint(i), ID: ID{byte(i)}, Limit: limit(t, "1/s", 10), Cost: Token, DryRun: true}
	}
	last := len(charges) - 1
	states[last] = holding(charges[last], 0)
	out := take(testNow, placed(charges...), states, make([]int64, len(charges)))
	d := out.decision(charges, SourceMemory)
	if got, want := d.marks(charges), `limited "254" of [254], near []`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Whoever decides about a charge in a dry run, and beside which others, what it would have done is told.
func TestWouldDenyBySeveralStores(t *testing.T) {
	dry := func(zone string, id byte, policy Policy) Charge {
		c := testCharge(zone, 1)
		c.ID, c.DryRun, c.OnStoreError = ID{id}, true, policy
		return c
	}
	here, open := testCharge("here", 1), testCharge("open", 1000)
	here.DryRun, here.Local, here.ID, open.ID = true, true, ID{9}, ID{8}
	roomy := open
	roomy.Zone, roomy.Local = "roomy", true
	tight := testCharge("tight", 1)
	tight.ID = ID{7}
	for _, c := range []struct {
		why     string
		down    bool
		charges []Charge
		want    string
	}{
		{"in memory beside Redis", false, []Charge{here, open}, `true limited "here" of [here], near []`},
		{"in memory, and Redis refuses", false, []Charge{here, tight}, `false limited "here" of [here], near []`},
		{"in two parts of Redis", false, []Charge{dry("a", 1, PolicyShare), open, dry("b", 2, PolicyShare)}, `true limited "a" of [a b], near []`},
		{"in one part of Redis, and another refuses", false, []Charge{dry("a", 1, PolicyShare), tight}, `false limited "a" of [a], near []`},
		{"by a share", true, []Charge{dry("a", 1, PolicyShare), open}, `true limited "a" of [a], near []`},
		{"a sensitive zone while Redis is down", true, []Charge{dry("a", 1, PolicyDeny)}, `true unavailable "a" of [a], near [], closed [a]`},
		{"beside one that is counted then", true, []Charge{dry("a", 1, PolicyDeny), open}, `true unavailable "a" of [a], near [], closed [a]`},
		{"beside one in memory", true, []Charge{dry("a", 1, PolicyDeny), roomy}, `true unavailable "a" of [a], near [], closed [a]`},
		{"beside one in memory that would refuse, too", true, []Charge{dry("a", 1, PolicyDeny), here}, `true limited "here" of [a here], near [], closed [a]`},
	} {
		s, l := newPartedStore()
		for id := range byte(10) {
			s.down[ID{id}] = c.down
		}
		charges := placed(slices.Clone(c.charges)...)
		l.Decide(context.Background(), slices.Clone(charges))
		d := l.Decide(context.Background(), slices.Clone(charges))
		if got := fmt.Sprintf("%v %s", d.Allowed, d.marks(charges)); got != c.want {
			t.Errorf("%s\n  got  %s\n  want %s", c.why, got, c.want)
		}
	}
}

// A zone that is closed while Redis is down refuses, wherever it stands; what a dry run of others would have done is told beside it.
func TestWouldDenyBesideAClosedZone(t *testing.T) {
	closed, tried := testCharge("closed", 1), testCharge("tried", 1)
	closed.OnStoreError, tried.OnStoreError, tried.DryRun = PolicyDeny, PolicyDeny, true
	for _, charges := range [][]Charge{placed(closed, tried), placed(tried, closed)} {
		l, _ := newTestLimiter(&scriptedStore{err: errDown}, 2)
		d := l.Decide(context.Background(), slices.Clone(charges))
		want := `unavailable closed unavailable "tried" of [tried], near [], closed [tried]`
		if got := fmt.Sprintf("%s %s %s", d.Reason, d.Zone, d.marks(charges)); got != want {
			t.Errorf("%s first\n  got  %s\n  want %s", charges[0].Zone, got, want)
		}
	}
}
