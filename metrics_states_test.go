package ratelimit

import (
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// wantMetrics holds that series have values.
func wantMetrics(t *testing.T, n *node.Node, want exposed) {
	t.Helper()
	got := exposedBy(t, n)
	for series, value := range want {
		if shown, known := got[series]; !known || shown != value {
			t.Errorf("%s is %v (shown: %v), want %v", series, shown, known, value)
		}
	}
}

// An outage is seen while it lasts, and can be counted afterwards. Two clients for one Redis, here one with another timeout, are
// one Redis to whoever looks.
func TestMetricsOfAnOutage(t *testing.T) {
	server := redistest.Start(t)
	const config = "{\n admin {$ADMIN}\n rate_limit {\n redis {$REDIS} {\n timeout 5s\n }\n nodes 4\n }\n}\nhttp://:{$PORT} {\n" +
		"rate_limit {\n zone api {\n rate 1/h\n burst 8\n }\n}\n" +
		"rate_limit /login {\n redis {$REDIS} {\n timeout 4s\n sensitive_timeout 4s\n }\n zone login {\n rate 1/h\n burst 8\n sensitive\n }\n}\nrespond ok\n}\n"
	n := node.Start(t, config, node.Env("REDIS", server.Addr()))
	proc.Eventually(t, "both clients are up", func() bool { return n.LogLines("redis is up") == 2 })
	redis := `redis="` + server.Addr() + `/0"`
	if all := statuses(n, 1, "/"); count(all, 200) != 1 {
		t.Fatal(all)
	}
	wantMetrics(t, n, exposed{
		"store_up{" + redis + "}": 1, "store_outages_total{" + redis + "}": 0, "store_calls_total{" + redis + "}": 1,
		"store_call_duration_seconds{" + redis + "}": 1, "nodes{" + redis + "}": 4, "node_share{" + redis + "}": 0.25,
		`decisions_total{result="allowed",source="redis",zone="api"}`: 1,
	})

	server.Kill()
	up := func() float64 { return exposedBy(t, n)["store_up{"+redis+"}"] }
	proc.Eventually(t, "the outage is seen", func() bool { n.Get("/login"); return up() == 0 })
	before := exposedBy(t, n)
	if all := statuses(n, 3, "/"); count(all, 200)+count(all, 429) != 3 {
		t.Errorf("without Redis: %v", all)
	}
	if all := statuses(n, 2, "/login"); count(all, 503) != 2 {
		t.Errorf("a sensitive zone without Redis: %v", all)
	}
	grown := exposedBy(t, n).since(before)
	shares := grown[`decisions_total{result="allowed",source="share",zone="api"}`] + grown[`decisions_total{result="limited",source="share",zone="api"}`]
	if shares != 3 || grown[`decisions_total{result="unavailable",source="none",zone="login"}`] != 2 {
		t.Errorf("without Redis grew %v", grown)
	}
	after := exposedBy(t, n)
	failures := after[`store_errors_total{class="connection",`+redis+"}"] + after[`store_errors_total{class="timeout",`+redis+"}"]
	if failures == 0 || after["store_outages_total{"+redis+"}"] == 0 || after["memory_entries{table=\"share_buckets\"}"] != 1 {
		t.Errorf("an outage leaves %v", after)
	}

	server.Restart()
	proc.Eventually(t, "the end of the outage is seen", func() bool { n.Get("/"); n.Get("/login"); return up() == 1 })
}

// What a pool holds, and what it refuses, is seen, and what only a dry run lets pass.
func TestMetricsOfPools(t *testing.T) {
	address, waiting, release := backend(t)
	config := func(more string) string {
		return "{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n rate_limit {\n redis off\n exempt /free\n shed 1 {\n pool small\n }\n" + more + "\n }\n header Config \"" + more + "\"\n reverse_proxy " + address + "\n}\n"
	}
	n := node.Start(t, config(""))
	var wg sync.WaitGroup
	wg.Go(func() {
		if answer, err := n.Try(http.MethodGet, "/slow", ""); err != nil || answer.Status != http.StatusOK {
			t.Errorf("got %+v, %v", answer, err)
		}
	})
	proc.Eventually(t, "a request is in flight", func() bool { return waiting.Load() == 1 })
	if all := statuses(n, 3, "/"); count(all, 503) != 3 {
		t.Errorf("with one in flight: %v", all)
	}
	wantMetrics(t, n, exposed{
		`in_flight{pool="small"}`: 1, `in_flight_limit{pool="small"}`: 1, `decisions_total{result="shed",source="none",zone=""}`: 3,
		`would_deny_total{reason="overloaded",zone=""}`: 0,
	})
	if err := n.Load(config("dry_run")); err != nil {
		t.Fatal(err)
	}
	proc.Eventually(t, "the dry run is served", func() bool { return n.Get("/free").Header.Get("Config") == "dry_run" })
	if all := statuses(n, 2, "/"); count(all, 200) != 2 {
		t.Errorf("in a dry run: %v", all)
	}
	wantMetrics(t, n, exposed{
		`in_flight{pool="small"}`: 1, `would_deny_total{reason="overloaded",zone=""}`: 2, `decisions_total{result="shed",source="none",zone=""}`: 3,
	})
	close(release)
	wg.Wait()
}

// A dry run of the penalty counts the strikes, and those that would have been blocks.
func TestMetricsOfADryPenalty(t *testing.T) {
	onEveryNode(t, site("{$STORE}", "zone api {\n rate 1/h\n burst 1\n}\npenalty {\n after 3\n dry_run\n}"), func(t *testing.T, n *node.Node) {
		if all := statuses(n, 6, "/"); count(all, 200) != 1 || count(all, 429) != 5 {
			t.Errorf("got %v", all)
		}
		wantMetrics(t, n, exposed{
			`strikes_total{zone="api"}`: 5, `blocks_total{zone="api"}`: 0, `would_deny_total{reason="blocked",zone="api"}`: 2,
			`would_deny_total{reason="limited",zone="api"}`: 0,
		})
	})
}

// What is forgotten because there is no room is counted.
func TestMetricsOfEvictions(t *testing.T) {
	n := node.Start(t, site("max_keys 2\nredis off", "zone api {\n key {query.who}\n rate 1/h\n}"))
	for _, who := range []string{"a", "b", "c"} {
		n.Get("/?who=" + who)
	}
	wantMetrics(t, n, exposed{"memory_evictions_total{}": 1, `memory_entries{table="buckets"}`: 2, `memory_entries{table="strikes"}`: 0})
}

// What a configuration does not have is not shown; what it has again begins at zero.
func TestMetricsVanishWithTheirZone(t *testing.T) {
	config := func(zone string) string { return site("redis off", "zone "+zone+" {\n rate 1/h\n burst 3\n}") }
	n := node.Start(t, config("one"))
	shows := func(zone string) (requests float64, series int) {
		all := exposedBy(t, n)
		for name := range all {
			if strings.Contains(name, `zone="`+zone+`"`) {
				series++
			}
		}
		return all[`zone_requests_total{zone="`+zone+`"}`], series
	}
	for _, step := range []struct{ zone, other string }{{"one", "two"}, {"two", "one"}, {"one", "two"}} {
		if err := n.Load(config(step.zone)); err != nil {
			t.Fatal(err)
		}
		if _, series := shows(step.other); series > 0 {
			t.Errorf("%s is gone, and has %d series", step.other, series)
		}
		if requests, series := shows(step.zone); requests != 0 || series == 0 {
			t.Errorf("%s has %d series and counts %v requests", step.zone, series, requests)
		}
		proc.Eventually(t, "a request is counted", func() bool {
			n.Get("/")
			requests, _ := shows(step.zone)
			return requests > 0
		})
	}
	before, _ := shows("one")
	if err := n.Load(config("two") + "http://:{$PORT}1000 {\n}\n"); err == nil {
		t.Fatal("a port above 65535 is accepted")
	}
	if requests, series := shows("one"); requests != before || series == 0 {
		t.Errorf("a configuration was rejected, and the one that runs has %d series and counts %v requests, not %v", series, requests, before)
	}
}

// Errors have few names, whatever a server says.
func TestErrorNames(t *testing.T) {
	for text, want := range map[string]string{
		"OOM command not allowed": "oom", "READONLY You can't write": "readonly", "WRONGTYPE Operation": "wrongtype",
		"ERR Error running script (call to f_x): @user_script:1: nil": "script", "ERR unknown command": "other", "SURPRISE": "other",
	} {
		if got := errorName(replyError(text)); got != want {
			t.Errorf("%s is %q, want %q", text, got, want)
		}
	}
	for err, want := range map[error]string{errTimeout: "timeout", errReply: "reply", errors.New("EOF"): "connection"} {
		if got := errorName(err); got != want {
			t.Errorf("%v is %q, want %q", err, got, want)
		}
	}
}

// After a configuration is rejected, Caddy's endpoint shows the registry of that one. However early it was rejected, ours are there.
func TestMetricsAfterARejectedConfiguration(t *testing.T) {
	n := node.Start(t, "{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n rate_limit {\n zone api {\n rate 1/h\n burst 8\n }\n }\n respond ok\n}\n")
	n.Get("/")
	allowed := exposed{`decisions_total{result="allowed",source="memory",zone="api"}`: 1}
	wantMetrics(t, n, allowed)
	for why, config := range map[string]string{
		"an app cannot be decoded":     `{"admin":{"listen":"` + n.AdminAddr() + `"},"apps":{"rate_limit":{"zones":{"api":{"rate":"100/x"}}}}}`,
		"there is no such app":         `{"admin":{"listen":"` + n.AdminAddr() + `"},"apps":{"rate_limits":{}}}`,
		"an app cannot be provisioned": `{"admin":{"listen":"` + n.AdminAddr() + `"},"apps":{"rate_limit":{"key_secret":"{env.NOWHERE}"}}}`,
	} {
		if answer := n.Admin(http.MethodPost, "/load", config); answer.Status != http.StatusBadRequest {
			t.Fatalf("%s: %+v", why, answer)
		}
		wantMetrics(t, n, allowed)
	}
}
