package ratelimit

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds attacks and accidents that users of other limiters reported; the comment of each test names the reports.

// A client that says its key twice, the second time with junk, must not have a fresh bucket for every junk value.
// gateways C-1 15, C-7 84; caddy-field c 55.
func TestRepeatedKeysAreNoFreshBuckets(t *testing.T) {
	const zones = `
		zone header {
			match path /header
			key {header.X-Api-Key}
			rate 1/h
			burst 10
		}
		zone query {
			match path /query
			key {query.key}
			rate 1/h
			burst 10
		}
		zone cookie {
			match path /cookie
			key {cookie.session}
			rate 1/h
			burst 10
		}
		zone deny {
			match path /deny
			key {header.X-Api-Key}
			on_empty deny
			rate 1/h
		}
		zone skip {
			match path /skip
			key {header.X-Api-Key}
			on_empty skip
			rate 1/h
			burst 1
		}`
	onEveryNode(t, site("{$STORE}", zones), func(t *testing.T, n *node.Node) {
		passed := map[string]int{}
		for i := range 100 {
			junk := strconv.Itoa(i)
			for path, headers := range map[string][]string{
				"/header":                  {"X-Api-Key: K", "X-Api-Key: " + junk},
				"/query?key=K&key=" + junk: nil,
				"/cookie":                  {"Cookie: session=K; session=" + junk},
				"/deny":                    {"X-Api-Key: K", "X-Api-Key: " + junk},
				"/skip":                    nil,
			} {
				answer := n.Get(path, headers...)
				kind, _, _ := strings.Cut(path, "?")
				if answer.Status == http.StatusOK {
					passed[kind]++
				}
				if kind == "/deny" && (answer.Status != http.StatusBadRequest || answer.Body != `{"error":"identity_required"}`) {
					t.Fatalf("on_empty deny: %+v", answer)
				}
			}
		}
		for _, kind := range []string{"/header", "/query", "/cookie"} {
			if passed[kind] != 10 {
				t.Errorf("%s: %d of 100 passed, want the burst of 10", kind, passed[kind])
			}
		}
		if passed["/skip"] != 100 {
			t.Errorf("on_empty skip: %d of 100 passed, want all", passed["/skip"])
		}
	})
}

// Whoever has a /64 has 2^64 addresses: they are one client, also inside of a longer key. caddy-field c 11, 13; gateways C-7
// 86; shedding d 54.
func TestOneNetworkIsOneClient(t *testing.T) {
	config := "{\n admin {$ADMIN}\n servers {\n trusted_proxies static 127.0.0.1/32\n trusted_proxies_strict\n }\n rate_limit {\n {$STORE}\n }\n}\nhttp://:{$PORT} {\n rate_limit {\n zone api {\n key {client_ip}-{http.request.uri.path}\n rate 1/h\n burst 10\n }\n }\n respond ok\n}\n"
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		passed := 0
		for i := range 1000 {
			if n.Get("/", fmt.Sprintf("X-Forwarded-For: 2001:db8:0:1::%x", i+1)).Status == http.StatusOK {
				passed++
			}
		}
		if passed != 10 {
			t.Errorf("%d of 1000 addresses of a /64 passed, want 10", passed)
		}
		if status := n.Get("/", "X-Forwarded-For: 2001:db8:0:2::1").Status; status != http.StatusOK {
			t.Errorf("another /64: status %d", status)
		}
		for i, address := range []string{"192.0.2.1", "::ffff:192.0.2.1", "64:ff9b::192.0.2.1"} {
			wantHeaders(t, n.Get("/", "X-Forwarded-For: "+address), map[string]string{"X-RateLimit-Remaining": strconv.Itoa(9 - i)})
		}
	})
}

// Without trusted proxies nobody chooses its key by a header, nor somebody else's. caddy-field c 12; gateways C-6 83; shedding d 53.
func TestForwardedAddressOfAnUntrustedPeer(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/h\n burst 10\n}\npenalty"), func(t *testing.T, n *node.Node) {
		var all []int
		for i := range 50 {
			all = append(all, statuses(n, 1, "/", fmt.Sprintf("X-Forwarded-For: 192.0.2.%d", i), fmt.Sprintf("X-Real-Ip: 192.0.2.%d", i))...)
		}
		if count(all, 200) != 10 {
			t.Errorf("got %v", all)
		}
	})
}

// served provisions a Caddyfile in this process and returns its only server.
func served(t *testing.T, caddyfile string) *caddyhttp.Server {
	t.Helper()
	raw, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	if err != nil {
		t.Fatal(err)
	}
	return servedJSON(t, raw)
}

func servedJSON(t *testing.T, raw []byte) *caddyhttp.Server {
	t.Helper()
	var config caddy.Config
	if err := caddy.StrictUnmarshalJSON(raw, &config); err != nil {
		t.Fatal(err)
	}
	ctx, err := caddy.ProvisionContext(&config)
	if err != nil {
		t.Fatal(err)
	}
	app, err := ctx.App("http")
	if err != nil {
		t.Fatal(err)
	}
	return app.(*caddyhttp.App).Servers["srv0"]
}

// requested sends a request to a server without a connection.
func requested(server *caddyhttp.Server, remote string, state *tls.ConnectionState, path string, headers ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.RemoteAddr, r.TLS = remote, state
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ": ")
		r.Header.Add(name, value)
	}
	w := httptest.NewRecorder()
	server.ServeHTTP(w, r)
	return w
}

// In early data the address of a QUIC packet is not proven: who writes a victim's must not spend its tokens nor strike it.
// caddy-field 0.6; shedding c.6 3.
func TestEarlyDataWithAVictimsAddress(t *testing.T) {
	redis := redistest.Start(t)
	for name, store := range map[string]string{"memory": "redis off", "redis": "redis " + redis.Addr() + " {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1"} {
		t.Run(name, func(t *testing.T) {
			server := served(t, "{\n admin off\n rate_limit {\n "+store+"\n }\n}\nhttp://:9080 {\n rate_limit {\n penalty {\n after 0\n }\n zone early_"+name+" {\n match path /\n rate 1/h\n burst 10\n }\n zone key_"+name+" {\n match path /key\n key {header.X-Api-Key}\n rate 1/h\n burst 1\n }\n zone login_"+name+" {\n match path /login\n key {header.X-Api-Key}\n rate 1/h\n sensitive\n }\n }\n respond ok\n}\n")
			const victim = "192.0.2.7:4433"
			early, proven := &tls.ConnectionState{}, &tls.ConnectionState{HandshakeComplete: true}
			for range 50 {
				if w := requested(server, victim, early, "/"); w.Code != http.StatusTooEarly {
					t.Fatalf("early data: status %d", w.Code)
				}
				if w := requested(server, victim, early, "/login", "X-Api-Key: K"); w.Code != http.StatusTooEarly {
					t.Fatalf("early data on a sensitive route: status %d", w.Code)
				}
			}
			if keys := redis.Keys(); name == "redis" && len(keys) > 1 { // the probe's
				t.Errorf("early data left %v", keys)
			}
			w := requested(server, victim, proven, "/")
			if left := w.Header().Get("X-RateLimit-Remaining"); w.Code != http.StatusOK || left != "9" {
				t.Errorf("the victim's first request: status %d, %s left, want 9", w.Code, left)
			}
			// Other keys are charged, and never strike.
			for i, want := range []int{200, 429, 429, 429} {
				w := requested(server, victim, early, "/key", "X-Api-Key: K")
				if w.Code != want || w.Header().Get("X-RateLimit-Reason") == "blocked" {
					t.Errorf("request %d by key: status %d, %v", i, w.Code, w.Header())
				}
			}
		})
	}
}

// A refused request does not get past the limiter because a subroute around it has error routes for something else.
// gateways C-10 111.
func TestNoRefusalIsPassedOnBySubroutes(t *testing.T) {
	server := servedJSON(t, []byte(`{"admin":{"disabled":true},"apps":{"http":{"servers":{"srv0":{"listen":["127.0.0.1:9081"],"automatic_https":{"disable":true},
		"routes":[
			{"handle":[{"handler":"subroute","routes":[{"handle":[{"handler":"rate_limit","rate_limits":{"in_subroute":{"rate":"1/h","burst":1}}}]}],
				"errors":{"routes":[{"match":[{"vars":{"{http.error.status_code}":["502"]}}],"handle":[{"handler":"static_response","body":"bad gateway"}]}]}}]},
			{"handle":[{"handler":"static_response","body":"secret"}]}],
		"errors":{"routes":[{"handle":[{"handler":"static_response","body":"page"}]}]}}}}}}`))
	const client = "203.0.113.7:1"
	requested(server, client, nil, "/")
	for want, state := range map[int]*tls.ConnectionState{http.StatusTooManyRequests: nil, http.StatusTooEarly: {}} {
		if w := requested(server, client, state, "/"); w.Code != want || strings.Contains(w.Body.String(), "secret") {
			t.Errorf("status %d, body %s, want %d", w.Code, w.Body, want)
		}
	}
}

// What limits everybody together must not block everybody. shedding c.6 2, d 49.
func TestGlobalZoneBlocksNobody(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "penalty {\n after 0\n}\nzone all {\n match path /\n key all\n rate 1/h\n burst 1\n}\nzone each {\n rate 1/h\n burst 1000\n}"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 100, "/"); count(all, 429) != 99 {
			t.Fatalf("got %v", all)
		}
		if all := statuses(n, 100, "/other"); count(all, 200) != 100 {
			t.Errorf("after refusals by the global zone: %v", all)
		}
	})
}

// A listener without client addresses: nobody is counted with everybody else, and login is not open. gateways C-1 16.
func TestUnixSocket(t *testing.T) {
	socket := t.TempDir() + "/caddy.sock"
	n := node.Start(t, "{\n admin {$ADMIN}\n}\nhttp:// {\n bind unix/"+socket+"\n rate_limit {\n redis off\n zone login {\n match path /login\n rate 1/h\n sensitive\n }\n zone api {\n rate 1/h\n burst 1\n }\n }\n respond ok\n}\n")
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	get := func(path string) int {
		answer, err := client.Get("http://localhost" + path)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	for range 5 {
		if status := get("/"); status != http.StatusOK {
			t.Errorf("status %d: strangers share a bucket", status)
		}
		if status := get("/login"); status != http.StatusServiceUnavailable {
			t.Errorf("login without a client address: status %d", status)
		}
	}
	if lines := n.LogLines("a request has no client address"); lines != 2 {
		t.Errorf("%d warnings, want one for each zone", lines)
	}
	client.CloseIdleConnections()
}

// The key of a user in front of auth is empty for everybody; nothing at load can tell, so it is said when it shows. caddy-field f.
func TestKeyThatNeverComes(t *testing.T) {
	n := node.Start(t, site("redis off", "zone user {\n key {http.auth.user.id}\n rate 1000/s\n}\nzone fine {\n key {header.X-Api-Key}\n rate 1000/s\n}"))
	statuses(n, 1, "/", "X-Api-Key: K")
	statuses(n, 150, "/")
	if lines := n.LogLines("the key of a zone was missing"); lines != 1 {
		t.Errorf("%d warnings in 150 requests, want one, for one of two zones", lines)
	}
}

// Two handlers on one request, an error route, a named route: a zone charges once. gateways C-3 35; caddy-field c 50.
func TestOneChargeARequest(t *testing.T) {
	const config = `{
		admin {$ADMIN}
		rate_limit {
			{$STORE}
			zone all {
				rate 1/h
				burst 10
			}
		}
	}
	&(limited) {
		rate_limit {
			zone all
		}
		respond named
	}
	http://:{$PORT} {
		rate_limit {
			zone all
		}
		handle /inner* {
			rate_limit {
				zone all
			}
			respond inner
		}
		handle /named* {
			invoke limited
		}
		handle /error* {
			error 404
		}
		respond outer
		handle_errors {
			rate_limit {
				zone all
			}
			respond {err.status_code}
		}
	}`
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		for i, path := range []string{"/", "/inner", "/named", "/error", "/"} {
			wantHeaders(t, n.Get(path), map[string]string{"X-RateLimit-Remaining": strconv.Itoa(9 - i)})
		}
	})
}
