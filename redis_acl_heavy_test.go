//go:build redis

package ratelimit

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// The permissions in the docs suffice on a Cluster, and those that it needs beyond one Redis are needed, also while a slot moves.
func TestHeavyPermissionsOnCluster(t *testing.T) {
	alone, acl := documentedACL(t, "acl"), documentedACL(t, "acl-cluster")
	if !slices.Equal(acl, append(slices.Clone(alone), "+cluster|slots", "+asking")) {
		t.Fatalf("not what one Redis needs and two commands more: %q", acl)
	}
	cluster := redistest.StartCluster(t, redistest.ClusterOptions{})
	servers := slices.Concat(cluster.Masters, cluster.Replicas)
	setUser(servers, acl)
	p := startPermitted(t, "cluster\n address "+cluster.Addrs()[0], cluster.Masters, cluster.Replicas)
	p.suffices(t)

	settings := clusterSettings(cluster, time.Second, time.Second)
	settings.username, settings.password = "tollgate", "password"
	nodes := peers(t, 1, settings)
	c := testCharge("api", 1e6)
	awaitRedis(t, nodes, c.ID)
	moves := func() {
		move := cluster.BeginMove(cluster.Slot(redisKeyOf(c.ID)), anotherMaster(cluster, redisKeyOf(c.ID)))
		move.MoveKeys()
		for range 5 { // ASK
			nodes[0].Decide(context.Background(), []Charge{c})
		}
		move.Finish()
		awaitRedis(t, nodes, c.ID) // MOVED
	}
	moves()
	if denied := p.denied(); len(denied) > 0 {
		t.Errorf("denied while a slot moves: %s", denied)
	}
	setUser(servers, append(slices.Clone(alone), "+cluster|slots"))
	moves()
	if denied := p.denied(); !slices.Contains(denied, "asking") {
		t.Errorf("without ASKING: denied %s", denied)
	}
	setUser(servers, append(slices.Clone(alone), "+asking"))
	peers(t, 1, settings)[0].Decide(context.Background(), []Charge{c})
	proc.Eventually(t, "CLUSTER SLOTS is missed", func() bool { return slices.Contains(p.denied(), "cluster|slots") })
}

func anotherMaster(c *redistest.Cluster, key string) *redistest.Server {
	keeper := c.MasterOf(key)
	return c.Masters[slices.IndexFunc(c.Masters, func(s *redistest.Server) bool { return s != keeper })]
}

// The same behind Sentinels, for the user of Redis and for the one of the Sentinels themselves.
func TestHeavyPermissionsOfSentinels(t *testing.T) {
	acl := documentedACL(t, "acl-sentinel")
	group := redistest.StartSentinels(t, redistest.SentinelOptions{})
	setUser([]*redistest.Server{group.Master, group.Replica}, documentedACL(t, "acl"))
	setUser(group.Sentinels, acl)
	options := "address " + strings.Join(group.Addrs(), " ") + "\n master_name " + redistest.MasterName + "\n sentinel_username tollgate\n sentinel_password password"
	p := startPermitted(t, options, []*redistest.Server{group.Master}, append(slices.Clone(group.Sentinels), group.Replica))
	p.suffices(t)

	master := group.Failover()
	p.masters, p.watching = []*redistest.Server{master}, append(slices.Clone(group.Sentinels), group.Master)
	before := master.Calls("evalsha")
	proc.Eventually(t, "the new master decides", func() bool {
		_, _ = p.node.Try("GET", "/", "", "X-Key: again")
		return master.Calls("evalsha") > before
	})
	p.suffices(t)
	p.needs(t, group.Sentinels, acl, 5*time.Second)
}

// Who has nothing to do keeps as many connections to each server of a Cluster as the docs say, to replicas, too.
func TestHeavyConnectionsToCluster(t *testing.T) {
	cluster := redistest.StartCluster(t, redistest.ClusterOptions{})
	nodes := peers(t, 1, clusterSettings(cluster, time.Second, time.Second))
	awaitRedis(t, nodes, idsApart(cluster)...)
	for _, server := range slices.Concat(cluster.Masters, cluster.Replicas) {
		rests(t, server)
	}
}
