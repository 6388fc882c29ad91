package ratelimit

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"pgregory.net/rapid"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// peek runs peek.lua at the test's clock.
func (s scripted) peek(t rapid.TB, now int64, charges []Charge) []peeked {
	script := strings.Replace(peekScript, "redis.call('TIME')", fmt.Sprintf("{%d, %d}", now/1e6, now%1e6), 1)
	keys, fields := peekArguments(s.prefix, charges)
	reply, err := s.client.Eval(context.Background(), script, keys, fields...).Slice()
	if err != nil {
		t.Fatalf("peek: %v", err)
	}
	states, err := peekReply(charges, reply)
	if err != nil {
		t.Fatalf("peek: %v: %v", err, reply)
	}
	return states
}

// peek returns what the plainest store has for a charge.
func (m *plain) peek(now int64, c *Charge) peeked {
	p := peeked{now: now, limit: c.Limit}
	b, _, _ := m.buckets[bucketName(c)].settledBeside(m.leased[bucketName(c)], c.Limit, now)
	p.tokens = b.Tokens
	if c.Penalty != nil {
		p.record, _ = m.records[recordName(c)].settled(c.Penalty, now)
	}
	return p
}

// What operators are shown is what the next request would find, in Redis and in memory, and looking changes nothing.
func TestPeekSeesWhatRequestsFind(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	cases, partly, struck := 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		cases++
		script := scripted{client, fmt.Sprintf("peek%d-%d", time.Now().UnixNano(), cases)}
		inRedis, memory := newPlain(), newMemoryStore()
		rules := []*penaltyRules{
			{group: "", after: 3, base: 60e6, max: 3600e6, window: 3600e6},
			{group: "strict", after: 0, base: 1e6, max: 7e6, window: 30e6},
		}
		ids := []ID{{1}, {2}}
		now := int64(1_764_550_000_123_456)
		for range rapid.IntRange(20, 60).Draw(t, "steps") {
			now += rapid.SampledFrom([]int64{0, 1, 999, 3e4, 1e5, 1e6, 3e6, 61e6, 3600e6}).Draw(t, "idle")
			charges := drawCharges(t, now, ids, rules)
			states := script.peek(t, now, charges)
			for i := range charges {
				c := &charges[i]
				want := inRedis.peek(now, c)
				want.source = SourceRedis
				if states[i] != want {
					t.Fatalf("at %d of %+v:\nRedis %+v\nmodel %+v", now, *c, states[i], want)
				}
				if want.tokens > 0 && want.tokens < c.Limit.Burst {
					partly++
				}
				if want.record.strikes > 0 {
					struck++
				}
			}
			script.take(t, now, charges)
			inRedis.take(now, charges)
			sameInMemory(t, memory, now, charges)
		}
	})
	if partly < 200 || struck < 200 {
		t.Errorf("%d buckets with something in them and %d records: too few for the test to mean anything", partly, struck)
	}
}

// sameInMemory looks at charges, takes them, and holds that it saw what was found.
func sameInMemory(t *rapid.T, m *memoryStore, now int64, charges []Charge) {
	states := make([]peeked, len(charges))
	for i := range charges {
		charges[i].Ask, charges[i].BlockedFor, charges[i].DryRun = 0, 0, false // the first two, nobody gives to a memory store
		states[i] = m.peek(now, &charges[i])
	}
	out := takeNow(m, now, charges, 1000)
	for i := range charges {
		c, p := &charges[i], &states[i]
		left := p.tokens
		if out.verdict == verdictAllowed {
			left = min(left-c.Cost, c.Limit.Burst)
		}
		if out.verdict != verdictBlocked && out.tokens[i] != left {
			t.Fatalf("%+v at %d: %d left where %+v was seen", *c, now, out.tokens[i], *p)
		}
		if until, _ := p.blockedUntil(); until > 0 && (out.verdict != verdictBlocked || out.until < until) {
			t.Fatalf("%+v at %d: %+v where %+v was seen", *c, now, out, *p)
		}
	}
	if p := &states[out.charge]; out.verdict == verdictBlocked && !out.blockStarted && p.record.ends() != out.until {
		t.Fatalf("at %d: blocked until %d where %+v was seen", now, out.until, *p)
	}
}

// What nobody of ours has written is no state, and no error.
func TestPeekReadsGarbage(t *testing.T) {
	s := alone(t, longBudgets)
	c := testCharge("api", 10)
	c.Penalty = defaultRules()
	h := &Handler{remote: s.store, limiter: s.limiter}
	s.awaitRedis()
	see := func(why string, wantTokens, wantStrikes, wantHand int64) {
		t.Helper()
		states, err := h.peek(context.Background(), []Charge{c})
		if err != nil || states[0].source != SourceRedis || states[0].tokens/Token != wantTokens || states[0].record.strikes != wantStrikes || states[0].record.hand != wantHand {
			t.Errorf("%s: %v, %+v, want %d tokens, %d strikes and %d by hand", why, err, states, wantTokens, wantStrikes, wantHand)
		}
	}
	write := func(field, hex string) {
		t.Helper()
		s.server.Do("eval", "return redis.call('hset', KEYS[1], ARGV[1], (string.gsub(ARGV[2], '%x%x', function(h) return string.char(tonumber(h, 16)) end)))", 1, s.store.key(c.ID), field, hex)
	}
	bucket := func(version int, tokens uint64, at int64) string {
		return fmt.Sprintf("%02x%014x%014x%08x%08x", version, tokens&(1<<56-1), at, 1, 3600)
	}
	now := time.Now().UnixMicro()
	see("nothing", 10, 0, 0)
	write("zapi", bucket(1, 3*Token, now))
	see("a bucket", 3, 0, 0)
	write("zapi", bucket(2, 3*Token, now)+fmt.Sprintf("%014x%014x", 2*Token, 0))
	see("a bucket of which tokens are leased", 3, 0, 0)
	negative := int64(-5 * Token)
	write("zapi", bucket(1, uint64(negative), now))
	see("less than nothing", 0, 0, 0)
	write("zapi", bucket(1, 3*Token, now+1e12))
	see("a bucket of the future", 3, 0, 0)
	write("zapi", bucket(7, 3*Token, now))
	see("a bucket of another version", 10, 0, 0)
	write("zapi", "00")
	see("a short bucket", 10, 0, 0)
	write("p", fmt.Sprintf("%02x%04x%014x%014x", 1, 2, 0, now))
	see("strikes", 10, 2, 0)
	later := now + 3600e6
	write("p", fmt.Sprintf("%02x%04x%014x%014x%014x", 2, 2, 0, now, later))
	see("a block by hand", 10, 2, later)
	write("p", fmt.Sprintf("%02x%04x%014x%014x%014x", 2, 2, 0, now, 1<<56-later))
	see("an amnesty", 10, 2, -later)
	write("p", fmt.Sprintf("%02x%04x%014x%014x", 3, 2, 0, now))
	see("a record of another version", 10, 0, 0)
	s.server.Do("set", s.store.key(c.ID), "no hash")
	see("a key of another type", 10, 0, 0)
	if left := s.server.Do("get", s.store.key(c.ID)); left != "no hash" {
		t.Errorf("looking has changed it: %v", left)
	}
}
