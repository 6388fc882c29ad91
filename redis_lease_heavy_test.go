//go:build redis

package ratelimit

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

func hotSettings(server *redistest.Server) redisSettings {
	return redisSettings{network: "tcp", addresses: server.Addr(), prefix: "tollgate", timeout: time.Second, patience: time.Second}
}

// offer sends so many requests a second to each node, and returns how many were admitted until the end.
func offer(nodes []*Limiter, perSecond int, until time.Time, c Charge) int64 {
	var count atomic.Int64
	var wg sync.WaitGroup
	for _, node := range nodes {
		wg.Go(func() {
			begun := time.Now()
			for sent := 0; time.Now().Before(until); sent++ {
				time.Sleep(time.Until(begun.Add(time.Duration(sent) * time.Second / time.Duration(perSecond))))
				if node.Decide(context.Background(), []Charge{c}).Allowed {
					count.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return count.Load()
}

// Three nodes with leases are offered three times the limit: they admit the limit, and never more.
func TestHeavyHotKeyOverItsLimit(t *testing.T) {
	const rate, seconds = 1000, 20
	server := redistest.Start(t)
	nodes := peers(t, 3, hotSettings(server))
	c := testCharge("hot", rate)
	c.Limit, c.Leases = Limit{Num: rate, Den: 1, Burst: rate * Token}, true // millionths of a token a µs
	awaitRedis(t, nodes, c.ID)
	begun := time.Now()
	admitted := offer(nodes, rate, begun.Add(seconds*time.Second), c)
	bound := float64(rate) + rate*time.Since(begun).Seconds()
	part := float64(admitted) / bound
	t.Logf("%d admitted of %.0f: %.4f; %d calls of the script for %d requests", admitted, bound, part, server.Calls("evalsha"), 3*rate*seconds)
	if part > 1 || part < 0.97 {
		t.Errorf("admitted %.4f of burst + rate × time", part)
	}
}

// Far from its limit, a hot key is served without Redis.
func TestHeavyHotKeyFarFromItsLimit(t *testing.T) {
	server := redistest.Start(t)
	nodes := peers(t, 1, hotSettings(server))
	c := testCharge("hot", 1)
	c.Limit, c.Leases = Limit{Num: 1_000_000, Den: 1, Burst: 1_000_000 * Token}, true
	awaitRedis(t, nodes, c.ID)
	before := server.Calls("evalsha")
	var sent int
	for begun := time.Now(); time.Since(begun) < 3*time.Second; sent++ {
		if d := nodes[0].Decide(context.Background(), []Charge{c}); !d.Allowed {
			t.Fatalf("got %+v", d)
		}
	}
	calls := server.Calls("evalsha") - before
	t.Logf("%d requests, %d calls", sent, calls)
	if calls*50 > sent {
		t.Errorf("%d calls for %d requests, want one for 50 at most", calls, sent)
	}
}
