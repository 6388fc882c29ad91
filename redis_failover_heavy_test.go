//go:build redis

package ratelimit

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Failovers of nodes in the test's process, so that the test knows who decided.

// chargeOn returns what a request to a route is charged.
func chargeOn(route string, master, other ID) Charge {
	c := Charge{Zone: route, ID: master, Limit: Limit{Num: apiRate, Den: 1, Burst: apiBurst * Token}, Cost: Token, Floor: Token}
	switch route {
	case routeLogin:
		c.Limit = Limit{Num: 10_000, Den: 1, Burst: 10_000 * Token}
		c.Patient, c.OnStoreError = true, PolicyDeny
	case routeOther:
		c.ID, c.Limit = other, Limit{Num: 1, Den: 3600, Burst: otherBurst * Token}
	}
	return c
}

// asker asks nodes in the test's process.
type asker struct {
	nodes         []*Limiter
	master, other ID
	strays        atomic.Int64 // decisions about other that were not made by Redis
	shared        atomic.Int64 // requests for api that were admitted by a share
}

func (a *asker) ask(node int, route string) int {
	d := a.nodes[node].Decide(context.Background(), []Charge{chargeOn(route, a.master, a.other)})
	if route == routeOther && d.Source != SourceRedis {
		a.strays.Add(1)
	}
	if route == routeAPI && d.Allowed && d.Source == SourceShare {
		a.shared.Add(1)
	}
	switch {
	case d.Allowed:
		return 200
	case d.Reason == ReasonUnavailable:
		return 503
	}
	return 429
}

// exhaust asks for what is left of other, and holds that exactly its burst was admitted, always by Redis.
func (a *asker) exhaust(t *testing.T, l *timeline) {
	t.Helper()
	during := len(l.from(0, routeOther, 200))
	if during == otherBurst {
		t.Fatal("the burst was too small to say anything")
	}
	rest := rush(a.nodes, otherBurst-during+60, chargeOn(routeOther, a.master, a.other))
	t.Logf("keys of another master: %d decided during the failover, %v afterwards, %d not by Redis", len(l.from(0, routeOther, 0)), rest, a.strays.Load())
	if got := during + rest[ending{ReasonNone, SourceRedis}]; got != otherBurst || a.strays.Load() > 0 || len(rest) != 2 {
		t.Errorf("%d admitted of %d, %d decisions not by Redis", got, otherBurst, a.strays.Load())
	}
}

// checkShares holds what the shares admitted, and what Redis did, each against its bound.
func (a *asker) checkShares(t *testing.T, l *timeline) {
	t.Helper()
	shared := float64(a.shared.Load())
	byRedis := float64(len(l.from(0, routeAPI, 200))) - shared
	all := l.mark("the end").Seconds()
	t.Logf("%.0f admitted by shares, %.0f by Redis", shared, byRedis)
	if shared > apiBurst+apiRate*all || byRedis > 2*apiBurst+apiRate*all {
		t.Errorf("%.0f admitted by shares and %.0f by Redis in %.1f s", shared, byRedis, all)
	}
}

func nothing() {}

// awaitReplicated waits until a replica knows of a bucket.
func awaitReplicated(t *testing.T, replica *redistest.Server, id ID) {
	t.Helper()
	proc.Eventually(t, "the bucket is replicated", func() bool { return replica.Do("hget", redisKeyOf(id), "z"+routeAPI) != nil })
}

func becomesReplica(t *testing.T, old *redistest.Server) func() {
	return func() {
		proc.Eventually(t, "the old master is a replica", func() bool { return old.Info("replication", "role") == "slave" })
	}
}

// hurry makes Sentinels tell each other of a new master soon, and only then make a replica of the old one.
func hurry(g *redistest.SentinelGroup) {
	for _, sentinel := range g.Sentinels {
		sentinel.Do("sentinel", "debug", "publish-period", 200)
	}
}

// swap exchanges master and replica by hand: unlike Sentinels, that leaves clients their connections to the old master, which
// then answers READONLY, and tells nobody.
func swap(g *redistest.SentinelGroup) {
	for _, sentinel := range g.Sentinels {
		sentinel.Do("sentinel", "remove", redistest.MasterName)
	}
	g.Replica.Do("replicaof", "no", "one")
	host, port, _ := strings.Cut(g.Replica.Addr(), ":")
	g.Master.Do("replicaof", host, port)
	for _, sentinel := range g.Sentinels {
		sentinel.Do("sentinel", "monitor", redistest.MasterName, host, port, 2)
	}
}

func TestHeavyFailoverThroughSentinel(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, *redistest.SentinelGroup) failover{
		"killed": func(_ *testing.T, g *redistest.SentinelGroup) failover {
			return failover{fail: g.Master.Kill, settled: nothing}
		},
		"planned": func(t *testing.T, g *redistest.SentinelGroup) failover {
			return failover{
				fail:    func() { g.Sentinels[0].Do("sentinel", "failover", redistest.MasterName) },
				settled: func() { hurry(g); becomesReplica(t, g.Master)() },
			}
		},
		"swapped": func(t *testing.T, g *redistest.SentinelGroup) failover {
			return failover{fail: func() { swap(g) }, settled: becomesReplica(t, g.Master)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := redistest.StartSentinels(t, redistest.SentinelOptions{})
			f := prepare(t, g)
			f.replaced = func() { g.AwaitFailover(g.Master) }
			a := &asker{nodes: peers(t, 3, sentinelSettings(g, 300*time.Millisecond, 600*time.Millisecond)), master: ID{1}}
			fail := f.fail
			f.fail = func() { awaitReplicated(t, g.Replica, a.master); fail() }
			f.nodes, f.ask, f.routes = 3, a.ask, []string{routeAPI, routeLogin}
			awaitRedis(t, a.nodes, a.master)
			l := newTimeline()
			failed, known := l.watch(t, &f)
			l.check(t, failed, known)
			a.checkShares(t, l)
		})
	}
}

func TestHeavyFailoverOnCluster(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, master, replica *redistest.Server) failover{
		"killed": func(_ *testing.T, master, _ *redistest.Server) failover {
			return failover{fail: master.Kill, settled: nothing}
		},
		"stopped": func(t *testing.T, master, _ *redistest.Server) failover {
			return failover{fail: master.Stop, settled: func() { master.Cont(); becomesReplica(t, master)() }}
		},
		"planned": func(t *testing.T, master, replica *redistest.Server) failover {
			return failover{fail: func() { replica.Do("cluster", "failover") }, settled: becomesReplica(t, master)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := redistest.StartCluster(t, redistest.ClusterOptions{Args: []string{"--cluster-require-full-coverage", "no"}})
			ids := idsApart(c)
			master := c.MasterOf(redisKeyOf(ids[0]))
			f := prepare(t, master, replicaOf(c, master))
			f.replaced = func() { c.AwaitFailover(master) }
			a := &asker{nodes: peers(t, 3, clusterSettings(c, 400*time.Millisecond, 800*time.Millisecond)), master: ids[0], other: ids[1]}
			awaitRedis(t, a.nodes, ids...)
			f.nodes, f.ask, f.routes = 3, a.ask, []string{routeAPI, routeLogin, routeOther}
			l := newTimeline()
			failed, known := l.watch(t, &f)
			l.check(t, failed, known)
			a.checkShares(t, l)
			a.exhaust(t, l)
		})
	}
}

// replicaOf returns the replica that a master has at the start.
func replicaOf(c *redistest.Cluster, master *redistest.Server) *redistest.Server {
	for i := range c.Masters {
		if c.Masters[i] == master {
			return c.Replicas[i]
		}
	}
	return nil
}
