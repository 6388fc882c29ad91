package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// plain is the plainest store there is: maps and take. It forgets nothing, as a key in Redis does not while it lives.
type plain struct {
	buckets map[string]Bucket
	records map[string]strikeRecord
	leased  map[string]leaseSums
}

func newPlain() *plain {
	return &plain{buckets: map[string]Bucket{}, records: map[string]strikeRecord{}, leased: map[string]leaseSums{}}
}

func (m *plain) take(now int64, charges []Charge) outcome {
	states := make([]state, len(charges))
	for i := range charges {
		states[i].bucket = m.buckets[bucketName(&charges[i])]
		states[i].leased = m.leased[bucketName(&charges[i])]
		if charges[i].Penalty != nil {
			states[i].record = m.records[recordName(&charges[i])]
		}
	}
	out := take(now, charges, states, make([]int64, len(charges)))
	for i := range charges {
		if states[i].wroteBucket {
			m.buckets[bucketName(&charges[i])] = states[i].bucket
			m.leased[bucketName(&charges[i])] = states[i].leased
		}
		if states[i].wroteRecord {
			m.records[recordName(&charges[i])] = states[i].record
		}
	}
	return out
}

// equals compares all that says something: where a client is blocked, nobody looks at the tokens.
func (out *outcome) equals(other *outcome) bool {
	a, b := *out, *other
	if a.verdict == verdictBlocked {
		a.tokens, b.tokens = nil, nil
	}
	return reflect.DeepEqual(a, b)
}

func bucketName(c *Charge) string { return fmt.Sprintf("%x %s", c.ID, c.Zone) }

func recordName(c *Charge) string { return fmt.Sprintf("%x %s", c.ID, c.Penalty.group) }

// scripted runs the script in a real Redis at a test clock.
type scripted struct {
	client *redis.Client
	prefix string
}

func (s scripted) take(t rapid.TB, now int64, charges []Charge) outcome {
	return s.takeAll(t, now, [][]Charge{charges})[0]
}

// takeAll decides about requests in one call.
func (s scripted) takeAll(t rapid.TB, now int64, requests [][]Charge) []outcome {
	var b batch
	for _, charges := range requests {
		b.add(s.prefix, charges)
	}
	cmd := b.command("eval", bucketScript, strconv.FormatInt(now, 10))
	if err := s.client.Process(context.Background(), cmd); err != nil {
		t.Fatalf("script: %v", err)
	}
	replies, err := newReplyReader(cmd.Val())
	if err != nil {
		t.Fatalf("reply %v: %v", cmd.Val(), err)
	}
	outs := make([]outcome, len(requests))
	for i, charges := range requests {
		if outs[i], err = replies.outcome(charges); err != nil {
			t.Fatalf("reply %v: %v", cmd.Val(), err)
		}
	}
	if len(replies.rest) > 0 {
		t.Fatalf("reply %v: %d numbers too many", cmd.Val(), len(replies.rest))
	}
	return outs
}

// act does what an operator wants, as hand.lua does.
func (m *plain) act(now int64, id ID, p *penaltyRules, time int64) byHand {
	name := recordName(&Charge{ID: id, Penalty: p})
	r := m.records[name]
	done := byHand{now: now, had: r.strikes > 0 || r.hand > now}
	switch {
	case time > 0:
		r.hand = now + time
	case time < 0:
		r = strikeRecord{last: now, hand: time - now}
	default:
		r = strikeRecord{last: now}
	}
	m.records[name] = r
	if r.ends() > now {
		done.ends = r.ends()
	}
	return done
}

func (m *plain) garble(id ID, p *penaltyRules, r strikeRecord) {
	m.records[recordName(&Charge{ID: id, Penalty: p})] = r
}

// act runs hand.lua.
func (s scripted) act(t rapid.TB, now int64, id ID, p *penaltyRules, time int64) byHand {
	// The clock of the script is that of Redis: the test's stands in for it.
	script := strings.Replace(handScript, "redis.call('TIME')", fmt.Sprintf("{%d, %d}", now/1e6, now%1e6), 1)
	reply, err := s.client.Eval(context.Background(), script, []string{identityKey(s.prefix, id)}, "p"+p.group, time, handTTL, newHandTTL(time, p.max)).Int64Slice()
	if err != nil || len(reply) != 3 || reply[0] != now {
		t.Fatalf("reply %v: %v", reply, err)
	}
	return byHand{now: reply[0], had: reply[1] == 1, ends: reply[2]}
}

// garble stores a record as it is, whatever it says.
func (s scripted) garble(t rapid.TB, id ID, p *penaltyRules, r strikeRecord) {
	packed := appendInt7(appendInt7([]byte{1, byte(r.strikes >> 8), byte(r.strikes)}, r.until), r.last)
	if r.hand != 0 {
		packed = appendInt7(packed, r.hand)
		packed[0] = 2
	}
	if err := s.client.HSet(context.Background(), identityKey(s.prefix, id), "p"+p.group, packed).Err(); err != nil {
		t.Fatalf("storing garbage: %v", err)
	}
}

// drawLimit draws from rates of all sizes, odd ones included.
func drawLimit(t *rapid.T) Limit {
	text := rapid.SampledFrom([]string{"1/h", "1/day", "10/s", "7/s", "100/m", "30000/s", "10000000/day", "0.5/s", "1/10s", "13/17s", "123457/day", "1/1500ms"}).Draw(t, "rate")
	rate, err := ParseRate(text)
	if err != nil {
		t.Fatal(err)
	}
	burst := rapid.SampledFrom([]int64{1, 2, 3, 10, 100, 10_000_000}).Draw(t, "burst")
	limit := Limit{Num: rate.num, Den: rate.den, Burst: burst * Token}
	if limit.Burst/limit.Num > maxFill.Microseconds()/limit.Den {
		limit.Burst = Token // as slow a limit with such a burst is a load error
	}
	return limit
}

// drawKnownBlock draws a block that the caller knows of: the same for all charges with one record.
func drawKnownBlock(t *rapid.T, now int64, charges []Charge, c *Charge) {
	for _, other := range charges {
		if other.Penalty == c.Penalty && other.ID == c.ID {
			c.BlockedFor, c.BlockTold, c.BlockByHand = other.BlockedFor, other.BlockTold, other.BlockByHand
			return
		}
	}
	c.BlockedFor = rapid.SampledFrom([]int64{0, 0, 0, 0, 0, 1, 3e6, 1e11, 1e13}).Draw(t, "known block")
	c.BlockTold = max(now-rapid.SampledFrom([]int64{0, 1, 4e6, 2e9, 1e12, 3e12, -5e6, maxExact}).Draw(t, "told"), 0)
	c.BlockByHand = rapid.Bool().Draw(t, "known to be by hand")
}

// drawRecord draws what somebody may have stored.
func drawRecord(t *rapid.T, now int64) strikeRecord {
	when := rapid.SampledFrom([]int64{0, 1, now - 1e12, now - 2e6, now, now + 1, now + 5e6, now + 1e11, now + maxByHand + 2e9, maxExact - 1})
	r := strikeRecord{strikes: rapid.SampledFrom([]int64{0, 1, 3, 4, maxStrikes}).Draw(t, "strikes"), until: when.Draw(t, "until"), last: when.Draw(t, "last")}
	if r.hand = when.Draw(t, "hand"); rapid.Bool().Draw(t, "amnesty") {
		r.hand = -r.hand
	}
	return r
}

// drawAct draws what an operator does, in microseconds of a block, or below 0 of an amnesty.
func drawAct(t *rapid.T) int64 {
	return rapid.SampledFrom([]int64{0, 1, 5e6, 3600e6, 1e11, maxByHand, -1, -5e6, -3600e6}).Draw(t, "act")
}

func drawCharges(t *rapid.T, now int64, ids []ID, rules []*penaltyRules) []Charge {
	zones := rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"a", "b", "c", "d"}), 1, 4, rapid.ID[string]).Draw(t, "zones")
	charges := make([]Charge, 0, len(zones))
	for _, zone := range zones {
		limit := drawLimit(t)
		c := Charge{
			Zone: zone, ID: rapid.SampledFrom(ids).Draw(t, "id"), Limit: limit,
			Cost:     min(limit.Burst, Token*rapid.SampledFrom([]int64{1, 1, 1, 2, 7, 5_000_000}).Draw(t, "cost")),
			NoStrike: rapid.IntRange(0, 9).Draw(t, "no strike") == 0,
			DryRun:   rapid.IntRange(0, 9).Draw(t, "dry run") == 0,
		}
		if rapid.IntRange(0, 9).Draw(t, "give back") == 0 {
			c.Cost = -c.Cost
		}
		if rapid.IntRange(0, 3).Draw(t, "lease") == 0 {
			c.Ask = Token * rapid.SampledFrom([]int64{1, 2, 10, 1e6}).Draw(t, "ask")
		}
		if g := rapid.IntRange(0, len(rules)).Draw(t, "group"); g > 0 {
			c.Penalty = rules[g-1]
			drawKnownBlock(t, now, charges, &c)
		}
		charges = append(charges, c)
	}
	return charges
}

// The script and its specification in Go agree on every field of every decision: any charges, costs, changes of limit,
// idle times and blocks, also when the clock steps back.
func TestScriptIsTheModel(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	cases, steps, verdicts := 0, 0, map[verdict]int{}
	rapid.Check(t, func(t *rapid.T) {
		cases++
		script := scripted{client, fmt.Sprintf("case%d-%d", time.Now().UnixNano(), cases)}
		model := newPlain()
		rules := []*penaltyRules{
			{group: "", after: 3, base: 60e6, max: 3600e6, window: 3600e6},
			{group: "strict", after: 0, base: 1e6, max: 7e6, window: 30e6, every: rapid.SampledFrom([]int64{0, 10e6}).Draw(t, "every")},
		}
		ids := []ID{{1}, {2}, {3}}
		now := int64(1_764_550_000_123_456)
		for range rapid.IntRange(250, 400).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 1, 999, 1e3, 3e4, 1e5, 1e6, 3e6, 61e6, 3600e6, 7200e6, 1e11, -5e6}).Draw(t, "idle")
			if by := rapid.IntRange(0, 29).Draw(t, "by hand"); by < 2 {
				id, p := rapid.SampledFrom(ids).Draw(t, "whom"), rapid.SampledFrom(rules).Draw(t, "of which group")
				if by == 0 {
					garbage := drawRecord(t, now)
					script.garble(t, id, p, garbage)
					model.garble(id, p, garbage)
				}
				time := drawAct(t)
				if got, want := script.act(t, now, id, p, time), model.act(now, id, p, time); got != want {
					t.Fatalf("by hand for %d: script %+v, model %+v", time, got, want)
				}
			}
			if rapid.IntRange(0, 39).Draw(t, "garbage") == 0 {
				id, p, garbage := rapid.SampledFrom(ids).Draw(t, "whom"), rapid.SampledFrom(rules).Draw(t, "of which group"), drawRecord(t, now)
				script.garble(t, id, p, garbage)
				model.garble(id, p, garbage)
			}
			requests := make([][]Charge, rapid.SampledFrom([]int{1, 1, 1, 2, 5}).Draw(t, "requests in the batch"))
			for i := range requests {
				requests[i] = drawCharges(t, now, ids, rules)
			}
			for i, got := range script.takeAll(t, now, requests) {
				want := model.take(now, requests[i])
				if !got.equals(&want) {
					t.Fatalf("at %d request %d of %+v:\nscript %+v\nmodel  %+v", now, i, requests, got, want)
				}
				steps++
				verdicts[got.verdict]++
			}
		}
	})
	t.Logf("%d steps in %d cases: %d allowed, %d limited, %d blocked", steps, cases, verdicts[verdictAllowed], verdicts[verdictLimited], verdicts[verdictBlocked])
	if steps < 20_000 || verdicts[verdictLimited] < 500 || verdicts[verdictBlocked] < 500 {
		t.Error("too few steps of a kind for the test to mean anything")
	}
	for key, ttl := range server.TTLs() {
		if ttl <= 0 || ttl > maxFill+time.Hour {
			t.Errorf("key %q has a TTL of %s", key, ttl)
		}
	}
}

// The largest batch there can be fits into the numbers that the script is told.
func TestLargestBatch(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	requests := make([][]Charge, maxBatch)
	for i := range requests {
		rules := &penaltyRules{group: strings.Repeat("g", maxName-3) + fmt.Sprintf("%03d~dry_run", i), after: 3, base: 1e6, max: 1e6, window: 1e6}
		for zone := range maxZones {
			requests[i] = append(requests[i], Charge{
				Zone: strings.Repeat("z", maxName-3) + fmt.Sprintf("%03d", zone), ID: ID{byte(i), byte(zone)},
				Limit: Limit{Num: 1, Den: 1, Burst: int64(i+2) * Token}, Cost: Token, Penalty: rules,
			})
		}
	}
	for i, out := range (scripted{client, "p"}).takeAll(t, 1_764_550_000_000_000, requests) {
		for zone, left := range out.tokens {
			if out.verdict != verdictAllowed || left != int64(i+1)*Token {
				t.Fatalf("request %d, zone %d: %d, %d left", i, zone, out.verdict, left)
			}
		}
	}
}

// A reply that the script cannot have given is an error: neither a panic, nor numbers that a client could not make sense of.
func TestImpossibleReplies(t *testing.T) {
	open, strict := testCharge("a", 5), testCharge("a", 5)
	strict.Penalty = &penaltyRules{base: 1e6, max: 1e6, window: 1e6}
	for _, reply := range [][]int64{
		{}, {1}, {1, 0}, {1, 0, 3, 0}, {1, 0, 0}, {1, 0, 1, 0},
		{1, 0, 3, 0, 1}, {1, 0, 3, 0, -1}, {1, 0, 3, 0},
		{1, 0, 0, -1}, {1, 0, 0, 5*Token + 1}, {1, 0, 1, 0, -1}, {1, 0, 1, 0, 1 << 60},
		{1, 0, 2, 0, 2, 1, 1}, {1, 0, 2, 2, 2, 1, 1}, {1, 0, 2, 1, 1, 1, 1}, {1, 0, 2, 1, 1 << 60, 1, 1}, {-1 << 62, 0, 2, 1, 1 << 62, 1, 1},
	} {
		for _, c := range []Charge{open, strict} {
			replies, err := newReplyReader(reply)
			if err == nil {
				_, err = replies.outcome([]Charge{c})
			}
			if !errors.Is(err, errReply) {
				t.Errorf("%v: %v", reply, err)
			}
		}
	}
	replies, _ := newReplyReader([]int64{1, 0, 2, 1, 2, 1, 1})
	if _, err := replies.outcome([]Charge{open}); !errors.Is(err, errReply) {
		t.Errorf("a block of a client whom nothing blocks: %v", err)
	}
	dry := open
	dry.DryRun = true
	for left, possible := range map[int64]bool{^0: true, ^(Token - 1): true, ^Token: false, -1 << 63: false} {
		replies, _ := newReplyReader([]int64{1, 0, 0, left})
		if _, err := replies.outcome([]Charge{dry}); (err == nil) != possible {
			t.Errorf("%d left in a dry run: %v", left, err)
		}
	}
}

// While a change of a penalty spreads, a batch holds the old numbers and the new ones: the strikes are kept for whoever wants to
// remember them longer, as if each had come alone.
func TestPenaltyChangesWithinABatch(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	short := testCharge("a", 1)
	short.Limit, short.Penalty = Limit{Num: 1, Den: 1, Burst: Token}, &penaltyRules{after: 3, base: 1e6, max: 1e6, window: 1e6}
	long := short
	long.Penalty = &penaltyRules{after: 3, base: 1e6, max: 1e6, window: 3600e6}
	var requests [][]Charge
	for _, c := range []Charge{short, short, long} { // the second is struck
		requests = append(requests, []Charge{c})
	}
	outs := (scripted{client, "p"}).takeAll(t, 1_764_550_000_000_000, requests)
	if outs[2].strikes != 2 {
		t.Fatalf("got %+v, want a second strike", outs)
	}
	if ttl := server.TTLs()[identityKey("p", short.ID)]; ttl < time.Hour {
		t.Errorf("the strikes are kept for %s, and count for an hour", ttl)
	}
}
