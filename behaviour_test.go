package ratelimit

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// onEveryNode runs a test of what clients see on a node with buckets in memory and on one with buckets in Redis. The Caddyfile
// gets {$STORE} replaced.
func onEveryNode(t *testing.T, caddyfile string, test func(t *testing.T, n *node.Node)) {
	t.Helper()
	t.Run("memory", func(t *testing.T) {
		test(t, node.Start(t, strings.ReplaceAll(caddyfile, "{$STORE}", "redis off")))
	})
	t.Run("redis", func(t *testing.T) {
		redis := redistest.Start(t)
		config := strings.ReplaceAll(caddyfile, "{$STORE}", "redis {$REDIS} {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1")
		test(t, node.Start(t, config, node.Env("REDIS", redis.Addr())))
		checkKeys(t, redis, 400*24*time.Hour, "127.0.0.1", "alice", "bob")
	})
}

// statuses gets a path n times.
func statuses(n *node.Node, times int, path string, headers ...string) (all []int) {
	for range times {
		all = append(all, n.Get(path, headers...).Status)
	}
	return all
}

// count returns how often a status stands among them.
func count(all []int, status int) (n int) {
	for _, s := range all {
		if s == status {
			n++
		}
	}
	return n
}

func wantHeaders(t *testing.T, answer *node.Response, want map[string]string) {
	t.Helper()
	for name, value := range want {
		if got := strings.Join(answer.Header.Values(name), "|"); got != value {
			t.Errorf("header %s is %q, want %q", name, got, value)
		}
	}
}

func TestAnswers(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/m\n burst 2\n}\nheaders on\nreset delta"), func(t *testing.T, n *node.Node) {
		first := n.Get("/")
		wantHeaders(t, first, map[string]string{
			"X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "1", "X-RateLimit-Reset": "60",
			"Retry-After": "", "X-RateLimit-Reason": "",
		})
		n.Get("/")
		refused := n.Get("/")
		if refused.Status != http.StatusTooManyRequests {
			t.Fatalf("status %d", refused.Status)
		}
		wait, err := strconv.Atoi(refused.Header.Get("Retry-After"))
		if err != nil || wait < 55 || wait > 60 {
			t.Errorf("told to wait %q s", refused.Header.Get("Retry-After"))
		}
		if want := `{"error":"rate_limited","retry_after":` + strconv.Itoa(wait) + `}`; refused.Body != want {
			t.Errorf("body %s, want %s", refused.Body, want)
		}
		wantHeaders(t, refused, map[string]string{
			"Content-Type": "application/json", "Cache-Control": "no-store", "X-RateLimit-Reason": "limited", "X-RateLimit-Remaining": "0",
		})
	})
}

func TestResetIsWhenTheBucketIsFull(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/m\n burst 10\n}"), func(t *testing.T, n *node.Node) {
		before := time.Now().Unix()
		reset, err := strconv.ParseInt(n.Get("/").Header.Get("X-RateLimit-Reset"), 10, 64)
		if after := time.Now().Unix(); err != nil || reset < before+60 || reset > after+61 {
			t.Errorf("full at %d, asked between %d and %d", reset, before, after)
		}
	})
}

// Retry-After is true: who is alone on a bucket and waits exactly so long succeeds.
func TestWaitingAsToldSucceeds(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 30/m\n burst 1\n}"), func(t *testing.T, n *node.Node) {
		n.Get("/")
		refused := n.Get("/")
		wait, err := strconv.Atoi(refused.Header.Get("Retry-After"))
		if err != nil || wait < 1 {
			t.Fatalf("told to wait %q s", refused.Header.Get("Retry-After"))
		}
		<-time.After(time.Duration(wait) * time.Second) // the subject is real time
		if answer := n.Get("/"); answer.Status != http.StatusOK {
			t.Errorf("status %d after waiting %d s as told", answer.Status, wait)
		}
	})
}

func TestExemptCostsNothing(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "exempt /healthz\nexempt /readyz*\nzone api {\n rate 1/h\n burst 3\n cost 0 /free\n cost 2 /dear*\n}"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 20, "/healthz"); count(all, 200) != 20 {
			t.Errorf("health checks: %v", all)
		}
		if answer := n.Get("/readyz/x"); answer.Header.Get("X-RateLimit-Limit") != "" {
			t.Error("an exempt request shows a limit")
		}
		if all := statuses(n, 20, "/free"); count(all, 200) != 20 {
			t.Errorf("cost 0: %v", all)
		}
		if all := statuses(n, 3, "/dear/1"); count(all, 200) != 1 {
			t.Errorf("cost 2 of 3: %v", all)
		}
		if all := statuses(n, 3, "/"); count(all, 200) != 1 {
			t.Errorf("cost 1 of what is left: %v", all)
		}
	})
}

// Reads and writes have buckets of their own.
func TestClassesDoNotStarveEachOther(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone reads {\n match method GET\n rate 1/h\n burst 2\n}\nzone writes {\n match not method GET\n rate 1/h\n burst 2\n}"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 20, "/"); count(all, 200) != 2 {
			t.Errorf("reads: %v", all)
		}
		if answer, err := n.Try("POST", "/", ""); err != nil || answer.Status != 200 {
			t.Errorf("a write after a storm of reads: %+v, %v", answer, err)
		}
	})
}

func TestBlocks(t *testing.T) {
	config := site("{$STORE}", "penalty {\n after 2\n}\nzone api {\n rate 1/h\n burst 1\n}\nzone other {\n match path /other\n rate 1/h\n burst 5\n}\nzone free {\n match path /free\n rate 1/h\n penalty off\n}")
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		if all := statuses(n, 3, "/"); count(all, 200) != 1 {
			t.Fatalf("got %v", all)
		}
		starts := n.Get("/") // the third strike
		wantHeaders(t, starts, map[string]string{"Retry-After": "120", "X-RateLimit-Reason": "blocked", "X-RateLimit-Remaining": "0"})
		if starts.Status != 429 || starts.Body != `{"error":"rate_limited","retry_after":120}` {
			t.Errorf("got %+v", starts)
		}
		if err := n.Load(config2(config, n)); err != nil {
			t.Fatal(err)
		}
		blocked := n.Get("/other")
		wantHeaders(t, blocked, map[string]string{"X-RateLimit-Reason": "blocked"})
		if wait, _ := strconv.Atoi(blocked.Header.Get("Retry-After")); wait < 110 || wait > 120 {
			t.Errorf("told to wait %d s", wait)
		}
	})
}

// config2 is the configuration that the node has, with a comment.
func config2(config string, n *node.Node) string {
	store := "redis off"
	if n.LogLines("redis is up") > 0 {
		store = "redis {$REDIS} {\n timeout 5s\n sensitive_timeout 5s\n}\nnodes 1"
	}
	return "# loaded again\n" + strings.ReplaceAll(config, "{$STORE}", store)
}

// The directive stands before basic_auth by itself, and a second time after it; a zone in both charges once.
func TestBeforeAndAfterAuth(t *testing.T) {
	const config = `{
		admin {$ADMIN}
		rate_limit {
			{$STORE}
			zone coarse {
				rate 1/h
				burst 10
			}
		}
	}
	(limits) {
		rate_limit {
			zone {args[0]}
		}
	}
	&(api) {
		respond "hello {http.auth.user.id}"
	}
	http://:{$PORT} {
		basic_auth /private/* {
			alice $2a$04$9wWTwUjqpHv.uEuo2qEsleCkjG4P3GwAywgxj88seqKe/bqGgIcaG
			bob $2a$04$9wWTwUjqpHv.uEuo2qEsleCkjG4P3GwAywgxj88seqKe/bqGgIcaG
		}
		import limits coarse
		handle /private/* {
			rate_limit {
				zone coarse
				zone user {
					key {http.auth.user.id}
					rate 1/h
					burst 2
				}
			}
			invoke api
		}
		respond public
	}`
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		const alice, bob = "Authorization: Basic YWxpY2U6aGljY3Vw", "Authorization: Basic Ym9iOmhpY2N1cA=="
		answer := n.Get("/private/x", alice)
		wantHeaders(t, answer, map[string]string{"X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "1"}) // the tighter one
		if answer.Body != "hello alice" {
			t.Fatalf("got %+v", answer)
		}
		if all := statuses(n, 3, "/private/x", alice); count(all, 200) != 1 || count(all, 429) != 2 {
			t.Errorf("alice: %v", all)
		}
		if status := n.Get("/private/x", bob).Status; status != 200 {
			t.Errorf("bob has a bucket of his own: status %d", status)
		}
		wantHeaders(t, n.Get("/private/x"), map[string]string{"X-RateLimit-Remaining": "4"}) // 401, and counted: 6 of 10 so far
		if all := statuses(n, 10, "/"); count(all, 200) != 4 {
			t.Errorf("what the coarse limit has left: %v", all)
		}
	})
}

func TestMatcherOfTheDirective(t *testing.T) {
	const config = "{\n admin {$ADMIN}\n rate_limit {\n {$STORE}\n }\n}\nhttp://:{$PORT} {\n rate_limit /api/* {\n zone api {\n rate 1/h\n burst 2\n }\n }\n respond ok\n}"
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		if all := statuses(n, 10, "/"); count(all, 200) != 10 {
			t.Errorf("outside the matcher: %v", all)
		}
		if all := statuses(n, 10, "/api/x"); count(all, 200) != 2 {
			t.Errorf("inside: %v", all)
		}
	})
}

// A zone that stays in the process and one in Redis are charged together or not at all.
func TestMemoryZoneBesideRedis(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone coarse {\n rate 1/h\n burst 10\n store memory\n}\nzone fine {\n match not path /coarse\n rate 1/h\n burst 4\n}"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 20, "/"); count(all, 200) != 4 {
			t.Errorf("got %v", all)
		}
		if all := statuses(n, 20, "/coarse"); count(all, 200) != 6 {
			t.Errorf("what the zone in the process has left: %v, want 6", all)
		}
	})
}

func TestQuietZone(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone login {\n rate 1/h\n burst 1\n headers off\n}"), func(t *testing.T, n *node.Node) {
		for _, status := range []int{200, 429} {
			answer := n.Get("/")
			if answer.Status != status {
				t.Errorf("status %d, want %d", answer.Status, status)
			}
			wantHeaders(t, answer, map[string]string{"X-RateLimit-Limit": "", "X-RateLimit-Remaining": "", "X-RateLimit-Reset": ""})
		}
	})
}

func TestDryRunRefusesNobody(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/h\n burst 1\n dry_run\n}\npenalty\nshed 1"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 20, "/"); count(all, 200) != 20 {
			t.Errorf("got %v", all)
		}
	})
}

func TestHeadIsLikeGet(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/h\n burst 1\n}"), func(t *testing.T, n *node.Node) {
		n.Get("/")
		answer, err := n.Try(http.MethodHead, "/", "")
		if err != nil || answer.Status != 429 || answer.Body != "" || answer.Header.Get("Retry-After") != "3600" {
			t.Errorf("got %+v, %v", answer, err)
		}
	})
}

// backend is an upstream that holds requests to /slow until they are released, and cuts those to /cut.
func backend(t *testing.T) (address string, waiting *atomic.Int64, release chan struct{}) {
	t.Helper()
	waiting, release = new(atomic.Int64), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/slow":
			waiting.Add(1)
			defer waiting.Add(-1)
			select {
			case <-release:
			case <-r.Context().Done():
			}
		case "/cut":
			w.Header().Set("Content-Length", "1000")
			_, _ = w.Write([]byte("begun"))
			panic(http.ErrAbortHandler)
		}
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://"), waiting, release
}

// A slot is held by a request, not by a configuration, and comes back however the request ends.
func TestSlotsOverReloadsAndAborts(t *testing.T) {
	address, waiting, release := backend(t)
	config := func(comment string) string {
		return "{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n rate_limit {\n redis off\n exempt /healthz\n shed 2 {\n retry_after 7s\n }\n }\n reverse_proxy " + address + "\n}\n# " + comment
	}
	n := node.Start(t, config("first"))
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if answer, err := n.Try(http.MethodGet, "/slow", ""); err != nil || answer.Status != http.StatusOK {
				t.Errorf("got %+v, %v", answer, err)
			}
		})
	}
	proc.Eventually(t, "two requests are in flight", func() bool { return waiting.Load() == 2 })
	for i := range 3 {
		shed := n.Get("/")
		if shed.Status != http.StatusServiceUnavailable || shed.Body != `{"error":"overloaded","retry_after":7}` {
			t.Errorf("with two in flight: %+v", shed)
		}
		wantHeaders(t, shed, map[string]string{"Retry-After": "7", "X-RateLimit-Reason": "overloaded"})
		if status := n.Get("/healthz").Status; status != http.StatusOK {
			t.Errorf("health check: status %d", status)
		}
		if err := n.Load(config(strconv.Itoa(i))); err != nil {
			t.Fatal(err)
		}
	}
	close(release)
	wg.Wait()
	for range 20 { // would need 20 slots if those of cut requests were lost
		_, _ = n.Try(http.MethodGet, "/cut", "")
	}
	proc.Eventually(t, "all slots are back", func() bool { return n.Get("/").Status == http.StatusOK })
	if lines := n.LogLines(`"level":"error","ts"`); lines > 20 { // the upstream's, one for each that was cut
		t.Errorf("%d ERROR lines", lines)
	}
}
