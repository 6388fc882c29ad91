package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds the states of Redis that only groups of servers have.

// redisGroups are groups of servers for several tests, started when one is first needed.
type redisGroups struct {
	t         *testing.T
	sentinels *redistest.SentinelGroup
	cluster   *redistest.Cluster
	stands    int
}

// sentinel returns a stand behind Sentinels. Whoever of the two servers is the master keeps the bucket.
func (g *redisGroups) sentinel(t *testing.T, settings redisSettings) *stand {
	t.Helper()
	s := newStand(t, g.watched(settings, redistest.MasterName))
	s.server, s.proxy, s.group = g.sentinels.Master, g.sentinels.Master.Proxy(), g.sentinels
	s.keeper = func() *redistest.Server { return s.server }
	g.number(s)
	return s
}

// watched returns settings for a master of the Sentinels.
func (g *redisGroups) watched(settings redisSettings, master string) redisSettings {
	g.t.Helper()
	if g.sentinels == nil {
		g.sentinels = redistest.StartSentinels(g.t, redistest.SentinelOptions{Proxies: true})
	}
	settings.kind, settings.master = redisSentinel, master
	settings.addresses = strings.Join(g.sentinels.Addrs(), ",")
	return settings
}

// clustered returns a stand in front of a Cluster, whose bucket is on the first of its masters.
func (g *redisGroups) clustered(t *testing.T, settings redisSettings) *stand {
	t.Helper()
	if g.cluster == nil {
		g.cluster = redistest.StartCluster(g.t, redistest.ClusterOptions{Proxies: true})
	}
	settings.kind, settings.addresses = redisCluster, strings.Join(g.cluster.Addrs(), ",")
	s := newStand(t, settings)
	s.server, s.cluster, s.ups = g.cluster.Masters[0], g.cluster, 1+len(g.cluster.Masters)
	s.proxy = s.server.Proxy()
	s.keeper = func() *redistest.Server { return g.cluster.MasterOf(s.key()) }
	for g.number(s); s.keeper() != s.server; {
		g.number(s)
	}
	return s
}

// number gives a stand an identity of its own, so that it has its bucket for itself.
func (g *redisGroups) number(s *stand) {
	g.stands++
	s.id = ID{2, byte(g.stands >> 8), byte(g.stands)}
}

func onSentinels(t *testing.T, g *redisGroups) *stand { t.Helper(); return g.sentinel(t, longBudgets) }

func onCluster(t *testing.T, g *redisGroups) *stand { t.Helper(); return g.clustered(t, longBudgets) }

var sentinelStates = []serverState{
	{name: "Sentinel: healthy", start: onSentinels, normal: byRedis, sensitive: byRedis},
	{
		name: "Sentinel: none can be reached", cold: true, normal: shared, sensitive: closed, lines: unreachable,
		start: func(t *testing.T, _ *redisGroups) *stand {
			t.Helper()
			settings := shortBudgets
			settings.kind, settings.master = redisSentinel, redistest.MasterName
			settings.addresses = closedAddr(t) + "," + closedAddr(t)
			return newStand(t, settings)
		},
	},
	{
		name: "Sentinel: master unknown to them", cold: true, normal: shared, sensitive: closed, lines: unreachable,
		start: func(t *testing.T, g *redisGroups) *stand {
			t.Helper()
			return newStand(t, g.watched(shortBudgets, "another"))
		},
	},
	{
		name: "Sentinel: failover without a fault", start: onSentinels, normal: "200 or 200 share", sensitive: "200 or 503", late: -1,
		enter: func(s *stand) { s.server = s.group.Failover() }, leave: func(*stand) {}, lines: " or " + downAndUp,
	},
}

// closedAddr returns host and port where nobody listens.
func closedAddr(t *testing.T) string { return fmt.Sprint("127.0.0.1:", redistest.Port(t)) }

var clusterStates = []serverState{
	{name: "Cluster: healthy", start: onCluster, normal: byRedis, sensitive: byRedis},
	{name: "Cluster: MOVED", start: onCluster, enter: (*stand).moveSlot, normal: byRedis, sensitive: byRedis},
	{
		name: "Cluster: ASK", start: onCluster, normal: byRedis, sensitive: byRedis,
		enter: func(s *stand) {
			s.move = s.cluster.BeginMove(s.cluster.Slot(s.key()), s.cluster.Masters[1])
			s.move.MoveKeys()
		},
		leave: func(s *stand) { s.move.Finish() },
	},
	{
		name: "Cluster: ASK for a key that is not there yet", start: onCluster, cold: true, normal: byRedis, sensitive: byRedis, lines: "is up, is up, is up, is up",
		enter: func(s *stand) { s.move = s.cluster.BeginMove(s.cluster.Slot(s.key()), s.cluster.Masters[1]) },
		leave: func(s *stand) { s.move.Finish() },
	},
	{
		name: "Cluster: CLUSTERDOWN", start: onCluster, enter: (*stand).loseSlot, leave: (*stand).findSlot,
		normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "Cluster: master killed, replaced by its replica", start: onCluster, normal: shared, sensitive: closed,
		enter: func(s *stand) {
			s.awaitReplica(s.cluster.Replicas[0])
			s.server.Kill()
		},
		leave: func(s *stand) { s.cluster.AwaitFailover(s.server) }, lines: "is down, is up",
	},
}

// moveSlot moves the bucket's slot to another master.
func (s *stand) moveSlot() { s.cluster.MoveSlot(s.cluster.Slot(s.key()), s.cluster.Masters[1]) }

// loseSlot makes the bucket's master lose another slot. A node that does not know who serves it answers nobody.
func (s *stand) loseSlot() {
	s.t.Helper()
	for s.lost = 0; s.lost == s.cluster.Slot(s.key()); s.lost++ {
	}
	s.server.Do("cluster", "delslots", s.lost)
	s.awaitRefusal("CLUSTERDOWN")
}

func (s *stand) findSlot() { s.server.Do("cluster", "addslots", s.lost) }

// A Cluster that goes on without one of its slots: keys of that slot are decided here, and the masters are well, also that which
// kept it. go-redis names any node as its keeper.
func TestSlotThatNobodyServes(t *testing.T) {
	cluster := redistest.StartCluster(t, redistest.ClusterOptions{Args: []string{"--cluster-require-full-coverage", "no"}})
	settings := longBudgets
	settings.kind, settings.addresses = redisCluster, strings.Join(cluster.Addrs(), ",")
	s := newStand(t, settings)
	s.awaitRedis()
	lost := s.charge(normalZone)
	lost.ID = ID{3}
	for _, node := range slices.Concat(cluster.Masters, cluster.Replicas) {
		node.Do("cluster", "delslots", cluster.Slot(s.store.key(lost.ID)))
	}
	s.log()
	for started := time.Now(); time.Since(started) < 2*time.Second; {
		if d := s.limiter.Decide(t.Context(), []Charge{lost}); d.Source != SourceShare {
			t.Fatalf("a key of the slot: %+v", d)
		}
		kept := s.charge(normalZone)
		for kept.ID[1] = range byte(20) {
			if cluster.Slot(s.store.key(kept.ID)) == cluster.Slot(s.store.key(lost.ID)) {
				continue
			}
			if d := s.limiter.Decide(t.Context(), []Charge{kept}); d.Source != SourceRedis {
				t.Fatalf("a key of another slot: %+v", d)
			}
		}
	}
	lines := s.log()
	for _, line := range lines {
		if line != "is up" && line != "refused the script" {
			t.Errorf("said: %v", lines)
			break
		}
	}
}

// A call that was redirected goes on where its key is, also when the master that said so retires meanwhile.
func TestRedirectedCallOutlivesItsMaster(t *testing.T) {
	e := newEndpoint(t.Context(), &redisClient{settings: redisSettings{prefix: "p"}}, "a master")
	e.follow = func(ctx context.Context, _ redis.Cmder) error { return cmp.Or(ctx.Err(), errDown) }
	r := &errand{charges: []Charge{testCharge("a", 1)}, done: make(chan struct{}, 1)}
	c := &call{errands: []*errand{r}}
	c.batch.add("p", r.charges)
	e.retire()
	(&lane{endpoint: e, budget: time.Second}).follow(c)
	if <-r.done; !errors.Is(r.err, errDown) {
		t.Errorf("it was not sent: %v", r.err)
	}
}
