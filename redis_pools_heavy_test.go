//go:build redis

package ratelimit

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// What is left of connections to Redis after hundreds of configurations.

// Five hundred loads, each of which replaces the connections by those of other settings: nothing of them stays.
func TestHeavyReloadsByTheHundred(t *testing.T) {
	const reloads = 500
	server := redistest.Start(t)
	config := func(i int) string {
		return site(fmt.Sprintf("redis {$REDIS} {\n timeout %ds\n sensitive_timeout 9s\n}\nkey_secret test\nnodes auto 1", 1+i%2),
			fmt.Sprintf("zone login {\n rate 1000000/s\n burst %d\n sensitive\n}", 1000+i%3))
	}
	n := node.Start(t, config(0), node.Env("REDIS", server.Addr()))
	load := func(from, to int) {
		for i := from; i < to; i++ {
			if err := n.Load(config(i)); err != nil {
				t.Fatal(err)
			}
			if i%10 == 0 {
				if answer := n.Get("/"); answer.Status != http.StatusOK {
					t.Errorf("reload %d: status %d", i, answer.Status)
				}
			}
		}
	}
	conns := func() int {
		return len(clientIDs(server, func(client string) bool { return !strings.Contains(client, " cmd=client|list ") }))
	}
	settled := func() { proc.Eventually(t, "one pool is left", func() bool { return conns() <= defaultPoolSize }) }
	load(0, 50)
	settled()
	goroutines, heap, open := n.Goroutines(), heapOf(n), conns()
	begun := time.Now()
	load(50, 50+reloads)
	t.Logf("%d reloads in %s, %d connections right after", reloads, time.Since(begun).Round(time.Millisecond), conns())
	settled()
	proc.Eventually(t, "goroutines are as before", func() bool { return n.Goroutines() <= goroutines+5 })
	after := heapOf(n)
	t.Logf("before: %d goroutines, heap %d KB, %d connections; after: %d, %d KB, %d", goroutines, heap>>10, open, n.Goroutines(), after>>10, conns())
	if after > heap+4<<20 {
		t.Errorf("heap of %d KB, %d before", after>>10, heap>>10)
	}
	if bad := n.LogLines("redis is down") + n.LogLines("redis cannot be reached"); bad > 0 {
		t.Errorf("%d outages", bad)
	}
}

// heapOf returns how many bytes a node has in use after a garbage collection.
func heapOf(n *node.Node) (bytes int) {
	profile := n.Admin(http.MethodGet, "/debug/pprof/heap?debug=1&gc=1", "").Body
	_, rest, _ := strings.Cut(profile, "# HeapAlloc = ")
	_, _ = fmt.Sscan(rest, &bytes)
	return bytes
}

// Clients of Sentinels and Clusters come and go as those of a single server do: no goroutine stays, and no connection at any of
// the servers, whether they were used, just opened or let go before they were.
func TestHeavyClientsOfManyServersLeaveNothing(t *testing.T) {
	for name, start := range map[string]func() (redisSettings, []*redistest.Server){
		"Sentinel": func() (redisSettings, []*redistest.Server) {
			g := redistest.StartSentinels(t, redistest.SentinelOptions{})
			return sentinelSettings(g, time.Second, time.Second), append([]*redistest.Server{g.Master, g.Replica}, g.Sentinels...)
		},
		"Cluster": func() (redisSettings, []*redistest.Server) {
			c := redistest.StartCluster(t, redistest.ClusterOptions{})
			return clusterSettings(c, time.Second, time.Second), slices.Concat(c.Masters, c.Replicas)
		},
	} {
		t.Run(name, func(t *testing.T) {
			settings, servers := start()
			settings.poolSize = defaultPoolSize
			others := func() (counts []string) {
				for _, server := range servers {
					counts = append(counts, server.Info("clients", "connected_clients"))
				}
				return counts
			}
			before := others()
			ignore := goleak.IgnoreCurrent()
			for i := range 50 {
				settings.timeout = time.Second + time.Duration(i) // each has a client of its own
				client, err := acquireRedis(settings)
				if err != nil {
					t.Fatal(err)
				}
				client.start()
				if i%2 == 0 {
					store := &redisStore{client: client, prefix: settings.prefix}
					proc.Eventually(t, "Redis decides", func() bool {
						_, err := store.Take(t.Context(), []Charge{testCharge("api", 1e6)})
						return err == nil
					})
				}
				releaseRedis(client)
			}
			t.Logf("connections before %v, right after %v", before, others())
			proc.Eventually(t, "nothing runs any more", func() bool { return goleak.Find(ignore) == nil })
			proc.Eventually(t, "all connections are closed", func() bool { return slices.Equal(others(), before) })
		})
	}
}
