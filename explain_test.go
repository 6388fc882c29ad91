package ratelimit

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// explainedSites has a path for every way that a request can take to a limit or past it.
const explainedSites = `
{
	order rate_limit before basic_auth
	rate_limit {
		zone shared {
			rate 100/m
		}
		zone users {
			rate 10/m
			key {http.auth.user.id}
		}
	}
	servers :{$PORT} {
		trusted_proxies static 10.0.0.0/8
		trusted_proxies_strict
	}
}
&(named) {
	rate_limit {
		zone named {
			rate 10/m
		}
	}
}
http://127.0.0.1:{$PORT}, http://example.test:{$PORT} {
	@ended path /ended
	route @ended {
		respond "before"
		rate_limit {
			zone behind {
				rate 1/m
			}
		}
	}
	invoke /named named
	handle_path /prefix/* {
		rate_limit {
			zone stripped {
				rate 10/m
				match path /inner
			}
		}
		respond ok
	}
	handle /prefix/* {
		rate_limit {
			zone never {
				rate 10/m
			}
		}
	}
	map {header.X-Plan} {plan} {
		gold gilded
		default plain
	}
	route /mapped {
		request_header X-User bob
		vars user {header.X-User}
		rate_limit {
			zone mapped {
				rate 10/m
				key {plan}-{http.vars.user}
			}
		}
		respond ok
	}
	route /auth {
		basic_auth {
			bob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG
		}
		rate_limit {
			zone users
		}
		file_server {
			pass_thru
		}
		rate_limit {
			zone users
			zone shared
		}
		reverse_proxy 127.0.0.1:9
	}
	handle /api/* {
		rate_limit {
			exempt /api/health
			zone api {
				rate 20/m
				cost 10 /api/search
				cost 0 /api/free
				sensitive /api/search
			}
			zone tried {
				rate 1/m
				burst 1
				key {http.request.header.X-Tried}
				on_empty skip
				dry_run
			}
			zone demanded {
				rate 5/m
				match path /api/demanded
				key {http.request.header.X-Key}
				on_empty deny
			}
			shed 7 {
				pool apis
			}
		}
		respond ok
	}
	respond nothing
}
https://127.0.0.1:{$TLS_PORT} {
	tls internal
	rate_limit {
		zone encrypted {
			rate 10/m
		}
	}
	respond ok
}
`

// explains asks a node about a request.
func explains(t *testing.T, n *node.Node, request string) (info explainInfo) {
	t.Helper()
	answer := n.Admin(http.MethodPost, "/rate_limit/explain", request)
	if answer.Status != http.StatusOK {
		t.Fatalf("%s: %d %s", request, answer.Status, answer.Body)
	}
	if err := json.Unmarshal([]byte(answer.Body), &info); err != nil {
		t.Fatal(err)
	}
	return info
}

// way puts an explanation into a line: each limit with what its zones say, the doubts, and who answers.
func way(info *explainInfo) string {
	var b strings.Builder
	for _, h := range info.Handlers {
		fmt.Fprintf(&b, "[%s", h.Verdict)
		if h.Pool != nil {
			fmt.Fprintf(&b, " pool %s %d", h.Pool.Pool, h.Pool.MaxInFlight)
		}
		for _, z := range h.Zones {
			switch {
			case !z.Matched:
				fmt.Fprintf(&b, " -%s", z.Zone)
			case !z.Charged:
				fmt.Fprintf(&b, " =%s", z.Zone)
			default:
				fmt.Fprintf(&b, " %s:%s=%s*%d", z.Zone, z.Key, z.KeyValue, z.Cost)
			}
		}
		b.WriteString("] ")
	}
	for _, doubt := range info.Unsure {
		fmt.Fprintf(&b, "?%s ", doubt)
	}
	return b.String() + info.AnsweredBy
}

// A request is explained as Caddy would route it, and nothing is left of it.
func TestExplainFollowsRoutes(t *testing.T) {
	n := node.Start(t, explainedSites, node.Env("TLS_PORT", strconv.Itoa(proc.Port(t))))
	for _, c := range []struct{ why, path, extra, want string }{
		{"no limit on the way", "/", "", "static_response"},
		{"what answers hides what is behind it", "/ended", "", "static_response"},
		{"a named route", "/named", "", "[allowed named:{client_ip}=127.0.0.1*1] static_response"},
		{"the first of a group, with the path that it leaves", "/prefix/inner", "", "[allowed stripped:{client_ip}=127.0.0.1*1] static_response"},
		{"the same, where the zone does not match", "/prefix/other", "", "[allowed -stripped] static_response"},
		{
			"map, vars and request headers are carried out", "/mapped", `,"headers":{"X-Plan":["gold"]}`,
			"[allowed mapped:{plan}-{http.vars.user}=gilded-bob*1] static_response",
		},
		{
			"auth and files that may be missing are doubts; a zone charges once", "/auth", "",
			"[allowed users:{client_ip}=127.0.0.1*1] [allowed shared:{client_ip}=127.0.0.1*1 =users] ?authentication ?file_server reverse_proxy",
		},
		{"exempt", "/api/health", "", "[exempt] static_response"},
		{"a cost", "/api/search", "", "[allowed pool apis 7 api:{client_ip}=127.0.0.1*10 -demanded -tried] static_response"},
		{"cost 0 is not counted", "/api/free", "", "[allowed pool apis 7 -api -demanded -tried] static_response"},
		{"a key that is demanded", "/api/demanded", "", "[rejected pool apis 7 api:{client_ip}=127.0.0.1*1] "},
		{
			"the client", "/api/", `,"client_ip":"203.0.113.9"`,
			"[allowed pool apis 7 api:{client_ip}=203.0.113.9*1 -demanded -tried] static_response",
		},
		{
			"all of a network are one client", "/api/", `,"client_ip":"2001:db8::1:2:3:4"`,
			"[allowed pool apis 7 api:{client_ip}=2001:db8::/64*1 -demanded -tried] static_response",
		},
		{
			"behind a trusted proxy", "/api/", `,"client_ip":"10.0.0.1","headers":{"X-Forwarded-For":["203.0.113.8"]}`,
			"[allowed pool apis 7 api:{client_ip}=203.0.113.8*1 -demanded -tried] static_response",
		},
		{
			"another host of the site", "/api/", `,"headers":{"Host":["example.test"]}`,
			"[allowed pool apis 7 api:{client_ip}=127.0.0.1*1 -demanded -tried] static_response",
		},
		{"a host of no site", "/api/", `,"headers":{"Host":["other.test"]}`, ""},
		{
			"headers that Caddy drops", "/api/", `,"headers":{"X_Tried":["a"]}`,
			"[allowed pool apis 7 api:{client_ip}=127.0.0.1*1 -demanded -tried] ?header X_tried, which Caddy drops unless it is expected static_response",
		},
	} {
		info := explains(t, n, fmt.Sprintf(`{"method":"GET","url":%q%s}`, n.URL(c.path), c.extra))
		if got := way(&info); got != c.want {
			t.Errorf("%s: %s\n%s, want\n%s", c.why, c.path, got, c.want)
		}
	}
	if r := n.Get("/api/"); r.Header.Get("X-RateLimit-Remaining") != "19" {
		t.Errorf("explaining has charged: %v", r.Header)
	}
}

// The server is the one that listens where the URL leads.
func TestExplainFindsTheServer(t *testing.T) {
	encrypted := strconv.Itoa(proc.Port(t))
	n := node.Start(t, explainedSites, node.Env("TLS_PORT", encrypted))
	for _, url := range []string{"https://127.0.0.1:" + encrypted, "https://localhost:" + encrypted + "/?a=b"} {
		info := explains(t, n, fmt.Sprintf(`{"method":"GET","url":%q,"headers":{"Host":["127.0.0.1"]}}`, url))
		if len(info.Handlers) != 1 || info.Handlers[0].Zones[0].Zone != "encrypted" {
			t.Errorf("%s: %+v", url, info)
		}
	}
	for request, want := range map[string]string{
		`{"method":"GET","url":"http://127.0.0.1:1/"}`:                 "no server listens for http at port 1; there are: ",
		`{"method":"GET","url":"http://127.0.0.1:` + encrypted + `/"}`: "https at :" + encrypted,
		`{"method":"GET","url":"/login"}`:                              "url: must be http or https, with a host",
		`{"method":"GET","url":"ftp://a/"}`:                            "url: must be http or https, with a host",
		`{"method":"G T","url":"http://a/"}`:                           "invalid method",
		`{"method":"GET","url":"http://a/","client_ip":"me"}`:          "client_ip: must be an address",
		`{"method":"GET","url":"http://a/","clientip":"203.0.113.7"}`:  `unknown field \"clientip\"`,
	} {
		if answer := n.Admin(http.MethodPost, "/rate_limit/explain", request); answer.Status != http.StatusBadRequest || !strings.Contains(answer.Body, want) {
			t.Errorf("%s: %d %s, want 400 and %q", request, answer.Status, answer.Body, want)
		}
	}
}

// Asking leaves nothing behind that watches the requests of a zone.
func TestExplainIsNotCounted(t *testing.T) {
	n := node.Start(t, explainedSites, node.Env("TLS_PORT", strconv.Itoa(proc.Port(t))))
	for range patienceWithKeys + 1 {
		explains(t, n, fmt.Sprintf(`{"method":"GET","url":%q}`, n.URL("/api/")))
	}
	if n.LogLines("was missing in its first 100 requests") > 0 {
		t.Error("a question was taken for a request without its key")
	}
}

// Caddy's handlers are known by what they do. One that is new is a doubt until somebody has looked at it.
func TestRolesAreOfHandlersThatExist(t *testing.T) {
	stdout, _, _ := node.Run(t, "list-modules")
	modules := strings.Fields(stdout)
	for id := range roles {
		if !slices.Contains(modules, string(id)) {
			t.Errorf("%s does not exist", id)
		}
	}
}

// What is explained is what the next request is answered, in this process, in Redis, and while Redis is down.
func TestExplainForetells(t *testing.T) {
	server := redistest.Start(t)
	const sites = `
	{
		rate_limit {
			redis {$REDIS_URL}
			nodes 2
			key_secret s
		}
		servers {
			trusted_proxies static private_ranges
		}
	}
	http://127.0.0.1:{$PORT} {
		rate_limit {
			penalty {
				after 2
			}
			zone pages {
				rate 1/h
				burst 12
				cost 3 /dear
			}
			zone here {
				store memory
				match path /here
				rate 1/h
				burst 4
				penalty off
			}
			zone tried {
				rate 1/h
				burst 2
				dry_run
			}
			zone login {
				match path /login
				rate 1/h
				burst 3
				sensitive
			}
		}
		respond ok
	}`
	n := node.Start(t, sites, node.Env("REDIS_URL", server.URL()))
	awaitUp(t, n)
	random := rand.New(rand.NewPCG(1, 2))
	seen := map[string]int{}
	for step := range 120 {
		if step == 80 {
			server.Kill()
			awaitDown(t, n)
		}
		if step%8 == 7 {
			operate(t, n, random, step/40*10)
		}
		path := []string{"/", "/dear", "/here", "/login"}[random.IntN(4)]
		client := fmt.Sprintf("203.0.113.%d", random.IntN(4)+step/40*10) // others after a while, when most are blocked
		info := explains(t, n, fmt.Sprintf(`{"method":"GET","url":%q,"headers":{"X-Forwarded-For":[%q]}}`, n.URL(path), client))
		answer := n.Get(path, "X-Forwarded-For: "+client)
		want := cmp.Or(answer.Header.Get("X-RateLimit-Reason"), "allowed")
		if got := info.Handlers[0].Verdict; got != want {
			t.Fatalf("step %d, %s from %s: explained as %s, answered %s\n%+v", step, path, client, got, want, info)
		}
		seen[want]++
	}
	for _, verdict := range []string{"allowed", "limited", "blocked", "unavailable"} {
		if seen[verdict] == 0 {
			t.Errorf("no request was %s: %v", verdict, seen)
		}
	}
}

// operate does what operators do to some client, and what it does to the next request must be foretold too.
func operate(t *testing.T, n *node.Node, random *rand.Rand, first int) {
	t.Helper()
	client := fmt.Sprintf("203.0.113.%d", random.IntN(4)+first)
	what := [][2]string{
		{"block", fmt.Sprintf(`{"zone":"pages","key":%q,"for":"1m"}`, client)},
		{"unblock", fmt.Sprintf(`{"zone":"pages","key":%q,"amnesty":"1m"}`, client)},
		{"reset", fmt.Sprintf(`{"zone":"pages","key":%q}`, client)},
		{"override", `{"zone":"login","action":"allow","for":"1ms"}`},
		{"override", `{"zone":"pages","action":"deny","for":"1m"}`},
	}[random.IntN(5)]
	if answer := n.Admin(http.MethodPost, "/rate_limit/"+what[0], what[1]); answer.Status >= 500 && answer.Status != http.StatusServiceUnavailable {
		t.Errorf("%v: %d %s", what, answer.Status, answer.Body)
	}
}

// awaitUp waits until a node takes its decisions in Redis.
func awaitUp(t *testing.T, n *node.Node) { awaitStatus(t, n, `"up":true`) }

// awaitDown waits until a node knows that Redis is down.
func awaitDown(t *testing.T, n *node.Node) { awaitStatus(t, n, `"up":false`) }

func awaitStatus(t *testing.T, n *node.Node, text string) {
	t.Helper()
	proc.Eventually(t, text, func() bool {
		n.Get("/awaited", "X-Forwarded-For: 198.51.100.1")
		return strings.Contains(n.Admin(http.MethodGet, "/rate_limit/status", "").Body, text)
	})
}

// A full pool is looked at, and not taken from.
func TestExplainOverload(t *testing.T) {
	backend := holdingBackend(t)
	n := node.Start(t, `
	http://127.0.0.1:{$PORT} {
		rate_limit {
			zone pages {
				rate 1/h
				burst 9
			}
			shed 1
		}
		reverse_proxy {$BACKEND}
	}`, node.Env("BACKEND", backend.addr))
	ask := fmt.Sprintf(`{"method":"GET","url":%q}`, n.URL("/"))
	if info := explains(t, n, ask); way(&info) != "[allowed pool default 1 pages:{client_ip}=127.0.0.1*1] reverse_proxy" {
		t.Errorf("with a free slot: %s", way(&info))
	}
	go func() { _, _ = n.Try(http.MethodGet, "/", "") }()
	<-backend.arrived
	if info := explains(t, n, ask); way(&info) != "[overloaded pool default 1] " || info.Handlers[0].Pool.InFlight != 1 {
		t.Errorf("with no free slot: %s", way(&info))
	}
	backend.release()
}

// heldBackend is a backend that answers nothing until it is released.
type heldBackend struct {
	addr    string
	arrived chan struct{} // one for each request
	release func()
}

func holdingBackend(t *testing.T) *heldBackend {
	t.Helper()
	held := make(chan struct{})
	b := &heldBackend{arrived: make(chan struct{}, 100), release: sync.OnceFunc(func() { close(held) })}
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		b.arrived <- struct{}{}
		<-held
	}))
	b.addr = server.Listener.Addr().String()
	t.Cleanup(func() {
		b.release()
		server.Close()
	})
	return b
}
