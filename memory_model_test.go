package ratelimit

import (
	"fmt"
	"math/big"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// model is the memory store in as few words as possible: maps, no bound, no shards, and everything whose time
// is over forgotten at once. It decides by take, like the store.
type model struct {
	buckets map[modelKey]modelBucket
	records map[modelKey]modelRecord
}

type modelKey struct {
	id   ID
	name string
}

type modelBucket struct {
	Bucket
	largest int64 // burst under which it was asked since it was full
}

type modelRecord struct {
	strikeRecord
	forgotten int64
}

func newModel() *model {
	return &model{buckets: map[modelKey]modelBucket{}, records: map[modelKey]modelRecord{}}
}

// full counts in numbers of any size.
func (b modelBucket) full(now int64) bool {
	have := new(big.Int).Mul(big.NewInt(now-b.At), big.NewInt(b.Num))
	have.Div(have, big.NewInt(b.Den))
	return have.Cmp(big.NewInt(b.largest-b.Tokens)) >= 0
}

func (m *model) forget(now int64) {
	for k, b := range m.buckets {
		if b.full(now) {
			delete(m.buckets, k)
		}
	}
	for k, r := range m.records {
		if now >= r.forgotten {
			delete(m.records, k)
		}
	}
}

func (m *model) take(now int64, charges []Charge) outcome {
	m.forget(now)
	states := make([]state, len(charges))
	for i, c := range charges {
		states[i].bucket = m.buckets[modelKey{c.ID, c.Zone}].Bucket
		if c.Penalty != nil {
			states[i].record = m.records[modelKey{c.ID, c.Penalty.group}].strikeRecord
		}
	}
	out := take(now, charges, states, make([]int64, len(charges)))
	for i, c := range charges {
		k := modelKey{c.ID, c.Zone}
		if b, ok := m.buckets[k]; ok || states[i].wroteBucket {
			if states[i].wroteBucket {
				b.Bucket = states[i].bucket
			}
			b.largest = max(b.largest, c.Limit.Burst)
			m.buckets[k] = b
		}
		if r := states[i].record; c.Penalty != nil && recordOf(charges, i) == i && r.strikes > 0 {
			m.records[modelKey{c.ID, c.Penalty.group}] = modelRecord{r, r.forgotten(c.Penalty)}
		}
	}
	return out
}

func (m *model) giveBack(now int64, charges []Charge) {
	m.forget(now)
	for _, c := range charges {
		k := modelKey{c.ID, c.Zone}
		b, ok := m.buckets[k]
		if !ok || c.DryRun {
			continue
		}
		b.Bucket, _ = b.settled(c.Limit, now)
		b.Tokens = min(b.Tokens+c.Cost, c.Limit.Burst)
		b.largest = max(b.largest, c.Limit.Burst)
		m.buckets[k] = b
	}
}

var idle = rapid.Custom(func(t *rapid.T) int64 {
	scale := rapid.SampledFrom([]time.Duration{0, time.Microsecond, time.Millisecond, time.Second, time.Minute, time.Hour, 100 * time.Hour}).Draw(t, "scale")
	return us(scale) * rapid.Int64Range(0, 3).Draw(t, "times")
})

// usualLimit is one that zones have, small enough that tests run into it.
var usualLimit = rapid.Custom(func(t *rapid.T) Limit {
	rate := rapid.SampledFrom([]string{"1/s", "7/m", "3/h", "1/d", "100/s", "30000/s", "0.5/s"}).Draw(t, "rate")
	return limit(t, rate, rapid.SampledFrom([]int64{1, 2, 5, 10, 100}).Draw(t, "burst"))
})

// someCharges are those of a request: in some zones, for few clients, under limits that keep changing.
var someCharges = rapid.Custom(func(t *rapid.T) []Charge {
	zones := rapid.Permutation([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "zones")
	charges := make([]Charge, rapid.IntRange(0, len(zones)).Draw(t, "charges"))
	window := us(rapid.SampledFrom([]time.Duration{time.Minute, time.Hour}).Draw(t, "window"))
	for i := range charges {
		c := Charge{Zone: zones[i], ID: testID(rapid.Uint64Range(1, 3).Draw(t, "client")), Limit: usualLimit.Draw(t, "limit")}
		c.Cost = rapid.Int64Range(1, c.Limit.Burst/Token).Draw(t, "cost") * Token
		c.DryRun = rapid.IntRange(0, 9).Draw(t, "dry run") == 0
		c.NoStrike = rapid.IntRange(0, 9).Draw(t, "early data") == 0
		if group := rapid.SampledFrom([]string{"", "p", "q"}).Draw(t, "group"); group != "" {
			c.Penalty = &penaltyRules{group: group, after: int64(len(group)), base: us(time.Second), max: us(time.Minute), window: window}
			c.Penalty.every = us(rapid.SampledFrom([]time.Duration{0, time.Second}).Draw(t, "every"))
		}
		charges[i] = c
	}
	return charges
})

// Without a bound in the way, the store is the model, to the last millionth of a token.
func TestMemoryIsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, want := newMemoryStore(), newModel()
		now := rapid.Int64Range(0, testNow).Draw(t, "start")
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			now += idle.Draw(t, "idle")
			charges := someCharges.Draw(t, "charges")
			if rapid.IntRange(0, 5).Draw(t, "give back") == 0 {
				m.giveBack(now, charges)
				want.giveBack(now, charges)
				continue
			}
			got, want := takeNow(m, now, charges, million), want.take(now, charges)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("at %d: %+v, want %+v", now, got, want)
			}
		}
		if m.evicted() != 0 {
			t.Fatalf("%d evicted without a bound", m.evicted())
		}
	})
}

// Over any time a bucket gives at most the largest burst plus the fastest rate times that time, however its
// limits alternate, and however requests overtake each other between reading the clock and locking the store.
func TestMemoryCreatesNoTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limits := rapid.SliceOfN(usualLimit, 1, 3).Draw(t, "limits")
		largest := limits[0]
		for _, l := range limits {
			largest.Burst = max(largest.Burst, l.Burst)
			if l.Num*largest.Den > largest.Num*l.Den {
				largest.Num, largest.Den = l.Num, l.Den
			}
		}
		m, now := newMemoryStore(), testNow
		latest := int64(0)        // of the times that requests read
		owed, at := 0.0, int64(0) // what a bucket of the largest limit lacks, and since when
		for range rapid.IntRange(1, 200).Draw(t, "requests") {
			now += rapid.SampledFrom([]int64{0, 0, 1, 1000, us(time.Second), us(10 * time.Second), us(time.Minute), us(time.Hour)}).Draw(t, "idle")
			late := rapid.SampledFrom([]int64{0, 0, 0, 1, 1000, us(time.Second)}).Draw(t, "late")
			l := rapid.SampledFrom(limits).Draw(t, "limit")
			cost := rapid.Int64Range(1, l.Burst/Token).Draw(t, "cost")
			latest = max(latest, now-late)
			if takeNow(m, now-late, zone("api", l).costing(cost).together(), million).verdict != verdictAllowed {
				continue
			}
			owed = max(0, owed-float64(latest-at)*float64(largest.Num)/float64(largest.Den)) + float64(cost*Token)
			at = latest
			if owed > float64(largest.Burst)+1 {
				t.Fatalf("%.6f tokens more than there can be", (owed-float64(largest.Burst))/Token)
			}
		}
	})
}

// With a bound in the way: it always holds, an answer differs only where something was evicted and counted, that
// happens only where not everything fits, and a blocked client stays blocked while no more than half of the
// keys are blocks.
func TestMemoryBoundModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m, unbounded := newMemoryStore(), newModel()
		maxKeys := rapid.SampledFrom([]int{1, 2, 3, 5, 10, 40}).Draw(t, "max keys")
		now, crowded, overflow, blocks := testNow, false, false, map[ID]int64{}
		for range rapid.IntRange(1, 100).Draw(t, "requests") {
			now += idle.Draw(t, "idle") / 10
			c := zone(fmt.Sprint(rapid.IntRange(0, 1).Draw(t, "zone")), usualLimit.Draw(t, "limit"))
			c = c.by(rapid.Uint64Range(0, 30).Draw(t, "client"))
			if rapid.Bool().Draw(t, "penalty") {
				c.Penalty = &penaltyRules{group: "p", after: 1, base: us(time.Minute), max: us(time.Hour), window: us(time.Hour)}
			}
			got, want := takeNow(m, now, c.together(), maxKeys), unbounded.take(now, c.together())
			stored(t, m, maxKeys)

			for id, until := range blocks {
				if until <= now {
					delete(blocks, id)
				}
			}
			if len(blocks) > maxKeys/2 {
				crowded = true
			}
			if until, ok := blocks[c.ID]; ok && c.Penalty != nil && !crowded && (got.verdict != verdictBlocked || got.until != until) {
				t.Fatalf("client %x is not blocked any more", c.ID)
			}
			if got.verdict == verdictBlocked {
				blocks[c.ID] = got.until
			}
			unbounded.forget(now)
			records := len(unbounded.records)
			overflow = overflow || len(unbounded.buckets)+records > maxKeys || records > maxKeys/2
			if m.evicted() != 0 && !overflow {
				t.Fatalf("%d evicted, though everything fitted", m.evicted())
			}
			if !reflect.DeepEqual(got, want) && m.evicted() == 0 {
				t.Fatalf("%+v, want %+v, and nothing was evicted", got, want)
			}
		}
	})
}
