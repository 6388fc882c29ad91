package redistest

import (
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestSentinelsFailOverWhenTheMasterDies(t *testing.T) {
	t.Parallel()
	g := StartSentinels(t, SentinelOptions{})
	client := failoverClient(t, &redis.FailoverOptions{SentinelAddrs: g.Addrs()})
	if err := client.Set(t.Context(), "a", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if got := g.Master.Do("wait", 1, 5000); got != int64(1) {
		t.Fatalf("replicas that have it: got %v, want 1", got)
	}
	g.Master.Kill()
	if master := g.AwaitFailover(g.Master); master != g.Replica {
		t.Fatalf("the new master is on %s, want the replica on %s", master.Addr(), g.Replica.Addr())
	}
	if got := g.Replica.Do("set", "b", "y"); got != "OK" {
		t.Errorf("a write to the new master: got %v", got)
	}
	if got := g.Replica.Keys(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("keys: got %v, want those of the old master and a new one", got)
	}
}

func TestSentinelsFailOverWhenTheMasterHangs(t *testing.T) {
	t.Parallel()
	g := StartSentinels(t, SentinelOptions{})
	g.Sentinels[2].Kill() // two are enough
	g.Master.Stop()
	if master := g.AwaitFailover(g.Master); master != g.Replica {
		t.Fatalf("the new master is on %s, want the replica on %s", master.Addr(), g.Replica.Addr())
	}
	g.Master.Cont()
}

func TestSentinelsFailOverThereAndBackWithPasswords(t *testing.T) {
	t.Parallel()
	g := StartSentinels(t, SentinelOptions{
		Args:         []string{"--requirepass", "data"},
		SentinelArgs: []string{"--requirepass", "watch"},
	})
	if master := g.Failover(); master != g.Replica {
		t.Fatalf("the new master is on %s, want the replica on %s", master.Addr(), g.Replica.Addr())
	}
	if master := g.Failover(); master != g.Master {
		t.Fatalf("the next master is on %s, want the first one on %s", master.Addr(), g.Master.Addr())
	}
	with := &redis.FailoverOptions{SentinelAddrs: g.Addrs(), SentinelPassword: "watch", Password: "data"}
	if err := failoverClient(t, with).Set(t.Context(), "a", "x", 0).Err(); err != nil {
		t.Errorf("with both passwords: %v", err)
	}
	without := &redis.FailoverOptions{SentinelAddrs: g.Addrs(), Password: "data"}
	if err := failoverClient(t, without).Ping(t.Context()).Err(); err == nil {
		t.Error("without the password of the Sentinels: no error")
	}
}

func TestSentinelsNameProxies(t *testing.T) {
	t.Parallel()
	g := StartSentinels(t, SentinelOptions{Proxies: true})
	address, _ := g.Sentinels[0].Do("sentinel", "get-master-addr-by-name", MasterName).([]any)
	if host, port := splitAddr(g.Master.Proxy().Addr()); !slices.Equal(address, []any{host, port}) {
		t.Errorf("master: got %v, want the proxy's %s", address, g.Master.Proxy().Addr())
	}
	client := failoverClient(t, &redis.FailoverOptions{SentinelAddrs: g.Addrs()})
	before := g.Master.Proxy().Requests()
	if err := client.Set(t.Context(), "a", "x", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if g.Master.Proxy().Requests() == before {
		t.Error("nothing came through the master's proxy")
	}
	if master := g.Failover(); master != g.Replica {
		t.Fatalf("the new master is on %s, want the replica on %s", master.Addr(), g.Replica.Addr())
	}
	address, _ = g.Sentinels[0].Do("sentinel", "get-master-addr-by-name", MasterName).([]any)
	if host, port := splitAddr(g.Replica.Proxy().Addr()); !slices.Equal(address, []any{host, port}) {
		t.Errorf("new master: got %v, want the proxy's %s", address, g.Replica.Proxy().Addr())
	}
}

func TestRestartedSentinelKnowsWhatItKnew(t *testing.T) {
	t.Parallel()
	g := StartSentinels(t, SentinelOptions{SentinelArgs: []string{"--requirepass", "watch", "--user", "bob", "on", ">pw", "+@all"}})
	g.Sentinels[0].Restart()
	if got := g.named(); got != g.Master {
		t.Errorf("the Sentinels name %v, want the master on %s", got, g.Master.Addr())
	}
}

func failoverClient(t *testing.T, options *redis.FailoverOptions) *redis.Client {
	t.Helper()
	options.MasterName = MasterName
	client := redis.NewFailoverClient(options)
	t.Cleanup(func() { client.Close() })
	return client
}
