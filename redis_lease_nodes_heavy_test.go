//go:build redis

package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Three Caddys with leases, random costs, one that is killed and one that is reloaded in the middle: in no rush, and not over all,
// more is admitted than burst + rate × time.
func TestHeavyCaddysWithLeases(t *testing.T) {
	const rate, burst, rushes = 500, 2000, 3
	server := redistest.Start(t)
	config := site("redis {$REDIS} {\n timeout 2s\n sensitive_timeout 2s\n}\nkey_secret test\nnodes 3",
		fmt.Sprintf("zone hot {\n key all\n rate %d/s\n burst %d\n cost 3 /3\n cost 7 /7\n lease auto\n on_store_error deny\n}", rate, burst))
	nodes := make([]*node.Node, 3)
	for i := range nodes {
		nodes[i] = node.Start(t, config, node.Env("REDIS", server.Addr()))
	}
	start, total := time.Now(), int64(0)
	for rush := range rushes {
		if rush > 0 {
			time.Sleep(burst * time.Second / rate) // the bucket fills, which nothing tells of
		}
		begun, calls := time.Now(), server.Calls("evalsha")
		admitted, requests := stampede(nodes, begun.Add(1500*time.Millisecond), func() {
			nodes[1].Kill()
			nodes[1].Restart()
			if err := nodes[2].Load(config); err != nil {
				t.Error(err)
			}
		})
		bound := int64(burst + rate*time.Since(begun).Seconds())
		t.Logf("rush %d: %d of %d tokens admitted, %d requests, %d calls", rush, admitted, bound, requests, server.Calls("evalsha")-calls)
		if admitted > bound || admitted < burst {
			t.Errorf("%d tokens admitted, want from %d to %d", admitted, burst, bound)
		}
		total += admitted
	}
	if bound := int64(burst + rate*time.Since(start).Seconds()); total > bound {
		t.Errorf("%d tokens admitted over all, want %d at most", total, bound)
	}
}

// stampede sends requests of random costs from four clients for each node while something happens, and returns the tokens
// that were admitted.
func stampede(nodes []*node.Node, until time.Time, happens func()) (admitted, requests int64) {
	paths := []string{"/", "/", "/3", "/7"}
	costs := map[string]int64{"/": 1, "/3": 3, "/7": 7}
	var tokens, count atomic.Int64
	var wg sync.WaitGroup
	for i := range 4 * len(nodes) {
		wg.Go(func() {
			for time.Now().Before(until) {
				path := paths[rand.N(len(paths))] //nolint:gosec // no secret
				count.Add(1)
				if answer, err := nodes[i%len(nodes)].Try("GET", path, ""); err == nil && answer.Status == 200 {
					tokens.Add(costs[path])
				}
			}
		})
	}
	wg.Go(happens)
	wg.Wait()
	return tokens.Load(), count.Load()
}
