package ratelimit

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds nodes in the process of the test: limiters that have nothing in common but the Redis behind them.

// peers returns so many nodes, each with connections and shares of its own.
func peers(t *testing.T, n int, settings redisSettings) []*Limiter {
	t.Helper()
	nodes := make([]*Limiter, n)
	for i := range nodes {
		settings.poolSize = 8 + i // equal settings would share a client
		client, err := acquireRedis(settings)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { releaseRedis(client) })
		nodes[i] = &Limiter{
			remote: &redisStore{client: client, prefix: settings.prefix}, local: newMemoryStore(), shares: newMemoryStore(),
			known: newKnownBlocks(), refusals: newRefusalCache(), leases: newLeaseTable(), nodes: func() int64 { return int64(n) }, maxKeys: 1000, now: processMicros,
		}
	}
	return nodes
}

func sentinelSettings(g *redistest.SentinelGroup, timeout, patience time.Duration) redisSettings {
	return redisSettings{
		kind: redisSentinel, network: "tcp", addresses: strings.Join(g.Addrs(), ","), master: redistest.MasterName,
		prefix: "tollgate", timeout: timeout, patience: patience,
	}
}

func clusterSettings(c *redistest.Cluster, timeout, patience time.Duration) redisSettings {
	return redisSettings{
		kind: redisCluster, network: "tcp", addresses: c.Addrs()[0],
		prefix: "tollgate", timeout: timeout, patience: patience,
	}
}

// redisKeyOf returns where Redis keeps what is known of an identity.
func redisKeyOf(id ID) string { return (&redisStore{prefix: "tollgate"}).key(id) }

// idsApart returns an identity of each master.
func idsApart(c *redistest.Cluster) []ID {
	var ids []ID
	var keepers []*redistest.Server
	for i := byte(1); len(ids) < len(c.Masters); i++ {
		if keeper := c.MasterOf(redisKeyOf(ID{i})); !slices.Contains(keepers, keeper) {
			ids, keepers = append(ids, ID{i}), append(keepers, keeper)
		}
	}
	return ids
}

// awaitRedis waits until every node decides by Redis about each of the identities.
func awaitRedis(t *testing.T, nodes []*Limiter, ids ...ID) {
	t.Helper()
	for _, node := range nodes {
		for _, id := range ids {
			warm := testCharge("warm", 1e6)
			warm.ID = id
			proc.Eventually(t, "Redis decides", func() bool {
				return node.Decide(context.Background(), []Charge{warm}).Source == SourceRedis
			})
		}
	}
}

// ending is how a decision ended.
type ending struct {
	reason Reason // none: allowed
	source Source
}

// rush has 60 clients ask for so many decisions at once, in turn at the nodes, and counts how they ended.
func rush(nodes []*Limiter, requests int, charges ...Charge) map[ending]int {
	total := map[ending]int{}
	var mu sync.Mutex
	var sent atomic.Int64
	var wg sync.WaitGroup
	for range 60 {
		wg.Go(func() {
			for i := sent.Add(1); i <= int64(requests); i = sent.Add(1) {
				d := nodes[int(i)%len(nodes)].Decide(context.Background(), slices.Clone(charges))
				if d.Source == SourceCache { // what Redis said a moment ago
					d.Source = SourceRedis
				}
				mu.Lock()
				total[ending{d.Reason, d.Source}]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return total
}
