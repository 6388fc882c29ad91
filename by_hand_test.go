package ratelimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds what blocks by hand and amnesties promise, whatever requests do meanwhile, on memory and on Redis alike.

// handStore is a store at a test clock, with what an operator does to it: a block for so many microseconds, 0 to lift it, below
// 0 an amnesty.
type handStore interface {
	take(now int64, charges []Charge) outcome
	act(now int64, id ID, p *penaltyRules, time int64)
}

type handMemory struct{ *memoryStore }

func (m handMemory) take(now int64, charges []Charge) outcome {
	return takeNow(m.memoryStore, now, charges, 1000)
}

func (m handMemory) act(now int64, id ID, p *penaltyRules, time int64) {
	switch {
	case time > 0:
		m.block(now, id, p, time, 1000)
	case time < 0:
		m.pardon(now, id, p, -time, 1000)
	default:
		m.unblock(now, id, p)
	}
}

type handRedis struct {
	t rapid.TB
	scripted
}

func (r handRedis) take(now int64, charges []Charge) outcome {
	return r.scripted.take(r.t, now, charges)
}

func (r handRedis) act(now int64, id ID, p *penaltyRules, time int64) {
	r.scripted.act(r.t, now, id, p, time)
}

// promise is what an operator was promised last about an identity.
type promise struct{ blocked, amnesty int64 }

// checkPromise holds one request against what was promised: nobody is free before the end that an operator gave, nobody is
// blocked after it but by strikes that he made since, and no amnesty ends early.
func checkPromise(t *rapid.T, now int64, p promise, c *Charge, out *outcome, penalized int64) {
	switch {
	case now < p.blocked && (out.verdict != verdictBlocked || out.until < p.blocked):
		t.Fatalf("at %d: %+v, blocked by hand until %d", now, *out, p.blocked)
	case now < p.blocked && penalized <= p.blocked && (out.until != p.blocked || !out.byHand):
		t.Fatalf("at %d: until %d by hand %v, but by hand it is until %d", now, out.until, out.byHand, p.blocked)
	case now >= p.blocked && out.verdict == verdictBlocked && out.byHand:
		t.Fatalf("at %d: blocked by hand until %d, which nobody wants", now, out.until)
	case now < p.amnesty && (out.verdict == verdictBlocked || out.strikes > 0 || out.blockStarted):
		t.Fatalf("at %d: %+v in an amnesty until %d", now, *out, p.amnesty)
	case out.blockStarted && out.until > now+c.Penalty.max:
		t.Fatalf("at %d: a block until %d, longer than any for strikes", now, out.until)
	}
}

// No sequence of blocks, liftings, amnesties and requests makes a block by hand longer than it was asked for, or shorter.
func TestByHandHoldsToItsEnd(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	cases, blocked, spared := 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		cases++
		stores := []handStore{handMemory{newMemoryStore()}, handRedis{t, scripted{client, fmt.Sprintf("hand%d-%d", time.Now().UnixNano(), cases)}}}
		p := &penaltyRules{after: rapid.Int64Range(0, 2).Draw(t, "after"), base: 1e6, max: 60e6, window: rapid.SampledFrom([]int64{0, 1e6, 3600e6}).Draw(t, "window")}
		c := limited("api", 1, rapid.SampledFrom([]string{"1/s", "1/h", "100/s"}).Draw(t, "rate"), rapid.SampledFrom([]int64{1, 3}).Draw(t, "burst"))
		c.Penalty = p
		promises, penalized := map[ID]promise{}, map[ID]int64{}
		now := int64(1_764_550_000_123_456)
		for range rapid.IntRange(30, 80).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 1, 1e3, 1e6, 3e6, 30e6, 3600e6, 86400e6}).Draw(t, "idle")
			id := rapid.SampledFrom([]ID{{1}, {2}}).Draw(t, "who")
			if rapid.IntRange(0, 4).Draw(t, "by hand") == 0 {
				act := drawAct(t)
				for _, s := range stores {
					s.act(now, id, p, act)
				}
				promises[id] = promise{max(now+act, now), max(now-act, now)}
				if act <= 0 {
					penalized[id] = 0
				}
			}
			c.ID = id
			var outs []outcome
			for _, s := range stores {
				out := s.take(now, []Charge{c})
				checkPromise(t, now, promises[id], &c, &out, penalized[id])
				outs = append(outs, out)
			}
			if !outs[0].equals(&outs[1]) {
				t.Fatalf("at %d: memory %+v, Redis %+v", now, outs[0], outs[1])
			}
			if out := &outs[0]; out.blockStarted {
				penalized[id] = out.until
			}
			if now < promises[id].blocked {
				blocked++
			}
			if now < promises[id].amnesty && outs[0].verdict == verdictLimited {
				spared++
			}
		}
	})
	t.Logf("%d cases: %d requests in a block by hand, %d refusals in an amnesty", cases, blocked, spared)
	if blocked < 200 || spared < 50 {
		t.Error("too few for the test to mean anything")
	}
	for key, ttl := range server.TTLs() {
		if ttl <= 0 {
			t.Errorf("%s has no TTL", key)
		}
	}
}

// What traffic writes beside a block by hand leaves its record and its TTL as they are, and every key outlives the block.
func TestByHandSurvivesTraffic(t *testing.T) {
	s := alone(t, longBudgets)
	s.awaitRedis()
	c := testCharge("api", 1)
	c.Penalty, c.ID = defaultRules(), ID{7}
	other := testCharge("other", 5) // no penalty: it writes its bucket while the client is blocked
	other.ID = c.ID
	done, err := s.store.block(t.Context(), knownBlock{id: c.ID, group: c.Penalty.group}, us(48*time.Hour), 0)
	if err != nil {
		t.Fatal(err)
	}
	key := s.store.key(c.ID)
	record := s.server.Do("hget", key, "p")
	for range 100 {
		if _, err := s.store.Take(t.Context(), []Charge{other}); err != nil {
			t.Fatal(err)
		}
		d, err := s.store.Take(t.Context(), []Charge{c})
		if err != nil || d.Reason != ReasonBlocked || !d.ByHand || d.Now+d.RetryAfter.Microseconds() != done.ends {
			t.Fatalf("got %+v, %v, want a block by hand until %d", d, err, done.ends)
		}
	}
	if now := s.server.Do("hget", key, "p"); now != record {
		t.Errorf("the record was %q and is %q", record, now)
	}
	if ttl := s.server.TTLs()[key]; ttl < 48*time.Hour {
		t.Errorf("the key has a TTL of %s, the block lasts 48 h", ttl)
	}
	s.server.Do("persist", key)
	if _, err := s.store.Take(t.Context(), []Charge{c}); err != nil {
		t.Fatal(err)
	}
	if ttl := s.server.TTLs()[key]; ttl < 47*time.Hour {
		t.Errorf("the key that had lost its TTL has one of %s", ttl)
	}
	if ttl := s.server.TTLs()[s.store.listKey()]; ttl < 47*time.Hour {
		t.Errorf("the list has a TTL of %s", ttl)
	}
	// A block for strikes, which is shorter, does not make the list forget this one.
	s.store.note(knownBlock{id: ID{8}, until: done.now + 60e6}, done.now, 3600e6)
	s.awaitListed(2)
	if ttl := s.server.TTLs()[s.store.listKey()]; ttl < 47*time.Hour {
		t.Errorf("after a shorter block was listed the list has a TTL of %s", ttl)
	}
	if _, err := s.store.unblock(t.Context(), c.ID, c.Penalty.group, 0, 0); err != nil {
		t.Fatal(err)
	}
	s.awaitListed(1)
}

// Acts on nobody leave nothing behind for long; on somebody, for as long as any node may know of a block.
func TestByHandOnNobodyIsForgottenSoon(t *testing.T) {
	s := alone(t, longBudgets)
	s.awaitRedis()
	const longest = 2 * time.Hour
	for i, row := range []struct {
		act   time.Duration
		least time.Duration
	}{
		{0, longest},
		{-24 * time.Hour, 24 * time.Hour},
		{time.Millisecond, longest},
		{48 * time.Hour, 48 * time.Hour},
	} {
		id := ID{byte(i), 1}
		for _, least := range []time.Duration{row.least, maxByHand * time.Microsecond} { // again: then somebody is known
			if _, err := s.store.act(t.Context(), s.store.client.enter(), id, "", us(row.act), us(longest)); err != nil {
				t.Fatal(err)
			}
			s.store.client.leave(1)
			if ttl := s.server.TTLs()[s.store.key(id)]; ttl < least || ttl > least+time.Hour {
				t.Errorf("after %s the key lives for %s, want %s and up to an hour more", row.act, ttl, least)
			}
		}
	}
}
