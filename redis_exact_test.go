package ratelimit

import (
	"context"
	"encoding/binary"
	"maps"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Nodes behind Sentinels and on a Cluster are as exact together as on one Redis.

// exactly is what 600 decisions come to of which so many are allowed, all by Redis.
func exactly(allowed int) map[ending]int {
	want := map[ending]int{{ReasonLimited, SourceRedis}: 600 - allowed}
	if allowed > 0 {
		want[ending{ReasonNone, SourceRedis}] = allowed
	}
	return want
}

func wantExactly(t *testing.T, nodes []*Limiter, allowed int, charges ...Charge) {
	t.Helper()
	if got := rush(nodes, 600, charges...); !maps.Equal(got, exactly(allowed)) {
		t.Errorf("decisions by reason and source %v, want %v", got, exactly(allowed))
	}
}

// ofID returns a charge of an identity, which strikes but is never blocked.
func ofID(id ID, zone string, burst int64) Charge {
	c := testCharge(zone, burst)
	c.ID = id
	c.Penalty = &penaltyRules{after: maxStrikes - 1, base: 60e6, max: 3600e6, window: 3600e6}
	return c
}

// left returns how many tokens an identity has in a zone, as a request that takes one finds them.
func left(t *testing.T, node *Limiter, c Charge) int64 {
	t.Helper()
	d := node.Decide(context.Background(), []Charge{c})
	if !d.Allowed || d.Source != SourceRedis {
		t.Errorf("got %+v", d)
	}
	return d.Remaining + 1
}

// strikesOf returns how many strikes a server has of an identity.
func strikesOf(server *redistest.Server, id ID) int {
	record, _ := server.Do("hget", redisKeyOf(id), "p").(string)
	if len(record) != 17 {
		return 0
	}
	return int(binary.BigEndian.Uint16([]byte(record[1:])))
}

func TestExactThroughSentinel(t *testing.T) {
	t.Parallel()
	g := redistest.StartSentinels(t, redistest.SentinelOptions{})
	nodes := peers(t, 3, sentinelSettings(g, 5*time.Second, 5*time.Second))
	awaitRedis(t, nodes, ID{1})
	wantExactly(t, nodes, 100, ofID(ID{1}, "api", 100))
	seven := ofID(ID{1}, "seven", 100)
	seven.Cost = 7 * Token
	wantExactly(t, nodes, 14, seven)

	address, global := ofID(ID{2}, "address", 100), ofID(ID{3}, "global", 50)
	wantExactly(t, nodes, 50, address, global)
	if got := left(t, nodes[0], address); got != 50 {
		t.Errorf("%d tokens left of the address, want 50: what the other zone refuses is not paid", got)
	}
	if got := strikesOf(g.Master, global.ID); got != 550 {
		t.Errorf("%d strikes for 550 refusals", got)
	}
}

func TestExactThroughCluster(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, redistest.ClusterOptions{})
	ids := idsApart(c)
	nodes := peers(t, 3, clusterSettings(c, 5*time.Second, 5*time.Second))
	awaitRedis(t, nodes, ids...)
	wantExactly(t, nodes, 100, ofID(ids[0], "api", 100))
	seven := ofID(ids[1], "seven", 100)
	seven.Cost = 7 * Token
	wantExactly(t, nodes, 14, seven)
}

// Two zones on two masters cannot be asked in one step, and yet both are paid or none is. The one that is asked second never
// strikes: what it lacks, somebody may be about to give back.
func TestExactOverTwoMasters(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, redistest.ClusterOptions{})
	ids := idsApart(c)
	address, global := ofID(ids[1], "address", 200), ofID(ids[2], "global", 50)
	nodes := peers(t, 3, clusterSettings(c, 5*time.Second, 5*time.Second))
	awaitRedis(t, nodes, ids...)
	wantExactly(t, nodes, 50, address, global)
	if got := left(t, nodes[1], address); got != 150 {
		t.Errorf("%d tokens left of the address, want 150: what the other zone refused was given back", got)
	}
	if got := strikesOf(c.MasterOf(redisKeyOf(global.ID)), global.ID); got != 0 {
		t.Errorf("%d strikes by the zone that was asked second", got)
	}
	if got := strikesOf(c.MasterOf(redisKeyOf(address.ID)), address.ID); got != 0 {
		t.Errorf("%d strikes of the address, which had tokens for all clients at every moment", got)
	}

	rush(nodes, 149, address)
	wantExactly(t, nodes, 0, address, global)
	if got := strikesOf(c.MasterOf(redisKeyOf(address.ID)), address.ID); got != 600 {
		t.Errorf("%d strikes for 600 refusals by the zone that was asked first", got)
	}
	if got := strikesOf(c.MasterOf(redisKeyOf(global.ID)), global.ID); got != 0 {
		t.Errorf("%d strikes by the zone that was asked second", got)
	}
}
