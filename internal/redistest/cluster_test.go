package redistest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

func TestClusterServesEveryKey(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{})
	client := clusterClient(t, &redis.ClusterOptions{Addrs: c.Addrs()})
	served := make(map[*Server]bool)
	for i := range 30 {
		key := fmt.Sprint("key", i)
		if err := client.Set(t.Context(), key, i, 0).Err(); err != nil {
			t.Fatalf("set %s: %v", key, err)
		}
		master := c.MasterOf(key)
		if !slices.Contains(c.Masters, master) {
			t.Errorf("%s is served by %s, which is no master", key, master.Addr())
		}
		if got := master.Do("get", key); got != fmt.Sprint(i) {
			t.Errorf("get %s: got %v, want %d", key, got, i)
		}
		served[master] = true
	}
	if len(served) != 3 {
		t.Errorf("%d masters have keys, want all 3", len(served))
	}
}

func TestClusterReplacesAMasterThatDies(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{Args: []string{"--requirepass", "secret"}})
	client := clusterClient(t, &redis.ClusterOptions{Addrs: c.Addrs(), Password: "secret"})
	old := c.MasterOf("a")
	old.Do("set", "a", "x")
	old.Do("wait", 1, 5000)
	old.Kill()
	master := c.AwaitFailover(old)
	if want := c.Replicas[slices.Index(c.Masters, old)]; master != want || c.MasterOf("a") != want {
		t.Fatalf("the new master is on %s, want the replica on %s", master.Addr(), want.Addr())
	}
	if got, err := client.Get(t.Context(), "a").Result(); err != nil || got != "x" {
		t.Errorf("get: got %q, error %v; want what the old master had", got, err)
	}
	old.Restart()
	if got := c.MasterOf("a"); got != master {
		t.Errorf("after the old master came back, %s has the slot, want still %s", got.Addr(), master.Addr())
	}
}

func TestClusterReplacesAMasterThatHangs(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{})
	c.Masters[1].Stop()
	if master := c.AwaitFailover(c.Masters[1]); master != c.Replicas[1] {
		t.Errorf("the new master is on %s, want the replica on %s", master.Addr(), c.Replicas[1].Addr())
	}
	c.Masters[1].Cont()
}

func TestClusterHandsOverOnRequest(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{})
	c.Replicas[0].Do("cluster", "failover")
	if master := c.AwaitFailover(c.Masters[0]); master != c.Replicas[0] {
		t.Errorf("the new master is on %s, want the replica on %s", master.Addr(), c.Replicas[0].Addr())
	}
}

func TestClusterAsksWhileASlotMoves(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{Args: []string{"--requirepass", "secret"}})
	client := clusterClient(t, &redis.ClusterOptions{Addrs: c.Addrs(), Password: "secret"})
	from := c.MasterOf("{a}")
	to := c.Masters[(slices.Index(c.Masters, from)+1)%3]
	from.Do("set", "{a}old", "x")

	move := c.BeginMove(c.Slot("{a}"), to)
	if got := from.Do("get", "{a}old"); got != "x" {
		t.Errorf("a key that is still there: got %v, want x", got)
	}
	if _, err := from.try("get", "{a}new"); err == nil || !strings.HasPrefix(err.Error(), "ASK ") {
		t.Errorf("a key that is not there: got %v, want ASK", err)
	}
	move.MoveKeys()
	if _, err := from.try("get", "{a}old"); err == nil || !strings.HasPrefix(err.Error(), "ASK ") {
		t.Errorf("a key that has moved: got %v, want ASK", err)
	}
	if got, err := client.Get(t.Context(), "{a}old").Result(); err != nil || got != "x" {
		t.Errorf("a client that follows ASK: got %q, error %v; want x", got, err)
	}
	if got := c.MasterOf("{a}"); got != from {
		t.Errorf("half way the slot is served by %s, want %s", got.Addr(), from.Addr())
	}

	move.Finish()
	if got := c.MasterOf("{a}"); got != to {
		t.Errorf("the slot is served by %s, want %s", got.Addr(), to.Addr())
	}
	if _, err := from.try("get", "{a}old"); err == nil || !strings.HasPrefix(err.Error(), "MOVED ") {
		t.Errorf("the old master: got %v, want MOVED", err)
	}
	if got := to.Do("get", "{a}old"); got != "x" {
		t.Errorf("the new master: got %v, want x", got)
	}
	c.MoveSlot(c.Slot("{a}"), from)
	if got := from.Do("get", "{a}old"); got != "x" {
		t.Errorf("back again: got %v, want x", got)
	}
}

func TestClusterNamesProxies(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{Proxies: true})
	for _, part := range slotTable(c.Replicas[0]) {
		for _, address := range part.nodes {
			if announcedAs(c.nodes(), address) == nil {
				t.Errorf("the cluster names %v, want the address of a proxy", address)
			}
		}
	}
	seed := c.Masters[0].Proxy().Addr()
	client := clusterClient(t, &redis.ClusterOptions{Addrs: []string{seed}})
	for i := range 10 {
		key := fmt.Sprint("key", i)
		before := c.MasterOf(key).Proxy().Requests()
		if err := client.Set(t.Context(), key, i, 0).Err(); err != nil {
			t.Fatalf("set %s: %v", key, err)
		}
		if c.MasterOf(key).Proxy().Requests() == before {
			t.Errorf("set %s did not come through its master's proxy", key)
		}
	}
}

func TestClusterWithoutFullCoverage(t *testing.T) {
	t.Parallel()
	c := StartCluster(t, ClusterOptions{Args: []string{
		"--cluster-require-full-coverage", "no", "--cluster-replica-no-failover", "yes",
	}})
	here, there := c.MasterOf("a"), c.MasterOf("b")
	if here == there {
		t.Fatal("two keys of one master do not show anything")
	}
	there.Kill()
	proc.Eventually(t, "the cluster knows that slots are lost", func() bool {
		info, _ := here.Do("cluster", "info").(string)
		return !strings.Contains(info, "cluster_slots_fail:0\r\n")
	})
	if got := here.Do("set", "a", "x"); got != "OK" {
		t.Errorf("a key of a master that lives: got %v", got)
	}
}

func clusterClient(t *testing.T, options *redis.ClusterOptions) *redis.ClusterClient {
	t.Helper()
	options.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	client := redis.NewClusterClient(options)
	t.Cleanup(func() { client.Close() })
	return client
}
