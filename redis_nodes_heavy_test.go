//go:build redis

package ratelimit

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// Sentinels and Clusters as users meet them: by Caddys in processes of their own, and their Caddyfiles.

// fleet is several Redis that stand for one.
type fleet struct {
	redis   string // the redis block's address and options but for timeouts
	servers []*redistest.Server
	// pairOf returns who keeps a key, and what replaces him if he dies.
	pairOf func(key string) replicated
}

var fleets = map[string]func(t *testing.T, proxies bool) fleet{
	"Sentinel": func(t *testing.T, proxies bool) fleet {
		g := redistest.StartSentinels(t, redistest.SentinelOptions{Proxies: proxies})
		return fleet{
			redis: "redis " + strings.Join(g.Addrs(), " ") + " {\n master_name " + redistest.MasterName, servers: []*redistest.Server{g.Master},
			pairOf: func(string) replicated { return replicated{g.Master, g.Replica, func() { g.AwaitFailover(g.Master) }} },
		}
	},
	"Cluster": func(t *testing.T, proxies bool) fleet {
		c := redistest.StartCluster(t, redistest.ClusterOptions{Proxies: proxies, Args: []string{"--cluster-require-full-coverage", "no"}})
		return fleet{
			redis: "redis " + c.Addrs()[0] + " {\n cluster", servers: c.Masters,
			pairOf: func(key string) replicated {
				master := c.MasterOf(key)
				return replicated{master, replicaOf(c, master), func() { c.AwaitFailover(master) }}
			},
		}
	},
}

// start starts nodes whose decisions may take so long.
func (b *fleet) start(t *testing.T, n int, timeout time.Duration, zones string) []*node.Node {
	t.Helper()
	nodes := make([]*node.Node, n)
	for i := range nodes {
		nodes[i] = node.Start(t, site(fmt.Sprintf("%s\n timeout %s\n sensitive_timeout %s\n}\nkey_secret test\nnodes %d", b.redis, timeout, 2*timeout, n), zones))
	}
	return nodes
}

// identities returns the keys of identities, by server.
func (b *fleet) identities() map[string]*redistest.Server {
	found := map[string]*redistest.Server{}
	for _, server := range b.servers {
		for _, key := range server.Keys() {
			if strings.HasSuffix(key, "}") && !strings.Contains(key, "{probe") {
				found[key] = server
			}
		}
	}
	return found
}

// known returns the key that a request leaves, and who keeps it.
func (b *fleet) known(t *testing.T, request func()) (key string, keeper *redistest.Server) {
	t.Helper()
	before := b.identities()
	request()
	for key, keeper := range b.identities() {
		if before[key] == nil {
			return key, keeper
		}
	}
	t.Fatal("a request left no key")
	return "", nil
}

// apart returns a path below /other that is counted by another server than the address of the client is, if there are several.
func (b *fleet) apart(t *testing.T, n *node.Node) string {
	t.Helper()
	_, address := b.known(t, func() { n.Get("/") })
	for i := 0; ; i++ {
		path := fmt.Sprintf("/other%d", i)
		if _, keeper := b.known(t, func() { n.Get(path) }); keeper != address || len(b.servers) == 1 {
			return path
		}
	}
}

func TestHeavyCaddysAreExact(t *testing.T) {
	for name, start := range fleets {
		t.Run(name, func(t *testing.T) {
			b := start(t, false)
			nodes := b.start(t, 3, 5*time.Second, `
				zone address {
					match not path /cost
					rate 1/h
					burst 200
				}
				zone cost {
					match path /cost
					rate 1/h
					burst 100
					cost 7
				}
				zone path {
					match path /other*
					key {path}
					rate 1/h
					burst 50
				}`)
			path := b.apart(t, nodes[0])
			for _, server := range b.servers {
				server.Do("flushall")
			}
			want := func(path string, allowed int) {
				t.Helper()
				expected := map[int]int{200: allowed, 429: 600 - allowed}
				if got := storm(t, 600, path, nodes...); !maps.Equal(got, expected) {
					t.Errorf("%s: answers by status %v, want %v", path, got, expected)
				}
			}
			want(path, 50)
			if left := nodes[1].Get("/").Header.Get("X-RateLimit-Remaining"); left != "149" {
				t.Errorf("%s of 200 left of the address after 50 requests and this one, want 149", left)
			}
			want("/", 149)
			want("/cost", 14)
			for _, server := range b.servers {
				if len(server.Keys()) > 0 {
					checkKeys(t, server, 201*time.Hour, "127.0.0.1", "other")
				}
			}
		})
	}
}

// failoverZones are the limits of the routes.
var failoverZones = fmt.Sprintf(`
	zone api {
		match path /api
		rate %d/s
		burst %d
	}
	zone login {
		match path /login
		rate 10000/s
		sensitive
	}
	zone other {
		match path /other*
		key {path}
		rate 1/h
		burst %d
	}`, apiRate, apiBurst, otherBurst)

func TestHeavyCaddysFailOver(t *testing.T) {
	for name, start := range fleets {
		for _, signal := range []string{"killed", "stopped"} {
			t.Run(name+" "+signal, func(t *testing.T) {
				b := start(t, false)
				nodes := b.start(t, 3, 400*time.Millisecond, failoverZones)
				key, _ := b.known(t, func() { nodes[0].Get("/api") })
				pair := b.pairOf(key)
				f := failover{nodes: 3, routes: []string{routeAPI, routeLogin}, replaced: pair.await, fail: pair.master.Kill, settled: nothing}
				if signal == "stopped" {
					f.fail, f.settled = pair.master.Stop, pair.master.Cont
				}
				paths := map[string]string{routeAPI: "/api", routeLogin: "/login"}
				if len(b.servers) > 1 {
					f.routes, paths[routeOther] = append(f.routes, routeOther), b.otherThan(t, nodes[0], pair.master)
				}
				f.ask = func(n int, route string) int {
					answer, err := nodes[n].Try(http.MethodGet, paths[route], "")
					if err != nil {
						return 0
					}
					return answer.Status
				}
				l := newTimeline()
				failed, known := l.watch(t, &f)
				l.check(t, failed, known)
				if path := paths[routeOther]; path != "" {
					checkOther(t, l, nodes, path)
				}
				checkChanges(t, nodes, len(b.servers))
			})
		}
	}
}

// otherThan returns a path that another server counts.
func (b *fleet) otherThan(t *testing.T, n *node.Node, server *redistest.Server) string {
	t.Helper()
	for i := 0; ; i++ {
		path := fmt.Sprintf("/other%d", i)
		if _, keeper := b.known(t, func() { n.Get(path) }); keeper != server {
			return path
		}
	}
}

// checkOther holds that exactly the burst of other was admitted: during the failover, before it once, and now.
func checkOther(t *testing.T, l *timeline, nodes []*node.Node, path string) {
	t.Helper()
	during := len(l.from(0, routeOther, 200))
	rest := storm(t, otherBurst-during+60, path, nodes...)
	if got := 1 + during + rest[200]; got != otherBurst || rest[200] == 0 {
		t.Errorf("%d admitted of %d: %d during the failover, then %v", got, otherBurst, during, rest)
	}
}

// checkChanges holds that each node has logged that one server went down, and each change in one line.
func checkChanges(t *testing.T, nodes []*node.Node, masters int) {
	t.Helper()
	for _, n := range nodes {
		down, lines := n.LogLines("redis is down"), n.LogLines(`"rate_limit.redis"`)
		t.Logf("%d lines about Redis, %d of them that it is down", lines, down)
		most := 3 // up, down, up again
		if masters > 1 {
			most = 1 + masters + 3 // the way to the Cluster, its masters, down, the new one up, the old one up if it was only stopped
		}
		if down != 1 || lines > most {
			t.Errorf("%d lines about Redis, %d of them that it is down; want at most %d and 1", lines, down, most)
		}
	}
}

// A block holds on the node that knows of it when a failover loses it, is in Redis again soon, and an operator lifts it at any
// other node.
func TestHeavyCaddysKeepAndLiftBlocks(t *testing.T) {
	for name, start := range fleets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, true)
			nodes := b.start(t, 2, 400*time.Millisecond, "penalty {\n after 0\n base 30m\n}\nzone login {\n key {header.X-Client}\n rate 20/s\n burst 3\n}")
			get := func(n int) string { return reasons(nodes[n], 1, "/", "X-Client: bad") }
			key, _ := b.known(t, func() { get(0) })
			pair := b.pairOf(key)
			pair.part(t)
			proc.Eventually(t, "the client is blocked", func() bool { return get(0) == "blocked" })
			pair.master.Kill()
			pair.await()
			known := time.Now()
			if got := get(0); got != "blocked" {
				t.Errorf("on the node that knows: %s", got)
			}
			proc.Eventually(t, "the block is in Redis again", func() bool {
				if got := get(0); got != "blocked" {
					t.Fatalf("on the node that knows: %s", got)
				}
				return pair.replica.Do("hget", key, "p") != nil
			})
			t.Logf("set again %.2f s after the new master was known", time.Since(known).Seconds())
			proc.Eventually(t, "the other node blocks, too", func() bool { return get(1) == "blocked" })
			lift(t, nodes[1])
			lifted := time.Now()
			for n := range nodes {
				proc.Eventually(t, "the block is lifted", func() bool { return get(n) != "blocked" })
				t.Logf("lifted on node %d after %.2f s", n, time.Since(lifted).Seconds())
			}
			if time.Since(lifted) > 6*time.Second {
				t.Error("want that within the 5 s after which a node asks again")
			}
		})
	}
}

func lift(t *testing.T, n *node.Node) {
	t.Helper()
	answer := n.Admin(http.MethodPost, "/rate_limit/unblock", `{"zone": "login", "key": "bad"}`)
	var result unblockResult
	if err := json.Unmarshal([]byte(answer.Body), &result); err != nil || answer.Status != http.StatusOK || result.Forgotten != 1 {
		t.Fatalf("status %d: %s", answer.Status, answer.Body)
	}
}
