package ratelimit

import (
	"fmt"
	"maps"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// site is a Caddyfile with one site, limited as the block says.
func site(global, block string) string {
	return fmt.Sprintf("{\n\tadmin {$ADMIN}\n\trate_limit {\n%s\n\t}\n}\nhttp://:{$PORT} {\n\trate_limit {\n%s\n\t}\n\trespond ok\n}\n", global, block)
}

// patientRedis is a Redis that is waited for: a call that times out would be decided by the share, not fail.
const patientRedis = "redis {$REDIS} {\n\ttimeout 5s\n\tsensitive_timeout 5s\n}\nkey_secret test\n"

// storm sends so many requests from 60 clients at once, in turn to the nodes, and counts the answers by status.
func storm(t *testing.T, requests int, path string, nodes ...*node.Node) map[int]int {
	t.Helper()
	statuses := make([]map[int]int, 60)
	var sent atomic.Int64
	var wg sync.WaitGroup
	for c := range statuses {
		statuses[c] = map[int]int{}
		wg.Go(func() {
			for i := sent.Add(1); i <= int64(requests); i = sent.Add(1) {
				answer, err := nodes[int(i)%len(nodes)].Try(http.MethodGet, path, "")
				if err != nil {
					t.Error(err)
					return
				}
				statuses[c][answer.Status]++
			}
		})
	}
	wg.Wait()
	total := map[int]int{}
	for _, s := range statuses {
		for status, n := range s {
			total[status] += n
		}
	}
	return total
}

func startNodes(t *testing.T, n int, caddyfile string, redis *redistest.Server) []*node.Node {
	t.Helper()
	nodes := make([]*node.Node, n)
	for i := range nodes {
		nodes[i] = node.Start(t, caddyfile, node.Env("REDIS", redis.Addr()))
	}
	return nodes
}

// checkKeys holds that every key has a TTL, at most the bound, and that none shows what it is about.
func checkKeys(t *testing.T, redis *redistest.Server, bound time.Duration, plain ...string) {
	t.Helper()
	ttls := redis.TTLs()
	if len(ttls) == 0 {
		t.Error("no keys in Redis")
	}
	for key, ttl := range ttls {
		if ttl <= 0 || ttl > bound {
			t.Errorf("key %q has a TTL of %s, want one up to %s", key, ttl, bound)
		}
		for _, p := range plain {
			if strings.Contains(key, p) {
				t.Errorf("key %q holds %q in the clear", key, p)
			}
		}
	}
}

func TestExactOverNodes(t *testing.T) {
	for name, test := range map[string]struct {
		zones string
		want  map[int]int
	}{
		"one limit":       {"zone api {\n rate 1/h\n burst 100\n}", map[int]int{200: 100, 429: 500}},
		"a cost of seven": {"zone api {\n rate 1/h\n burst 100\n cost 7\n}", map[int]int{200: 14, 429: 586}},
		"two zones": {
			"zone address {\n rate 1/h\n burst 100\n}\nzone global {\n match not path /alone\n key all\n rate 1/h\n burst 50\n}",
			map[int]int{200: 50, 429: 550},
		},
	} {
		t.Run(name, func(t *testing.T) {
			redis := redistest.Start(t)
			nodes := startNodes(t, 3, site(patientRedis+"nodes 3", test.zones), redis)
			if got := storm(t, 600, "/", nodes...); !maps.Equal(got, test.want) {
				t.Errorf("answers by status %v, want %v", got, test.want)
			}
			if name == "two zones" {
				// What the global zone refused, the zone of the address was not charged for.
				if left := nodes[1].Get("/alone").Header.Get("X-RateLimit-Remaining"); left != "49" {
					t.Errorf("%s of 100 left of the address after 50 requests and this one, want 49", left)
				}
			}
			checkKeys(t, redis, 101*time.Hour, "127.0.0.1", "all")
		})
	}
}

// outage counts what clients see while Redis comes and goes.
type outage struct {
	login, api [600]atomic.Int64 // answers by status
	seen       atomic.Int64
}

// load sends requests from 16 clients until stopped, in turn to the sensitive and to the open route.
func (o *outage) load(t *testing.T, n *node.Node) (stop func()) {
	var done atomic.Bool
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for !done.Load() {
				for path, count := range map[string]*[600]atomic.Int64{"/login": &o.login, "/api": &o.api} {
					answer, err := n.Try(http.MethodGet, path, "")
					if err != nil {
						t.Error(err)
						return
					}
					count[answer.Status].Add(1)
					o.seen.Add(1)
				}
			}
		})
	}
	return func() { done.Store(true); wg.Wait() }
}

// during waits for some hundred answers and returns how many of each status there were on both routes.
func (o *outage) during(t *testing.T) (login, api map[int]int64) {
	before := o.counts()
	from := o.seen.Load()
	proc.Eventually(t, "clients saw more answers", func() bool { return o.seen.Load() > from+400 })
	after := o.counts()
	for i := range after {
		for status := range after[i] {
			after[i][status] -= before[i][status]
			if after[i][status] == 0 {
				delete(after[i], status)
			}
		}
	}
	return after[0], after[1]
}

func (o *outage) counts() [2]map[int]int64 {
	counts := [2]map[int]int64{{}, {}}
	for i, route := range []*[600]atomic.Int64{&o.login, &o.api} {
		for status := range route {
			if n := route[status].Load(); n > 0 {
				counts[i][status] = n
			}
		}
	}
	return counts
}

func TestRedisDiesUnderLoad(t *testing.T) {
	redis := redistest.Start(t)
	n := node.Start(t, site("redis {$REDIS} {\n timeout 300ms\n sensitive_timeout 600ms\n}\nnodes 2", `
		zone login {
			match path /login
			rate 1000000/s
			sensitive
		}
		zone api {
			match path /api
			rate 1/h
			burst 20
		}`), node.Env("REDIS", redis.Addr()))
	o := new(outage)
	defer o.load(t, n)()
	proc.Eventually(t, "the limit was reached", func() bool { return o.api[429].Load() > 0 })

	outages := 0
	down := func(what string, kill func()) {
		outages++
		kill()
		proc.Eventually(t, "Redis counts as down", func() bool { return n.LogLines("redis is down") == outages })
		o.during(t) // what was under way
		login, api := o.during(t)
		t.Logf("%s: login %v, api %v", what, login, api)
		if len(login) != 1 || login[503] == 0 {
			t.Errorf("%s: a sensitive route answered %v, want 503 only", what, login)
		}
	}
	up := func(what string, revive func()) {
		begun := time.Now()
		revive()
		proc.Eventually(t, "Redis counts as up", func() bool { return n.LogLines("redis is up again") == outages })
		t.Logf("%s: back after %s", what, time.Since(begun).Round(time.Millisecond))
		o.during(t)
		login, _ := o.during(t)
		if len(login) != 1 || login[200] == 0 {
			t.Errorf("%s: a sensitive route answered %v, want 200 only", what, login)
		}
	}
	down("killed", redis.Kill)
	up("restarted empty", redis.Restart)
	down("stopped", redis.Stop)
	up("continued", redis.Cont)
	down("killed again", redis.Kill)
	up("restarted empty again", redis.Restart)

	for status := 500; status < 600; status++ {
		if count := o.api[status].Load(); count > 0 {
			t.Errorf("%d answers of status %d on a route that is not sensitive", count, status)
		}
	}
	// A full bucket from each of three empty Redis, and the share of 10 once: it is one bucket for all outages.
	if got := o.api[200].Load(); got > 3*20+10 {
		t.Errorf("%d admitted, want at most 70", got)
	}
	if lines := n.LogLines("\"rate_limit.redis\""); lines != 1+2*outages {
		t.Errorf("%d log lines about Redis in %d outages, want one for the start and one for each change", lines, outages)
	}
}

// Redis is no condition for anything but exactness: not for a start, not for a reload, not for caddy validate.
func TestRedisAbsent(t *testing.T) {
	port := strconv.Itoa(proc.Port(t))
	config := func(rate string) string {
		return site("redis 127.0.0.1:"+port+"\nnodes 2", "zone login {\n match path /login\n rate 1/s\n sensitive\n}\nzone api {\n rate "+rate+"\n burst 4\n}")
	}
	n := node.Start(t, config("1/h"))
	if status := n.Get("/login").Status; status != http.StatusServiceUnavailable {
		t.Errorf("a sensitive route without Redis: status %d, want 503", status)
	}
	if got := storm(t, 60, "/", n); got[200] != 2 || got[429] != 58 {
		t.Errorf("answers by status %v, want the share of 2", got)
	}
	if err := n.Load(config("2/h")); err != nil {
		t.Error(err)
	}
	if answer := n.Get("/login"); answer.Status != 503 || answer.Body != `{"error":"limiter_unavailable","retry_after":1}` || answer.Header.Get("Retry-After") != "1" {
		t.Errorf("got %+v", answer)
	}
	for _, line := range n.Logs() {
		if line["level"] == "error" {
			t.Errorf("an ERROR line for a refusal: %v", line)
		}
	}
}

func TestReloadsUnderLoad(t *testing.T) {
	limits := [][2]string{
		{"rate 20/s\n burst 50", "rate 100/s\n burst 50"},  // rate
		{"rate 50/s\n burst 20", "rate 50/s\n burst 100"},  // burst
		{"rate 10/s\n burst 100", "rate 100/s\n burst 10"}, // both
	}
	const burst, rate = 100, 100 // the larger ones
	for _, store := range []string{"memory", "redis"} {
		for i, pair := range limits {
			t.Run(fmt.Sprint(store, i), func(t *testing.T) {
				redis := redistest.Start(t)
				global := patientRedis + "nodes 2"
				if store == "memory" {
					global = "redis off"
				}
				config := func(limit string) string { return site(global, "zone api {\n "+limit+"\n}") }
				nodes := startNodes(t, 1, config(pair[0]), redis)
				if store == "redis" { // two nodes side by side, each with a limit of its own
					nodes = append(nodes, startNodes(t, 1, config(pair[1]), redis)...)
				}
				admittedIn(t, nodes, burst, rate, func() {
					for n := range 67 {
						for i, node := range nodes {
							if err := node.Load(config(pair[(n+i)%2])); err != nil {
								t.Error(err)
							}
						}
					}
				})
			})
		}
	}
}

// admittedIn sends requests from 8 clients while work is under way, and holds what was admitted against the bound. No
// request may get an answer that is not the limiter's. Connections may be closed without one: when Caddy closes idle
// connections of an old configuration, a request may be on its way; that happens without this plugin, too.
func admittedIn(t *testing.T, nodes []*node.Node, burst, rate float64, work func()) {
	t.Helper()
	var passed, refused, closed atomic.Int64
	var done atomic.Bool
	var wg sync.WaitGroup
	begun := time.Now()
	for c := range 8 {
		wg.Go(func() {
			for !done.Load() {
				answer, err := nodes[c%len(nodes)].Try(http.MethodGet, "/", "")
				switch {
				case err != nil:
					closed.Add(1)
				case answer.Status == http.StatusOK:
					passed.Add(1)
				case answer.Status == http.StatusTooManyRequests:
					refused.Add(1)
				default:
					t.Errorf("status %d", answer.Status)
				}
			}
		})
	}
	work()
	done.Store(true)
	wg.Wait()
	seconds := time.Since(begun).Seconds()
	bound := burst + rate*seconds
	t.Logf("%d admitted and %d refused in %.1f s, bound %.0f; %d connections closed", passed.Load(), refused.Load(), seconds, bound, closed.Load())
	if float64(passed.Load()) > bound || passed.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d admitted, want at most %.0f", passed.Load(), bound)
	}
}

// Reloads in every way that Caddy has keep what is known; 200 of them cost nothing that stays.
func TestReloadsKeepStateAndResources(t *testing.T) {
	redis := redistest.Start(t)
	config := func(header string) string {
		return site(patientRedis+"nodes 1", "zone api {\n rate 1/h\n burst 1000\n}\npenalty\nshed 50\nheaders on\n# "+header)
	}
	n := startNodes(t, 1, config("first"), redis)[0]
	left := func() int {
		remaining, err := strconv.Atoi(n.Get("/").Header.Get("X-RateLimit-Remaining"))
		if err != nil {
			t.Fatal(err)
		}
		return remaining
	}
	for range 5 {
		if err := n.Load(config("warm")); err != nil {
			t.Fatal(err)
		}
	}
	start := left()
	goroutines, conns := n.Goroutines(), redis.Info("clients", "connected_clients")
	for i := range 200 {
		if err := n.Load(config(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	if got := left(); got != start-1 {
		t.Errorf("%d tokens left after 200 reloads and one request, want %d", got, start-1)
	}
	proc.Eventually(t, "goroutines are as before", func() bool { return n.Goroutines() <= goroutines+5 })
	if got := redis.Info("clients", "connected_clients"); got != conns {
		t.Errorf("%s Redis connections after 200 reloads, %s before", got, conns)
	}
	if err := n.Load(config("rejected") + "\nhttp://:{$PORT} {\n rate_limit {\n zone api {\n rate 9/h\n }\n }\n}"); err == nil {
		t.Error("a wrong configuration was accepted")
	}
	if status, body := n.Patch("apps/http/servers/srv0/routes/0/handle/0/rate_limits/api/rate", `"0/h"`); status == 200 {
		t.Errorf("a wrong rate was accepted: %s", body)
	}
	if got := left(); got != start-2 {
		t.Errorf("%d tokens left after rejected configurations, want %d", got, start-2)
	}
	if status, body := n.Patch("apps/http/servers/srv0/routes/0/handle/0/rate_limits/api/burst", "10"); status != 200 {
		t.Errorf("PATCH: status %d: %s", status, body)
	}
	if got := left(); got != 9 {
		t.Errorf("%d tokens left of a burst lowered to 10, want 9", got)
	}
	if _, stderr, code := n.Run("reload", "--config", "Caddyfile", "--force"); code != 0 {
		t.Errorf("caddy reload: %s", stderr)
	}
	if got := left(); got != 8 {
		t.Errorf("%d tokens left after caddy reload raised the burst again, want 8: a change gives nothing", got)
	}
}

// A shared zone has one path to PATCH, for all sites that use it.
func TestPatchOfASharedZone(t *testing.T) {
	n := node.Start(t, "{\n admin {$ADMIN}\n rate_limit {\n zone all {\n rate 1/h\n burst 100\n }\n }\n}\nhttp://a.test:{$PORT} {\n rate_limit {\n zone all\n }\n respond ok\n}\nhttp://b.test:{$PORT} {\n rate_limit {\n zone all\n }\n respond ok\n}\n")
	wantHeaders(t, n.Get("/", "Host: a.test"), map[string]string{"X-RateLimit-Remaining": "99"})
	wantHeaders(t, n.Get("/", "Host: b.test"), map[string]string{"X-RateLimit-Remaining": "98"})
	if status, body := n.Patch("apps/rate_limit/zones/all/burst", "10"); status != http.StatusOK {
		t.Fatalf("PATCH: status %d: %s", status, body)
	}
	for i, host := range []string{"a.test", "b.test"} {
		wantHeaders(t, n.Get("/", "Host: "+host), map[string]string{"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": strconv.Itoa(9 - i)})
	}
}

func TestReloadBySignal(t *testing.T) {
	n := node.Start(t, site("redis off", "zone api {\n rate 1/h\n burst 10\n}"))
	n.Get("/")
	n.Signal(syscall.SIGUSR1)
	proc.Eventually(t, "the configuration was loaded again", func() bool { return n.LogLines("serving initial configuration") > 0 && n.LogLines("SIGUSR1") > 0 })
	if left := n.Get("/").Header.Get("X-RateLimit-Remaining"); left != "8" {
		t.Errorf("%s left, want 8", left)
	}
}

// A request that entered before a reload may reach the limiter long after it, when its configuration is gone.
func TestSlowUploadOverReloads(t *testing.T) {
	redis := redistest.Start(t)
	config := func(timeout string) string {
		return fmt.Sprintf(`{
			admin {$ADMIN}
		}
		http://:{$PORT} {
			route {
				vars uploaded {http.request.body}
				rate_limit {
					redis {$REDIS} {
						timeout %s
						sensitive_timeout 5s
					}
					nodes 1
					shed 10
					zone api {
						rate 1/h
						burst 10
						sensitive
					}
				}
				respond ok
			}
		}`, timeout)
	}
	n := startNodes(t, 1, config("1s"), redis)[0]
	conn, err := net.Dial("tcp", n.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n")
	answer := make([]byte, 4096)
	read, _ := conn.Read(answer) // sent when somebody reads the body: now the request is in
	if !strings.HasPrefix(string(answer[:read]), "HTTP/1.1 100") {
		t.Fatalf("got %q", answer[:read])
	}
	fmt.Fprint(conn, "ab")
	for i := range 3 { // another timeout is another client: the old one has no configuration any more
		if err := n.Load(config(fmt.Sprintf("%ds", 2+i))); err != nil {
			t.Fatal(err)
		}
	}
	proc.Eventually(t, "the old connections are closed", func() bool {
		clients, _ := strconv.Atoi(redis.Info("clients", "connected_clients"))
		return clients <= warmConns+2
	})
	fmt.Fprint(conn, "cd")
	read, _ = conn.Read(answer)
	if !strings.HasPrefix(string(answer[:read]), "HTTP/1.1 200") || !strings.Contains(string(answer[:read]), "X-Ratelimit-Remaining: 9") {
		t.Errorf("got %q", answer[:read])
	}
}

// What the limit was lowered to holds at once, and nobody waits for what the old one would have needed.
func TestLoweredLimits(t *testing.T) {
	redis := redistest.Start(t)
	for _, store := range []string{"redis off", patientRedis + "nodes 1"} {
		config := func(limit string) string { return site(store, "zone api {\n "+limit+"\n}") }
		n := startNodes(t, 1, config("rate 10/s\n burst 100"), redis)[0]
		storm(t, 300, "/", n)
		if err := n.Load(config("rate 1/10s\n burst 100")); err != nil {
			t.Fatal(err)
		}
		if got := storm(t, 100, "/", n); got[200] > 2 {
			t.Errorf("%s: %d of 100 passed after the rate was lowered, want at most 2", store, got[200])
		}
		if err := n.Load(config("rate 10/s\n burst 10000")); err != nil {
			t.Fatal(err)
		}
		if err := n.Load(config("rate 10/s\n burst 10")); err != nil {
			t.Fatal(err)
		}
		answer := n.Get("/")
		if wait := answer.Header.Get("Retry-After"); answer.Status == 429 && wait != "1" {
			t.Errorf("%s: told to wait %s s for one token at 10/s", store, wait)
		}
	}
}
