//go:build redis

package ratelimit

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// The permissions in the docs suffice on a Cluster, with the two that they name for it, also while a slot moves.
func TestHeavyPermissionsOnCluster(t *testing.T) {
	acl := append(documentedACL(t, "acl"), "+cluster|slots", "+asking")
	cluster := redistest.StartCluster(t, redistest.ClusterOptions{Args: append([]string{"--user", "tollgate"}, acl...)})
	settings := clusterSettings(cluster, time.Second, time.Second)
	settings.username, settings.password = "tollgate", "password"
	nodes := peers(t, 1, settings)
	c := testCharge("api", 1e6)
	awaitRedis(t, nodes, c.ID)
	key := redisKeyOf(c.ID)
	from := cluster.MasterOf(key)
	to := cluster.Masters[0]
	if to == from {
		to = cluster.Masters[1]
	}
	move := cluster.BeginMove(cluster.Slot(key), to)
	move.MoveKeys()
	for range 5 { // ASK
		if d := nodes[0].Decide(context.Background(), []Charge{c}); d.Source != SourceRedis {
			t.Errorf("got %+v", d)
		}
	}
	move.Finish()
	for range 5 {
		nodes[0].Decide(context.Background(), []Charge{c})
	}
	for _, s := range slices.Concat(cluster.Masters, cluster.Replicas) {
		if denied := deniedBy(s); len(denied) > 0 {
			t.Errorf("denied: %s", denied)
		}
	}
}

// The same for a user of the Sentinels themselves.
func TestHeavyPermissionsOfSentinels(t *testing.T) {
	acl := documentedACL(t, "acl-sentinel")
	group := redistest.StartSentinels(t, redistest.SentinelOptions{})
	for _, s := range group.Sentinels {
		s.Do(append([]any{"acl", "setuser", "tollgate"}, anys(acl)...)...)
	}
	settings := sentinelSettings(group, time.Second, time.Second)
	settings.sentinelUsername, settings.sentinelPassword = "tollgate", "password"
	nodes := peers(t, 1, settings)
	c := testCharge("api", 1e6)
	awaitRedis(t, nodes, c.ID)
	group.Failover()
	proc.Eventually(t, "the new master decides", func() bool {
		return nodes[0].Decide(context.Background(), []Charge{c}).Source == SourceRedis
	})
	for _, s := range group.Sentinels {
		if denied := deniedBy(s); len(denied) > 0 {
			t.Errorf("denied: %s", denied)
		}
	}
}

func anys(words []string) (list []any) {
	for _, word := range words {
		list = append(list, word)
	}
	return list
}
