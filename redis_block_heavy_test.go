//go:build redis

package ratelimit

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Blocks over failovers that lose them.

// replicated is a master with a replica, behind proxies.
type replicated struct {
	master, replica *redistest.Server
	await           func() // until the replica has replaced the master
}

func replicatedBySentinels(t *testing.T) (replicated, redisSettings) {
	g := redistest.StartSentinels(t, redistest.SentinelOptions{Proxies: true})
	pair := replicated{g.Master, g.Replica, func() { g.AwaitFailover(g.Master) }}
	return pair, sentinelSettings(g, 300*time.Millisecond, 600*time.Millisecond)
}

func replicatedInCluster(t *testing.T) (replicated, redisSettings) {
	c := redistest.StartCluster(t, redistest.ClusterOptions{Proxies: true, Args: []string{"--cluster-require-full-coverage", "no"}})
	master := c.MasterOf(redisKeyOf(ID{1}))
	pair := replicated{master, replicaOf(c, master), func() { c.AwaitFailover(master) }}
	return pair, clusterSettings(c, 300*time.Millisecond, 600*time.Millisecond)
}

// part ends replication: the replica, which asks for the rest after its connection broke, gets no answer.
func (r *replicated) part(t *testing.T) {
	t.Helper()
	r.master.Proxy().DropRepliesTo("psync")
	r.replica.Do("client", "kill", "type", "master")
	proc.Eventually(t, "the replica has no master", func() bool {
		return r.replica.Info("replication", "master_link_status") == "down"
	})
}

// blockWatch is what a blocked client sees.
type blockWatch struct {
	mu      sync.Mutex
	freed   time.Time // when it was first not blocked
	answers int
	grown   time.Duration // the most by which the end of the block moved away
}

// watchBlock asks for a decision again and again until one is no block.
func watchBlock(ctx context.Context, node *Limiter, c Charge) *blockWatch {
	w := new(blockWatch)
	var end time.Time
	go func() {
		pace := time.NewTicker(5 * time.Millisecond)
		defer pace.Stop()
		for ; ctx.Err() == nil; <-pace.C {
			d := node.Decide(context.Background(), []Charge{c})
			w.mu.Lock()
			if d.Reason != ReasonBlocked {
				w.freed = time.Now()
				w.mu.Unlock()
				return
			}
			w.answers++
			until := time.Now().Add(d.RetryAfter)
			if end.IsZero() {
				end = until
			}
			w.grown = max(w.grown, until.Sub(end))
			w.mu.Unlock()
		}
	}()
	return w
}

func (w *blockWatch) over() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.freed.IsZero()
}

// blocked makes a client be blocked, and returns until when.
func blocked(t *testing.T, node *Limiter, c Charge) (until time.Time) {
	t.Helper()
	for range 3 {
		d := node.Decide(context.Background(), []Charge{c})
		if d.Source != SourceRedis {
			t.Fatalf("got %+v", d)
		}
		if d.BlockStarted {
			return time.Now().Add(d.RetryAfter)
		}
	}
	t.Fatal("three requests and no block")
	return time.Time{}
}

func TestHeavyBlockOutlivesTheFailoverThatLostIt(t *testing.T) {
	for name, start := range map[string]func(*testing.T) (replicated, redisSettings){
		"Sentinel": replicatedBySentinels, "Cluster": replicatedInCluster,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pair, settings := start(t)
			nodes := peers(t, 2, settings)
			awaitRedis(t, nodes, ID{1})
			c := testCharge("login", 1)
			c.Limit = Limit{Num: 1, Den: 1, Burst: Token}
			c.Penalty = &penaltyRules{after: 0, base: 14e6, max: 14e6, window: 60e6}
			checkLostBlock(t, &pair, nodes, c)
		})
	}
}

func checkLostBlock(t *testing.T, pair *replicated, nodes []*Limiter, c Charge) {
	pair.part(t)
	until := blocked(t, nodes[0], c)
	client := watchBlock(t.Context(), nodes[0], c)
	pair.master.Kill()
	pair.await()
	known := time.Now()
	if pair.replica.Do("hget", redisKeyOf(c.ID), "p") != nil {
		t.Log("the block was set again before the test could see that it was lost")
	}
	proc.Eventually(t, "the block is in Redis again", func() bool { return pair.replica.Do("hget", redisKeyOf(c.ID), "p") != nil })
	t.Logf("set again %.2f s after the new master was known", time.Since(known).Seconds())
	if time.Since(known) > 6*time.Second {
		t.Error("want that within the 5 s after which a node asks again")
	}
	var rest time.Duration
	proc.Eventually(t, "the other node decides by Redis", func() bool {
		d := nodes[1].Decide(context.Background(), []Charge{c})
		rest = d.RetryAfter
		return d.Source == SourceRedis && d.Reason == ReasonBlocked
	})
	if moved := time.Until(until) - rest; moved.Abs() > 300*time.Millisecond {
		t.Errorf("the block on the other node ends %s from where it did", moved)
	}
	proc.Eventually(t, "the block ends", client.over)
	late := client.freed.Sub(until)
	t.Logf("blocked for %d requests, freed %s from the end; the end moved by at most %s", client.answers, late.Round(time.Millisecond), client.grown.Round(time.Millisecond))
	if late < -20*time.Millisecond || client.grown > 300*time.Millisecond {
		t.Errorf("freed %s from the end, which moved by %s", late, client.grown)
	}
}
