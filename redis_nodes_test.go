package ratelimit

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// testLife is how long an announcement holds in tests: short, and long enough for a machine under load.
const testLife = time.Second

// counter is a process that takes part in counting, without a Caddy around it.
type counter struct {
	*redisClient
	gone atomic.Bool // its configuration no longer wants to be counted
}

// join makes another process announce itself. It is gone like one that crashed when the test ends.
func join(t *testing.T, server *redistest.Server, id string) *counter {
	t.Helper()
	m := new(counter)
	m.redisClient = &redisClient{
		settings: redisSettings{network: "tcp", addresses: server.Addr(), poolSize: 8, prefix: "tollgate", timeout: time.Second, patience: time.Second},
		census:   newCensus(), held: true,
	}
	m.census.id, m.census.version, m.census.beat, m.census.life = id, "v1", testLife/10, testLife
	m.census.limits = func(*redisClient) (string, bool) { return "limits", !m.gone.Load() }
	m.announce()
	t.Cleanup(m.crash)
	return m
}

// crash ends the connections without a farewell.
func (m *counter) crash() { _ = m.Destruct() }

func believe(t *testing.T, want int64, members ...*counter) {
	t.Helper()
	for _, m := range members {
		proc.Eventually(t, fmt.Sprintf("%s believes in %d nodes", m.census.id, want), func() bool { return m.census.nodes(1) == want })
	}
}

// announced returns what stands in the list.
func announced(server *redistest.Server) (list []string) {
	found, _ := server.Do("zrange", "tollgate:nodes", 0, -1).([]any)
	for _, member := range found {
		list = append(list, fmt.Sprint(member))
	}
	slices.Sort(list)
	return list
}

func TestNodesComeAndGo(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	t.Run("inner", func(t *testing.T) {
		server := redistest.Start(t)
		a, b, c := join(t, server, "a"), join(t, server, "b"), join(t, server, "c")
		believe(t, 3, a, b, c)

		server.Do("flushall")
		for begun := time.Now(); time.Since(begun) < 2*testLife; time.Sleep(time.Millisecond) {
			if n := min(a.census.nodes(1), b.census.nodes(1), c.census.nodes(1)); n < 3 {
				t.Fatalf("after FLUSHALL a node believes in %d nodes, so its share grows", n)
			}
		}
		server.Restart()
		proc.Eventually(t, "all are back after a restart", func() bool { return len(announced(server)) == 3 })
		if n := min(a.census.nodes(1), b.census.nodes(1), c.census.nodes(1)); n != 3 {
			t.Errorf("after Redis came back empty a node believes in %d nodes", n)
		}

		begun := time.Now()
		c.crash()
		believe(t, 2, a, b)
		if took := time.Since(begun); took < testLife {
			t.Errorf("a lower number was believed after %s", took)
		}
		server.Kill()
		proc.Eventually(t, "a node finds Redis down", func() bool { return a.wireIsDown() })
		if n := a.census.nodes(1); n != 2 {
			t.Errorf("while Redis is down: %d nodes, want the last known 2", n)
		}
	})
	proc.Eventually(t, "nothing is left of the nodes", func() bool { return goleak.Find(ignore) == nil })
}

// wireIsDown says whether an announcement fails now.
func (m *counter) wireIsDown() bool {
	w := m.enter()
	defer m.leave(1)
	return w.any().Ping(context.Background()).Err() != nil
}

// One that exits leaves at once, and waits for nothing that takes long.
func TestNodeLeaves(t *testing.T) {
	server := redistest.Start(t)
	a, b := join(t, server, "a"), join(t, server, "b")
	believe(t, 2, a, b)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	b.gone.Store(true)
	b.census.farewell(ctx)
	if list := announced(server); !slices.Equal(list, []string{"a v1 limits"}) {
		t.Errorf("after b has left: %q", list)
	}
	server.Stop()
	defer server.Cont()
	ctx, cancel = context.WithTimeout(context.Background(), nodesFarewell)
	defer cancel()
	begun := time.Now()
	a.census.farewell(ctx)
	if took := time.Since(begun); took > 4*nodesFarewell {
		t.Errorf("leaving a Redis that hangs took %s", took)
	}
}

// What one process announces is one entry, whatever became of it before and whatever stands there.
func TestAnnouncementIsOneEntry(t *testing.T) {
	server := redistest.Start(t)
	a := &counter{redisClient: &redisClient{settings: redisSettings{prefix: "tollgate", network: "tcp", addresses: server.Addr(), poolSize: 2, timeout: time.Second, patience: time.Second}, census: newCensus(), held: true}}
	t.Cleanup(a.crash)
	w := a.enter()
	defer a.leave(1)
	who := announcer{client: a.redisClient, census: a.census, wire: w}
	announces := func(why, member string) {
		t.Helper()
		who.announce(member)
		if list := announced(server); !slices.Equal(list, []string{member}) {
			t.Errorf("%s: %q, want only %q", why, list, member)
		}
		for key, ttl := range server.TTLs() {
			if ttl <= 0 || ttl > nodesLife {
				t.Errorf("%s: %s has a TTL of %s", why, key, ttl)
			}
		}
	}
	proc.Eventually(t, "Redis answers", func() bool { return !a.wireIsDown() })
	announces("at first", "a v1 one")
	announces("again", "a v1 one")
	announces("other limits", "a v1 two")
	who.sent = "a v1 three" // sent, but the answer was lost
	server.Do("zadd", "tollgate:nodes", time.Now().Add(time.Second).UnixMilli(), "a v1 three")
	announces("after a lost reply", "a v1 four")
	server.Do("set", "tollgate:nodes", "another program's")
	announces("a wrong type", "a v1 four")
	server.Do("zadd", "tollgate:nodes", "+inf", "b v1 x", "-inf", "c v1 x", time.Now().Add(time.Hour).UnixMilli(), "d v1 x")
	announces("impossible times", "a v1 four")
	server.Do("persist", "tollgate:nodes")
	announces("without a TTL", "a v1 four")
	if n := a.census.believed.Load(); n != 1 {
		t.Errorf("%d nodes, want 1", n)
	}
	who.leave()
	if keys := server.Keys(); slices.Contains(keys, "tollgate:nodes") {
		t.Errorf("keys after the last has left: %q", keys)
	}
}

func TestBelievedCount(t *testing.T) {
	c := newCensus()
	start := time.Now()
	const silence = 0
	for _, step := range []struct {
		why         string
		at          int // seconds
		told, least int64
		want        int64
	}{
		{"never told", 0, silence, 4, 4},
		{"fewer than the least", 1, 2, 4, 4},
		{"as many as there are", 1, 2, 1, 2},
		{"more count at once", 2, 7, 4, 7},
		{"fewer do not", 3, 5, 4, 7},
		{"not yet", 12, 3, 4, 7},
		{"the highest of what has held", 13, 3, 4, 5},
		{"and from then on the next", 14, 3, 1, 5},
		{"as many as believed begin it anew", 20, 5, 1, 5},
		{"so this is the first", 25, 3, 1, 5},
		{"not yet", 34, 3, 1, 5},
		{"silence is no telling", 34, silence, 1, 5},
		{"an outage later", 100, 1, 1, 5},
		{"not yet", 109, 3, 1, 5},
		{"it has held", 110, 3, 1, 3},
		{"more than can be calculated with", 111, 1 << 60, 1, 1<<31 - 1},
	} {
		if step.told == silence {
			c.silence()
		} else {
			c.hear(start.Add(time.Duration(step.at)*time.Second), step.told)
		}
		if got := c.nodes(step.least); got != step.want {
			t.Errorf("second %d, %s: %d nodes, want %d", step.at, step.why, got, step.want)
		}
	}
}

// A share always admits something, and all together no more than the limit, or the largest cost of each node at once.
func TestSharesAdmitAndAddUp(t *testing.T) {
	const hour = int64(3600 * 1e6)
	for _, test := range []struct {
		rate               string
		burst, cost, nodes int64
	}{
		{"1/h", 1, 1, 10},
		{"1/h", 20, 1, 10},
		{"5/h", 5, 5, 3},
		{"60/h", 100, 25, 10},
	} {
		rate := rateFrom(t, test.rate)
		c := testCharge("api", test.burst)
		c.Limit.Num, c.Limit.Den, c.Cost, c.Floor = rate.num, rate.den, test.cost*Token, test.cost*Token
		perHour := float64(rate.num) / float64(rate.den) * float64(hour) / Token
		hours := 10 * int64(float64(test.cost*test.nodes)/perHour+1)
		var sum int64
		for range test.nodes {
			l, now := newTestLimiter(&scriptedStore{err: errDown}, test.nodes)
			here := int64(0)
			for range hours * 4 {
				here += int64(admitted(l, 3, c)) * test.cost
				*now += hour / 4
			}
			if least := int64(perHour*float64(hours)/float64(test.nodes)) - test.cost; here < least || here == 0 {
				t.Errorf("%+v: a node admitted %d tokens in %d h, want at least %d", test, here, hours, least)
			}
			sum += here
		}
		if bound := max(test.burst, test.nodes*test.cost) + int64(perHour*float64(hours)); sum > bound {
			t.Errorf("%+v: all nodes admitted %d tokens in %d h, want at most %d", test, sum, hours, bound)
		}
	}
}

func TestLimitsHash(t *testing.T) {
	zones := func(zones map[string]*Zone) string { return (&App{zones: zones}).limitsHash() }
	base := func() map[string]*Zone {
		return map[string]*Zone{"a": {Rate: rateFrom(t, "1/s")}, "b": {Rate: rateFrom(t, "2/s"), Burst: 7}}
	}
	seen := map[string]string{zones(base()): "the base"}
	if again := zones(base()); seen[again] == "" {
		t.Error("equal limits have two hashes")
	}
	written := base()
	written["a"].Burst, written["a"].Key, written["a"].IPv6Prefix = 1, "{client_ip}", new(64)
	if seen[zones(written)] == "" {
		t.Error("a default that is written out changes the hash")
	}
	for what, change := range map[string]func(m map[string]*Zone){
		"a name":       func(m map[string]*Zone) { m["c"] = m["b"]; delete(m, "b") },
		"one more":     func(m map[string]*Zone) { m["c"] = m["b"] },
		"a rate":       func(m map[string]*Zone) { m["b"].Rate = rateFrom(t, "3/s") },
		"a burst":      func(m map[string]*Zone) { m["b"].Burst = 8 },
		"a key":        func(m map[string]*Zone) { m["b"].Key = "all" },
		"a prefix":     func(m map[string]*Zone) { m["b"].IPv6Prefix = new(48) },
		"a cost":       func(m map[string]*Zone) { m["b"].Costs = []Cost{{Tokens: 2}} },
		"swapped":      func(m map[string]*Zone) { m["a"], m["b"] = m["b"], m["a"] },
		"the store":    func(m map[string]*Zone) { m["b"].Store = "memory" },
		"in an outage": func(m map[string]*Zone) { m["b"].charge.OnStoreError = PolicyFull },
	} {
		m := base()
		change(m)
		hash := zones(m)
		if other := seen[hash]; other != "" || len(hash) != 16 {
			t.Errorf("%s: hash %q, the same as of %s", what, hash, other)
		}
		seen[hash] = what
	}
}

// nodesOf asks a node for the nodes.
func nodesOf(t *testing.T, n *node.Node) nodesInfo {
	t.Helper()
	answer := n.Admin(http.MethodGet, "/rate_limit/nodes", "")
	var list []nodesInfo
	if err := json.Unmarshal([]byte(answer.Body), &list); err != nil || answer.Status != 200 || len(list) != 1 {
		t.Fatalf("GET /rate_limit/nodes: %v, %+v", err, answer)
	}
	return list[0]
}

// self returns what a node says of itself.
func (i nodesInfo) self() (self nodeInfo) {
	for _, n := range i.Nodes {
		if n.Self {
			self = n
		}
	}
	return self
}

func TestNodesAreCounted(t *testing.T) {
	redis := redistest.Start(t)
	config := func(timeout, nodes, burst string) string {
		return site("redis {$REDIS} {\n timeout "+timeout+"\n sensitive_timeout 5s\n}\nnodes "+nodes, "zone api {\n rate 1/day\n burst "+burst+"\n}")
	}
	start := config("2s", "auto 2", "90")
	nodes := startNodes(t, 3, start, redis)
	for _, n := range nodes {
		proc.Eventually(t, "all are counted", func() bool { return nodesOf(t, n).Count == 3 })
		info := nodesOf(t, n)
		if len(info.Nodes) != 3 || !info.Reachable || info.Prefix != "tollgate" || info.Redis != redis.Addr()+"/0" || info.self().Version == "" {
			t.Errorf("got %+v", info)
		}
	}
	hash := nodesOf(t, nodes[0]).self().Limits
	lists := func(why string, want int, hashes int) {
		t.Helper()
		list := announced(redis)
		seen := map[string]bool{}
		for _, member := range list {
			seen[strings.Fields(member)[2]] = true
		}
		if len(list) != want || len(seen) != hashes {
			t.Errorf("%s: %q, want %d nodes with %d hashes", why, list, want, hashes)
		}
	}

	merely := strings.NewReplacer("{$REDIS}", redis.Addr(), "{$ADMIN}", "off", "{$PORT}", "80").Replace(start)
	if message := validate(t, merely); message != "" {
		t.Error(message)
	}
	lists("after caddy validate", 3, 1)
	load := func(config string) {
		t.Helper()
		if err := nodes[0].Load(config); err != nil {
			t.Fatal(err)
		}
	}
	load(config("2s", "auto 2", "91"))
	proc.Eventually(t, "other limits have another hash", func() bool { self := nodesOf(t, nodes[0]).self(); return self.ID != "" && self.Limits != hash })
	lists("other limits", 3, 2)
	if err := nodes[0].Load(config("2s", "auto 2", "92") + "http://" + redis.Addr() + " {\n respond no\n}\n"); err == nil {
		t.Error("a configuration was accepted whose address is taken")
	}
	load(start)
	proc.Eventually(t, "the first limits are announced again", func() bool { return nodesOf(t, nodes[0]).self().Limits == hash })
	lists("as at first", 3, 1)

	load(config("2s", "3", "90"))
	proc.Eventually(t, "a node leaves that is no longer counted", func() bool { return len(announced(redis)) == 2 })
	load(start)
	proc.Eventually(t, "a node is counted again", func() bool { return len(announced(redis)) == 3 })
	conns := redis.Info("clients", "connected_clients")
	load(config("3s", "auto 2", "90"))
	proc.Eventually(t, "the old client is gone", func() bool { return redis.Info("clients", "connected_clients") == conns })
	lists("another timeout", 3, 1)
	proc.Eventually(t, "the new client has counted", func() bool { return nodesOf(t, nodes[0]).Count == 3 })

	redis.Kill()
	for i, n := range nodes {
		if got := storm(t, 40, "/", n); got[200] != 30 || got[429] != 10 {
			t.Errorf("node %d without Redis: answers by status %v, want its share of 30", i, got)
		}
		if info := nodesOf(t, n); info.Count != 3 || info.Reachable || len(info.Nodes) != 0 {
			t.Errorf("node %d without Redis: got %+v", i, info)
		}
	}
	redis.Restart()
	proc.Eventually(t, "all are back", func() bool { return len(announced(redis)) == 3 })
	nodes[2].Stop()
	lists("after one has exited", 2, 1)
	nodes[1].Kill()
	proc.Eventually(t, "one that was killed is gone", func() bool { return len(nodesOf(t, nodes[0]).Nodes) == 1 })
	if got := nodesOf(t, nodes[0]).Count; got < 2 {
		t.Errorf("a lower number counted at once: %d", got)
	}
	redis.Stop()
	begun := time.Now()
	nodes[0].Stop()
	if took := time.Since(begun); took > 2*time.Second { // the timeout is 3 s, but nobody waits for that
		t.Errorf("with a Redis that hangs, the exit took %s", took)
	}
}

// Without a Redis nobody was counted: the number of the configuration holds, and the end does not wait for it.
func TestNodesNeverCounted(t *testing.T) {
	n := node.Start(t, site("redis 127.0.0.1:"+strconv.Itoa(proc.Port(t))+"\nnodes auto 2", "zone api {\n rate 1/h\n burst 4\n}"))
	if got := storm(t, 30, "/", n); got[200] != 2 || got[429] != 28 {
		t.Errorf("answers by status %v, want the share of 2", got)
	}
	if info := nodesOf(t, n); info.Count != 0 || info.Reachable {
		t.Errorf("got %+v", info)
	}
	begun := time.Now()
	if code := n.Stop(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	t.Logf("exit took %s", time.Since(begun))
	for _, line := range n.Logs() {
		if line["level"] == "error" {
			t.Errorf("an ERROR line: %v", line)
		}
	}
}
