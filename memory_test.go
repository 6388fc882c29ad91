package ratelimit

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const million = 1_000_000

// testID is the identity of a client with a number.
func testID(n uint64) (id ID) {
	binary.BigEndian.PutUint64(id[8:], n)
	return id
}

// penalties are the default numbers of a penalty in a group.
func penalties(group string) *penaltyRules {
	p := rules()
	p.group = group
	return p
}

// rare is one token in 1 000 000 seconds, a millionth of it each second.
func rare(t rapid.TB) Limit { return limit(t, "1/1000000s", 1) }

const elevenDays = 1_000_000 * time.Second

// zone is the charge of one token for client 1 in a zone.
func zone(name string, l Limit) Charge {
	return Charge{Zone: name, ID: testID(1), Limit: l, Cost: Token}
}

func (c Charge) costing(tokens int64) Charge      { c.Cost = tokens * Token; return c }
func (c Charge) by(client uint64) Charge          { c.ID = testID(client); return c }
func (c Charge) striking(group string) Charge     { c.Penalty = penalties(group); return c }
func (c Charge) under(l Limit) Charge             { c.Limit = l; return c }
func (c Charge) together(more ...Charge) []Charge { return append([]Charge{c}, more...) }

// answer asks a store and puts what it says into few words.
func answer(m *memoryStore, at time.Duration, maxKeys int, charges ...Charge) string {
	out := takeNow(m, us(at), charges, maxKeys)
	d := out.decision(charges, SourceMemory)
	text := fmt.Sprintf("%s, wait %v", d.Reason, d.RetryAfter)
	if d.Allowed {
		text = fmt.Sprintf("allowed, %d left", d.Remaining)
	}
	if d.Strikes > 0 {
		text += fmt.Sprintf(", strike %d", d.Strikes)
	}
	return text
}

// step is one request on a timeline, and why it is answered like that.
type step struct {
	at      time.Duration
	charges []Charge
	want    string
	why     string
}

// runTimeline sends the requests of a timeline to a store of its own.
func runTimeline(t *testing.T, steps []step) {
	t.Helper()
	m := newMemoryStore()
	for i, s := range steps {
		if got := answer(m, s.at, million, s.charges...); got != s.want {
			t.Fatalf("step %d at %v: %s; want %s: %s", i, s.at, got, s.want, s.why)
		}
	}
}

func TestMemoryBurstAndRefill(t *testing.T) {
	api := zone("api", limit(t, "1/s", 3))
	one, two, three := api.together(), api.costing(2).together(), api.costing(3).together()
	runTimeline(t, []step{
		{0, one, "allowed, 2 left", "a new client has the whole burst"},
		{0, two, "allowed, 0 left", "a search costs two"},
		{0, one, "limited, wait 1s", "nothing is left"},
		{0, two, "limited, wait 2s", "each waits for its own cost"},
		{999_999 * time.Microsecond, one, "limited, wait 1µs", "a microsecond too early"},
		{time.Second, one, "allowed, 0 left", "the refusals cost nothing"},
		{2500 * time.Millisecond, one, "allowed, 0 left", "half a token is kept"},
		{2500 * time.Millisecond, one, "limited, wait 500ms", "and counted"},
		{time.Minute, three, "allowed, 0 left", "full again, and not more than that"},
		{time.Minute, one, "limited, wait 1s", ""},
		{time.Minute, api.by(2).together(), "allowed, 2 left", "another client has another bucket"},
		{time.Minute, zone("web", api.Limit).together(), "allowed, 2 left", "another zone has another bucket"},
	})
}

func TestMemoryChangeOfLimit(t *testing.T) {
	before := zone("api", limit(t, "1/s", 10))
	drain := before.costing(10).together()
	faster, slower := before.under(limit(t, "5/s", 10)), before.under(limit(t, "1/m", 10))
	larger, smaller := before.under(limit(t, "1/s", 100)), before.under(limit(t, "1/s", 4))
	both := before.under(limit(t, "50/s", 1000))

	for name, steps := range map[string][]step{
		"faster": {
			{0, drain, "allowed, 0 left", ""},
			{2 * time.Second, faster.costing(3).together(), "limited, wait 200ms", "two seconds at the old rate gave two tokens, and the third comes at the new"},
			{2200 * time.Millisecond, faster.costing(3).together(), "allowed, 0 left", "as told"},
			{3200 * time.Millisecond, faster.together(), "allowed, 4 left", "the new rate since"},
		},
		"slower": {
			{0, drain, "allowed, 0 left", ""},
			{3 * time.Second, slower.together(), "allowed, 2 left", "three seconds at the old rate stay"},
			{33 * time.Second, slower.together(), "allowed, 1 left", "half a token in half a minute"},
		},
		"larger": {
			{0, before.together(), "allowed, 9 left", ""},
			{0, larger.costing(10).together(), "limited, wait 1s", "room for more gives nothing"},
			{30 * time.Second, larger.together(), "allowed, 38 left", "what the old burst could not hold flows in"},
			{time.Hour, larger.together(), "allowed, 99 left", ""},
		},
		"larger, and full under the old burst in between": {
			{0, drain, "allowed, 0 left", ""},
			{time.Second, larger.costing(50).together(), "limited, wait 49s", "asked under the new burst, it is remembered until full under that"},
			{11 * time.Second, larger.costing(50).together(), "limited, wait 39s", "and not a full bucket as soon as it is full under the old"},
		},
		"larger, after it was full": {
			{0, drain, "allowed, 0 left", ""},
			{10 * time.Second, larger.together(), "allowed, 99 left", "a full bucket is forgotten, a forgotten one is full under any limit"},
		},
		"smaller": {
			{0, before.together(), "allowed, 9 left", ""},
			{0, smaller.together(), "allowed, 3 left", "what does not fit is gone"},
			{0, before.together(), "allowed, 2 left", "going back does not return it"},
		},
		"smaller, with less left than fits": {
			{0, before.costing(8).together(), "allowed, 2 left", ""},
			{0, smaller.together(), "allowed, 1 left", "what fits stays"},
		},
		"small and large in turn": {
			{0, larger.costing(100).together(), "allowed, 0 left", ""},
			{time.Second, smaller.together(), "allowed, 0 left", ""},
			{6 * time.Second, larger.costing(6).together(), "limited, wait 1s", "full under the small burst is not full under the large one"},
		},
		"a large burst at a slow rate": {
			{0, before.under(limit(t, "1000000/s", 1e9)).costing(1e9).together(), "allowed, 0 left", ""},
			{0, before.under(limit(t, "1/s", 1)).together(), "limited, wait 1s", "a billion tokens at one a day would be full after the end of numbers"},
			{0, before.under(limit(t, "1/d", 1)).together(), "limited, wait 24h0m0s", ""},
			{time.Second, before.under(limit(t, "1000000/s", 1e9)).together(), "limited, wait 1µs", "and not before it began"},
		},
		"both": {
			{0, drain, "allowed, 0 left", ""},
			{0, both.together(), "limited, wait 20ms", "a drained client of a raised limit refills faster, it is not refilled"},
			{time.Second, both.together(), "allowed, 49 left", ""},
		},
	} {
		t.Run(name, func(t *testing.T) { runTimeline(t, steps) })
	}
}

func TestMemoryAllOrNothing(t *testing.T) {
	coarse, fine := zone("coarse", limit(t, "1/s", 10)), zone("fine", limit(t, "1/m", 2)).by(7)
	both := coarse.together(fine)
	runTimeline(t, []step{
		{0, both, "allowed, 1 left", "the tighter zone is shown"},
		{0, both, "allowed, 0 left", ""},
		{0, both, "limited, wait 1m0s", "the fine zone refuses"},
		{0, both, "limited, wait 1m0s", "again"},
		{0, coarse.together(), "allowed, 7 left", "and the coarse one was debited twice, not four times"},
		{0, coarse.costing(7).together(), "allowed, 0 left", ""},
		{time.Minute - time.Second, coarse.costing(10).together(), "allowed, 0 left", ""},
		{time.Minute, both, "allowed, 0 left", "one token each"},
		{time.Minute, both, "limited, wait 1m0s", "both refuse: the longer wait counts"},
		{2 * time.Minute, both, "allowed, 0 left", "no refusal took anything from the fine zone"},
	})
}

// R6: 2, 4, 8, 16, 32, 60, 60 … minutes; what a blocked client sends changes nothing.
func TestMemoryPenaltyTimeline(t *testing.T) {
	m := newMemoryStore()
	login := zone("login", rare(t)).striking("default")
	at, strike := time.Duration(0), 0
	expect := func(want, why string) {
		t.Helper()
		if got := answer(m, at, million, login); got != want {
			t.Fatalf("at %v: %s; want %s: %s", at, got, want, why)
		}
	}
	block := func(length time.Duration) {
		t.Helper()
		strike++
		start := at
		expect(fmt.Sprintf("blocked, wait %v, strike %d", length, strike), "the refusal that starts a block answers as it")
		for i := range time.Duration(1000) {
			at = start + (i * length / 1000).Truncate(time.Microsecond)
			expect(fmt.Sprintf("blocked, wait %v", start+length-at), "a blocked request adds no strike and does not move the end")
		}
		at = start + length
	}

	expect("allowed, 0 left", "one in eleven days")
	for strike = 1; strike <= 3; strike++ {
		at += time.Second
		expect(fmt.Sprintf("limited, wait %v, strike %d", elevenDays-at, strike), "forgiven")
	}
	strike = 3
	at += time.Second
	for _, minutes := range []time.Duration{2, 4, 8, 16, 32, 60, 60, 60} {
		block(minutes * time.Minute)
	}
	at += time.Hour - time.Microsecond
	block(time.Hour) // the window after a block is not over yet
	at += time.Hour + time.Microsecond
	expect(fmt.Sprintf("limited, wait %v, strike 1", elevenDays-at), "the window is over: strikes are forgotten")
}

// A bucket that takes long to refill does not keep strikes alive; nor does a client that behaves.
func TestMemoryStrikesAreForgotten(t *testing.T) {
	slow := zone("export", limit(t, "1/h", 100)).striking("default")
	one, half, all := slow.together(), slow.costing(50).together(), slow.costing(100).together()
	runTimeline(t, []step{
		{0, half, "allowed, 50 left", ""},
		{0, all, "limited, wait 50h0m0s, strike 1", ""},
		{90 * time.Second, all, "limited, wait 49h58m30s, strike 2", ""},
		{180 * time.Second, all, "limited, wait 49h57m0s, strike 3", ""},
		{18 * time.Minute, one, "allowed, 49 left", "three are forgiven"},
		{36 * time.Minute, one, "allowed, 48 left", ""},
		{54 * time.Minute, one, "allowed, 47 left", ""},
		{63 * time.Minute, all, "limited, wait 51h57m0s, strike 1", "an hour after the last strike, whatever was allowed since"},
	})
	runTimeline(t, []step{
		{0, half, "allowed, 50 left", ""},
		{0, all, "limited, wait 50h0m0s, strike 1", ""},
		{90 * time.Second, all, "limited, wait 49h58m30s, strike 2", ""},
		{180 * time.Second, all, "limited, wait 49h57m0s, strike 3", ""},
		{63*time.Minute - time.Microsecond, all, "blocked, wait 2m0s, strike 4", "a microsecond before that"},
	})
}

func TestMemorySharedStrikes(t *testing.T) {
	l := rare(t)
	api, web := zone("api", l).striking("default"), zone("web", l).striking("default")
	other := zone("other", l).striking("more")
	runTimeline(t, []step{
		{0, api.together(web, other), "allowed, 0 left", ""},
		{0, api.together(web), "limited, wait 277h46m40s, strike 1", "two zones, one group: one strike a request"},
		{0, api.together(), "limited, wait 277h46m40s, strike 2", "the group counts over zones"},
		{0, web.together(), "limited, wait 277h46m40s, strike 3", ""},
		{0, other.together(), "limited, wait 277h46m40s, strike 1", "another group counts for itself"},
		{0, web.by(2).together(), "allowed, 0 left", "another client is another record"},
		{0, web.together(), "blocked, wait 2m0s, strike 4", ""},
		{0, api.together(), "blocked, wait 2m0s", "blocked in the whole group"},
		{0, zone("open", l).striking("default").together(), "blocked, wait 2m0s", "also in a zone that was never asked"},
		{0, other.together(), "limited, wait 277h46m40s, strike 2", "but not in another group"},
		{0, zone("free", l).together(), "allowed, 0 left", "nor where no penalty holds"},
	})
}

// Longer windows and shorter ones act at once on strikes that are stored.
func TestMemoryChangeOfPenalty(t *testing.T) {
	before := zone("login", rare(t)).striking("default")
	longer, shorter := before.striking("default"), before.striking("default")
	longer.Penalty.window, shorter.Penalty.window = us(10*time.Hour), us(time.Minute)
	runTimeline(t, []step{
		{0, before.together(), "allowed, 0 left", ""},
		{0, before.together(), "limited, wait 277h46m40s, strike 1", ""},
		{30 * time.Minute, longer.together(), "limited, wait 277h16m40s, strike 2", ""},
		{10 * time.Hour, longer.together(), "limited, wait 267h46m40s, strike 3", "older than the old window"},
		{10*time.Hour + time.Minute, shorter.together(), "limited, wait 267h45m40s, strike 1", "older than the new window"},
	})
}

func TestMemoryClockGoesBack(t *testing.T) {
	api := zone("api", limit(t, "1/s", 3)).striking("default")
	all, one := api.costing(3).together(), api.together()
	runTimeline(t, []step{
		{time.Hour, all, "allowed, 0 left", ""},
		{time.Hour, one, "limited, wait 1s, strike 1", ""},
		{time.Minute, one, "limited, wait 1s, strike 2", "an hour back: the bucket counts from now on"},
		{time.Minute + time.Second, one, "allowed, 0 left", "and refills"},
		{time.Minute + time.Second, one, "limited, wait 1s, strike 3", ""},
		{time.Minute + time.Second, one, "blocked, wait 2m0s, strike 4", ""},
		{0, one, "blocked, wait 3m1s", "the end of a block stays where it was"},
		{3*time.Minute + time.Second, one, "allowed, 2 left", "and it ends"},
	})
}

// Lifting a block is no moment at which time goes back for those who were overtaken.
func TestMemoryUnblockKeepsTheTime(t *testing.T) {
	m := newMemoryStore()
	api := zone("api", limit(t, "1/s", 10)).striking("default")
	expect := func(at time.Duration, c Charge, want, why string) {
		t.Helper()
		if got := answer(m, at, million, c); got != want {
			t.Fatalf("at %v: %s; want %s: %s", at, got, want, why)
		}
	}
	expect(time.Hour, api.costing(10), "allowed, 0 left", "")
	expect(time.Hour+5*time.Second, api, "allowed, 4 left", "")
	m.unblock(us(time.Hour), api.ID, api.Penalty)
	expect(time.Hour+time.Second, api, "allowed, 3 left", "overtaken")
	expect(time.Hour+5*time.Second, api, "allowed, 2 left", "no time counts twice")
}

func TestMemoryGiveBack(t *testing.T) {
	m := newMemoryStore()
	api, web := zone("api", limit(t, "1/s", 10)), zone("web", limit(t, "1/m", 5)).by(2)
	expect := func(at time.Duration, c Charge, want, why string) {
		t.Helper()
		if got := answer(m, at, million, c); got != want {
			t.Fatalf("at %v: %s; want %s: %s", at, got, want, why)
		}
	}
	expect(0, api.costing(4), "allowed, 6 left", "")
	expect(0, web.costing(5), "allowed, 0 left", "")
	m.giveBack(0, api.costing(4).together(web.costing(2)))
	expect(0, web, "allowed, 1 left", "two came back")
	expect(0, api, "allowed, 9 left", "as if nothing had happened")
	m.giveBack(0, api.costing(5).together())
	expect(0, api, "allowed, 9 left", "never above the burst")
	m.giveBack(us(time.Second), api.by(3).together())
	expect(time.Second, api.by(3), "allowed, 9 left", "a bucket that is not there is full")

	expect(time.Minute, api.costing(10), "allowed, 0 left", "")
	m.giveBack(us(time.Minute), api.under(limit(t, "1/s", 4)).costing(9).together())
	expect(time.Minute, api, "allowed, 3 left", "never above the burst of today")
	dry := api.costing(3)
	dry.DryRun = true
	m.giveBack(us(time.Minute), dry.together())
	expect(time.Minute, api.costing(4), "limited, wait 1s", "a dry run may not have paid")
}

// Exactly the burst is admitted, by however many at once; all or nothing, in whatever order the zones stand.
func TestMemoryIsExactUnderConcurrency(t *testing.T) {
	m := newMemoryStore()
	never := Limit{Num: 1, Den: 1<<32 - 1, Burst: 100 * Token}
	scarce, plenty := zone("scarce", never), zone("plenty", never).by(2)
	plenty.Limit.Burst = 1000 * Token
	orders := [][]Charge{scarce.together(plenty), plenty.together(scarce)}
	var admitted atomic.Int64
	var all sync.WaitGroup
	for g := range 64 {
		all.Go(func() {
			for range 50 {
				if takeNow(m, int64(g), orders[g%2], million).verdict == verdictAllowed {
					admitted.Add(1)
				}
			}
		})
	}
	all.Wait()
	if admitted.Load() != 100 {
		t.Errorf("admitted %d, want 100", admitted.Load())
	}
	if left := takeNow(m, 64, plenty.costing(1000).together(), million).tokens[0]; left != 900*Token {
		t.Errorf("%d millionths left in the other zone, want 900 tokens: a refusal debited", left)
	}
}

// The bound holds at every moment, for requests that come at the same time and make room at the same time.
func TestMemoryBoundUnderConcurrency(t *testing.T) {
	for _, maxKeys := range []int{1, 2, 10, 100} {
		m := newMemoryStore()
		l := rare(t)
		var all sync.WaitGroup
		for g := range uint64(64) {
			all.Go(func() {
				for i := range uint64(50) {
					client := g*1000 + i
					charges := zone("a", l).by(client).striking("p").together(zone("b", l).by(client + 500))
					takeNow(m, 1, charges, maxKeys)
					takeNow(m, 1, charges, maxKeys)
					if buckets, records := m.len(); buckets+records > maxKeys || records > maxKeys/2 {
						t.Errorf("%d buckets and %d records of %d", buckets, records, maxKeys)
					}
				}
			})
		}
		all.Wait()
		stored(t, m, maxKeys)
	}
}

// stored returns how many entries there are, after checking that the counters agree with what is there, and
// both with the bound.
func stored(t rapid.TB, m *memoryStore, maxKeys int) int {
	t.Helper()
	inTables, inRecords := 0, 0
	for i := range m.shards {
		inTables += sound(t, &m.shards[i].buckets)
		inRecords += sound(t, &m.shards[i].records)
	}
	buckets, records := m.len()
	if buckets != inTables || records != inRecords {
		t.Fatalf("%d buckets and %d records counted, %d and %d there", buckets, records, inTables, inRecords)
	}
	if buckets+records > maxKeys || records > maxKeys/2 {
		t.Fatalf("%d buckets and %d records are more than %d", buckets, records, maxKeys)
	}
	return buckets + records
}

// sound checks that a table is in order, and returns how many values it holds.
func sound[V any](t rapid.TB, table *table[V]) int {
	t.Helper()
	if int(table.order.len) != len(table.index) {
		t.Fatalf("%d keys in order of %d", table.order.len, len(table.index))
	}
	for p := range table.order.len {
		d := *table.order.at(p)
		if s := table.slots.at(d.slot); s.pos != p || table.find(s.key) != d.slot {
			t.Fatalf("position %d: slot %d believes to be at %d and is found as %d", p, d.slot, s.pos, table.find(s.key))
		}
		if p > 0 && table.order.at((p-1)/4).gone > d.gone {
			t.Fatalf("position %d is before its parent", p)
		}
	}
	return len(table.index)
}

// However many ask at once for the number of a new name, they get the same one, and each name another.
func TestMemoryNames(t *testing.T) {
	var names nameTable
	var seen sync.Map
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for i := range 200 {
				name := fmt.Sprint(i)
				if number, loaded := seen.LoadOrStore(name, names.number(name)); loaded && number != names.number(name) {
					t.Errorf("%s is %d and %d", name, number, names.number(name))
				}
			}
		})
	}
	all.Wait()
	numbers := map[any]bool{}
	seen.Range(func(_, number any) bool { numbers[number] = true; return true })
	if len(numbers) != 200 {
		t.Errorf("%d numbers for 200 names", len(numbers))
	}
}

// takeNow takes with room of its own.
func takeNow(m *memoryStore, now int64, charges []Charge, maxKeys int) outcome {
	return m.take(now, charges, make([]int64, len(charges)), maxKeys)
}
