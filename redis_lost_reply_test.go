package ratelimit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds what must not depend on how one connects: that nothing is taken twice, and that a script which is gone is no
// failure.

// onEveryKind runs a test in front of a Redis of every kind, through proxies.
func onEveryKind(t *testing.T, settings redisSettings, test func(t *testing.T, s *stand)) {
	groups := &redisGroups{t: t}
	for _, kind := range []struct {
		name  string
		start func(*testing.T, redisSettings) *stand
	}{
		{"standalone", proxied}, {"Sentinel", groups.sentinel}, {"Cluster", groups.clustered},
	} {
		t.Run(kind.name, func(t *testing.T) { test(t, kind.start(t, settings)) })
	}
}

// A lost reply costs one debit: the command was executed, nobody knows, and nothing sends it again. gateways C-4 47, 48.
func TestLostReply(t *testing.T) {
	settings := redisSettings{timeout: 300 * time.Millisecond, patience: time.Second}
	onEveryKind(t, settings, func(t *testing.T, s *stand) {
		s.awaitRedis()
		answered, _ := s.taken()
		for lost := 1; lost <= 5; lost++ {
			executed := s.server.Calls("evalsha")
			s.proxy.DropRepliesTo("evalsha")
			if _, err := s.store.Take(context.Background(), []Charge{s.charge(normalZone)}); !isLost(err) {
				t.Fatalf("a reply that never came: %v", err)
			}
			s.proxy.DropRepliesTo("")
			if n := s.server.Calls("evalsha") - executed; n != 1 {
				t.Errorf("executed %d times, want once", n)
			}
			if _, err := s.store.Take(context.Background(), []Charge{s.charge(normalZone)}); err != nil {
				t.Fatalf("on a new connection: %v", err)
			}
			if debits := s.debits(); debits != answered+2*lost {
				t.Errorf("%d debits for %d answers and %d lost ones", debits, answered+lost, lost)
			}
		}
		if s.store.down() {
			t.Error("single lost replies count as an outage")
		}
	})
}

// isLost says whether an error is that of a reply which did not come.
func isLost(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.Is(err, errTimeout) || errors.As(err, &timeout) && timeout.Timeout()
}

// All servers forget the script again and again while requests are on their way: none fails, and each is counted once. gateways
// C-4 50, 52.
func TestScriptFlushUnderLoad(t *testing.T) {
	settings := redisSettings{timeout: 10 * time.Second, patience: 10 * time.Second}
	onEveryKind(t, settings, func(t *testing.T, s *stand) {
		s.awaitRedis()
		before, _ := s.taken()
		s.forget()
		servers := []*redistest.Server{s.server}
		if s.cluster != nil {
			servers = s.cluster.Masters
		}
		var done atomic.Bool
		var clients sync.WaitGroup
		for range 4 {
			clients.Go(func() {
				for !done.Load() {
					s.ask(1)
				}
			})
		}
		for range 20 {
			for _, server := range servers {
				server.Do("script", "flush")
			}
			answered, _ := s.taken()
			proc.Eventually(t, "more is decided", func() bool {
				now, given := s.taken()
				return now+given > answered+20
			})
		}
		done.Store(true)
		clients.Wait()
		answered, given := s.taken()
		if debits := s.debits(); given > 0 || debits != before+answered {
			t.Errorf("%v: %d debits for %d decisions by Redis and %d others", s.noted(), debits, before+answered, given)
		}
	})
}
