package ratelimit

import (
	"context"
	"fmt"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// clocked is a store at a clock that the test sets.
type clocked struct {
	t    *testing.T
	now  int64
	take func(now int64, charges []Charge) outcome
	// written returns a description of all that is stored, or nil if that cannot be seen.
	written func() any
}

func (s *clocked) decide(charges ...Charge) Decision {
	s.t.Helper()
	out := s.take(s.now, charges)
	return out.decision(charges, SourceNone)
}

func (s *clocked) after(d time.Duration) *clocked { s.now += d.Microseconds(); return s }

// admits takes the charges n times and holds that exactly so many are allowed.
func (s *clocked) admits(want, n int, charges ...Charge) {
	s.t.Helper()
	got := 0
	for range n {
		if s.decide(charges...).Allowed {
			got++
		}
	}
	if got != want {
		s.t.Fatalf("%d of %d admitted, want %d", got, n, want)
	}
}

// onEveryStore runs a test of behaviour on memory and on Redis.
func onEveryStore(t *testing.T, test func(s *clocked)) {
	t.Helper()
	const epoch = 1_764_550_000_000_000
	t.Run("memory", func(t *testing.T) {
		m := newMemoryStore()
		test(&clocked{t: t, now: epoch, take: func(now int64, charges []Charge) outcome { return takeNow(m, now, charges, 1000) }})
	})
	t.Run("redis", func(t *testing.T) {
		server := redistest.Start(t)
		client := redis.NewClient(&redis.Options{Addr: server.Addr()})
		defer client.Close()
		test(&clocked{t: t, now: epoch, take: func(now int64, charges []Charge) outcome {
			return scripted{client, "tollgate"}.take(t, now, charges)
		}, written: func() any { return dump(t, client) }})
		for key, ttl := range server.TTLs() {
			if ttl <= 0 || ttl > maxFill {
				t.Errorf("key %q has a TTL of %s", key, ttl)
			}
		}
	})
}

// dump returns all that is in a Redis, with the time at which each key ends.
func dump(t *testing.T, client *redis.Client) map[string]string {
	t.Helper()
	ctx := context.Background()
	all := map[string]string{}
	keys, err := client.Keys(ctx, "*").Result()
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range keys {
		ends := client.Do(ctx, "pexpiretime", key).Val()
		all[key] = fmt.Sprintf("%q until %v", client.HGetAll(ctx, key).Val(), ends)
	}
	return all
}

func limited(zone string, id byte, rate string, burst int64) Charge {
	r, err := ParseRate(rate)
	if err != nil {
		panic(err)
	}
	return Charge{Zone: zone, ID: ID{id}, Limit: Limit{Num: r.num, Den: r.den, Burst: burst * Token}, Cost: Token, Floor: Token}
}

func defaultRules() *penaltyRules {
	return &penaltyRules{after: 3, base: 60e6, max: 3600e6, window: 3600e6}
}

func TestBurstRefillAndRetryAfter(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("api", 1, "7/m", 10)
		s.admits(10, 50, c)
		d := s.decide(c)
		if d.Limit != 10 || d.Remaining != 0 || d.Reason != ReasonLimited || d.Zone != "api" {
			t.Errorf("got %+v", d)
		}
		s.after(d.RetryAfter-time.Microsecond).admits(0, 1, c)
		s.after(time.Microsecond).admits(1, 2, c)
		s.after(10*time.Minute).admits(10, 50, c)
		if d := s.decide(c); d.ResetAfter.Round(time.Second) != 86*time.Second { // 10 tokens at 7 a minute
			t.Errorf("full after %s", d.ResetAfter)
		}
	})
}

func TestCosts(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		dear, cheap := limited("api", 1, "1/h", 100), limited("api", 1, "1/h", 100)
		dear.Cost = 7 * Token
		s.admits(14, 20, dear)
		s.admits(2, 20, cheap) // what is left of 100 - 98
	})
}

func TestAllOrNothing(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		address, global := limited("address", 1, "1/h", 100), limited("global", 2, "1/h", 50)
		s.admits(50, 200, address, global)
		s.admits(50, 200, address)
		same := limited("other", 1, "1/h", 5) // another zone of the same identity
		s.admits(0, 10, address, same)
		s.admits(5, 10, same)
	})
}

func TestTokensSurviveAChangeOfTheLimit(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		slow, fast := limited("api", 1, "1/h", 100), limited("api", 1, "100/s", 100)
		s.admits(100, 200, slow)
		// Raised: the hour before the change counts at the old rate, the second after it at the new one.
		s.after(time.Hour).admits(1, 50, fast)
		s.after(100*time.Millisecond).admits(10, 50, fast)
		// Lowered: what flowed in at the old rate is kept.
		s.after(200*time.Millisecond).admits(20, 50, slow)
		s.after(200*time.Millisecond).admits(0, 50, slow)
		// Back and forth creates nothing.
		for range 100 {
			s.admits(0, 1, fast)
			s.admits(0, 1, slow)
		}
		// A smaller burst takes what it cannot hold; a larger one gives nothing.
		s.after(200 * time.Hour)
		small, large := limited("api", 1, "1/h", 3), limited("api", 1, "1/h", 1000)
		s.admits(1, 1, slow) // 99 of 100 left
		s.admits(3, 50, small)
		s.admits(0, 50, large)
	})
}

// A key lives until its bucket is full under the largest burst that asked, or raising a burst would be a way to refill.
func TestKeyOutlivesASmallerBurst(t *testing.T) {
	server := redistest.Start(t)
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	store := scripted{client, "tollgate"}
	small, large := limited("api", 1, "1/s", 2), limited("api", 1, "1/s", 1000)
	large.Cost = 900 * Token
	const now = 1_764_550_000_000_000
	for range 2 {
		store.take(t, now, []Charge{small})
	}
	for range 2 {
		if out := store.take(t, now, []Charge{large}); out.verdict != verdictLimited {
			t.Errorf("got %+v", out)
		}
	}
	for key, ttl := range server.TTLs() {
		// A quarter of the 1000 s and 10 s are the margin for clocks that go wrong.
		if ttl < 1250*time.Second || ttl > 1260*time.Second {
			t.Errorf("%s lives for %s, and is full after 1000 s", key, ttl)
		}
	}
}

// The timeline of R6: 2, 4, 8, 16, 32, 60, 60 minutes, and nothing that happens during a block changes it.
func TestPenaltyTimeline(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("login", 1, "1/m", 1)
		c.Penalty = defaultRules()
		s.admits(1, 1, c)
		for strike := int64(1); strike <= 3; strike++ {
			if d := s.decide(c); d.Reason != ReasonLimited || d.Strikes != strike {
				s.t.Fatalf("strike %d: %+v", strike, d)
			}
		}
		for i, minutes := range []int{2, 4, 8, 16, 32, 60, 60} {
			length := time.Duration(minutes) * time.Minute
			d := s.decide(c)
			if d.Reason != ReasonBlocked || d.RetryAfter != length || !d.BlockStarted || d.Strikes != int64(4+i) {
				s.t.Fatalf("block %d: %+v, want one of %s", i, d, length)
			}
			var before any
			if s.written != nil {
				before = s.written()
			}
			s.after(length / 2)
			for range 1000 {
				if d := s.decide(c); d.Reason != ReasonBlocked || d.RetryAfter != length/2 || d.BlockStarted || d.Strikes != 0 {
					s.t.Fatalf("in the middle of block %d: %+v", i, d)
				}
			}
			if s.written != nil && !reflect.DeepEqual(s.written(), before) {
				s.t.Fatalf("requests during a block changed what is stored:\n%v\n%v", before, s.written())
			}
			s.after(length/2 - time.Microsecond)
			if d := s.decide(c); d.Reason != ReasonBlocked {
				s.t.Fatalf("just before the end of block %d: %+v", i, d)
			}
			s.after(time.Microsecond).admits(1, 1, c)
		}
	})
}

// Strikes are forgotten after a window without one, whatever keeps the rest of the client's state alive.
func TestStrikesAreForgotten(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		rules := defaultRules()
		slow, fast := limited("slow", 1, "1/h", 100), limited("fast", 1, "1/s", 1) // slow takes 100 h to refill
		slow.Penalty, fast.Penalty = rules, rules
		s.admits(80, 80, slow)
		s.admits(1, 4, fast) // three strikes
		for range 19 {
			s.after(3*time.Minute).admits(1, 1, slow, fast)
		}
		s.after(3 * time.Minute)
		s.admits(1, 1, fast)
		if d := s.decide(fast); d.Strikes != 1 || d.Reason != ReasonLimited {
			s.t.Errorf("the fourth strike after the window: %+v, want strike 1", d)
		}
	})
}

func TestStrikesJustRemembered(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("api", 1, "1/s", 1)
		c.Penalty = defaultRules()
		s.admits(1, 4, c)
		s.after(time.Hour-time.Microsecond).admits(1, 1, c)
		if d := s.decide(c); d.Strikes != 4 || d.Reason != ReasonBlocked {
			s.t.Errorf("a microsecond before the window ends: %+v, want strike 4 and a block", d)
		}
	})
}

func TestOneStrikeInEvery(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("api", 1, "1/h", 1)
		c.Penalty = defaultRules()
		c.Penalty.every = 10e6
		s.admits(1, 1, c)
		for strike := int64(1); strike <= 3; strike++ {
			for i := range int64(5) {
				want := strike
				if i > 0 {
					want = 0
				}
				if d := s.decide(c); d.Strikes != want || d.Reason != ReasonLimited {
					s.t.Fatalf("refusal %d in the time of strike %d: %+v", i, strike, d)
				}
			}
			s.after(10 * time.Second)
		}
		if d := s.decide(c); d.Reason != ReasonBlocked {
			s.t.Errorf("got %+v, want a block", d)
		}
	})
}

// A refusal strikes once, and only for those who refused; a block holds for the group, on all zones of the identity.
func TestWhoIsStruck(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		rules := defaultRules()
		global, address, other := limited("global", 9, "1/h", 1), limited("address", 1, "1/h", 100), limited("other", 1, "1/h", 100)
		address.Penalty, other.Penalty = rules, rules // the key of global holds nothing of the client
		s.admits(1, 1000, global, address)
		s.admits(99, 99, address) // one token was taken by the first request, and nobody was blocked for the 999
		for range 4 {
			s.decide(address, other)
		}
		if d := s.decide(other); d.Reason != ReasonBlocked {
			s.t.Errorf("got %+v, want the block of the group", d)
		}
		free := limited("free", 1, "1/h", 5) // penalty off
		s.admits(5, 10, free)
		strict := limited("strict", 1, "1/h", 5)
		strict.Penalty = defaultRules()
		strict.Penalty.group = "strict"
		s.admits(5, 5, strict)
	})
}

func TestDryRun(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		dry, real := limited("dry", 1, "1/h", 2), limited("real", 1, "1/h", 10)
		dry.DryRun, dry.Penalty = true, defaultRules()
		s.admits(10, 20, dry, real)
		dry.DryRun = false
		if d := s.decide(dry); d.Reason != ReasonLimited || d.Strikes != 1 {
			s.t.Errorf("got %+v: a dry run takes what is there, and never strikes", d)
		}
	})
}

func TestEarlyDataNeverStrikes(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("api", 1, "1/h", 1)
		c.Penalty, c.NoStrike = defaultRules(), true
		s.admits(1, 100, c)
		c.NoStrike = false
		if d := s.decide(c); d.Strikes != 1 {
			s.t.Errorf("got %+v, want the first strike", d)
		}
	})
}

// The clock of a store can jump back, at a failover: that gives nothing, and locks out nobody for longer than a refill.
func TestClockStepsBack(t *testing.T) {
	onEveryStore(t, func(s *clocked) {
		c := limited("api", 1, "1/s", 10)
		s.admits(10, 20, c)
		s.after(-time.Hour).admits(0, 10, c)
		s.after(5*time.Second).admits(5, 10, c)
		c.Penalty = defaultRules()
		s.admits(0, 4, c) // blocked for two minutes
		s.after(-24 * time.Hour)
		if d := s.decide(c); d.Reason != ReasonBlocked || d.RetryAfter > time.Hour {
			s.t.Errorf("got %+v, want a block no longer than the longest", d)
		}
		c.Penalty = nil
		s.after(time.Hour).admits(0, 1, c) // the time of the bucket is mended when somebody asks for it
		s.after(time.Second).admits(1, 1, c)
	})
}

func TestOddNumbers(t *testing.T) {
	for _, test := range []struct {
		rate  string
		burst int64
		idle  time.Duration
		want  int
	}{
		{"7/s", 1, 100 * time.Second, 1},
		{"1/day", 2, 36 * time.Hour, 1},
		{"0.5/s", 3, 5 * time.Second, 2},
		{"10000000/day", 100, time.Second, 100},
		{"13/17s", 20, 17 * time.Second, 13},
	} {
		t.Run(test.rate+" "+strconv.FormatInt(test.burst, 10), func(t *testing.T) {
			onEveryStore(t, func(s *clocked) {
				c := limited("api", 1, test.rate, test.burst)
				s.admits(int(test.burst), int(test.burst)+5, c)
				s.after(test.idle).admits(test.want, test.want+5, c)
			})
		})
	}
}
