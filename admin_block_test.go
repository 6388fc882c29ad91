package ratelimit

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file blocks and lets go by hand, the way that operators do: on real nodes, by the admin endpoint.

// tell sends an act to the admin endpoint and reads the answer into result, unless that is nil.
func tell(t *testing.T, n *node.Node, act, body string, status int, result any) string {
	t.Helper()
	answer := n.Admin("POST", "/rate_limit/"+act, body)
	if answer.Status != status {
		t.Fatalf("%s %s: status %d: %s", act, body, answer.Status, answer.Body)
	}
	if result != nil {
		if err := json.Unmarshal([]byte(answer.Body), result); err != nil {
			t.Fatalf("%s: %v in %s", act, err, answer.Body)
		}
	}
	return answer.Body
}

// A block by hand holds at once and to its end, on all zones of the group; again, its end is another; lifting it leaves nothing
// but an amnesty, in which refusals are no strikes.
func TestBlockByHand(t *testing.T) {
	config := sites(
		"penalty {\n after 1\n}\nzone a {\n rate 1/h\n burst 3\n}\nzone b {\n match path /ab\n store memory\n rate 1/h\n burst 50\n}",
		"penalty other {\n after 0\n}\nzone c {\n rate 1/h\n burst 2\n}",
	)
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		const client = "X-Forwarded-For: 2001:db8::7"
		wantReasons(t, n, "ok", "/a", client)
		var done blockResult
		tell(t, n, "block", `{"zone":"a","key":"2001:db8::1:2","for":"2h"}`, 200, &done)
		if rest := time.Until(done.Until); rest < 119*time.Minute || rest > 2*time.Hour {
			t.Errorf("blocked until %s", done.Until)
		}
		wantReasons(t, n, "blocked blocked", "/a", client)
		wantReasons(t, n, "blocked", "/ab", client)
		wantReasons(t, n, "ok", "/b", client) // another group
		wantReasons(t, n, "ok", "/a", "X-Forwarded-For: 2001:db8:1::7")
		for _, b := range awaitBlocks(t, n, len(done.Stores)) {
			if b.ID != done.ID || !b.ByHand || b.Until.Sub(done.Until).Abs() > time.Second {
				t.Errorf("listed %+v, want %+v", b, done)
			}
		}
		var again blockResult
		tell(t, n, "block", fmt.Sprintf(`{"id":%q,"group":"","for":"1d"}`, done.ID), 200, &again)
		tell(t, n, "block", fmt.Sprintf(`{"id":%q,"group":"","for":"30m"}`, done.ID), 200, &again)
		if rest := time.Until(again.Until); rest > 30*time.Minute || rest < 29*time.Minute {
			t.Errorf("blocked again until %s", again.Until)
		}
		if wait := n.Get("/a", client).Header.Get("Retry-After"); wait != "1800" && wait != "1799" {
			t.Errorf("Retry-After %q", wait)
		}
		awaitBlocks(t, n, len(done.Stores))

		var lifted unblockResult
		tell(t, n, "unblock", `{"zone":"a","key":"2001:db8::7","amnesty":"10m"}`, 200, &lifted)
		if lifted.Forgotten != len(done.Stores) || lifted.Amnesty == nil || time.Until(*lifted.Amnesty) > 10*time.Minute {
			t.Errorf("unblocked: %+v", lifted)
		}
		awaitBlocks(t, n, 0)
		wantReasons(t, n, "ok ok limited limited limited limited", "/a", client) // a block took no tokens
		tell(t, n, "unblock", `{"zone":"a","key":"2001:db8::7"}`, 200, &lifted)
		wantReasons(t, n, "limited blocked", "/a", client)
		if lines := n.LogLines(`"by":"admin"`); lines != 5 {
			t.Errorf("%d lines of what the operator did, want 5", lines)
		}
	})
}

// What cannot be done is said, with what would be right.
func TestBlockByHandErrors(t *testing.T) {
	config := sites(
		"penalty {\n after 1\n}\nzone a {\n rate 9/h\n}\nzone constant {\n match path /ac\n key {host}\n rate 1/h\n}",
		"zone b {\n rate 1/h\n}",
		"penalty dry {\n dry_run\n}\nzone c {\n rate 1/h\n}",
		"penalty other {\n}\nzone a {\n rate 9/h\n}\nzone d {\n rate 9/h\n}",
	)
	n := node.Start(t, strings.ReplaceAll(config, "{$STORE}", "redis off"))
	for _, row := range []struct {
		act, body string
		status    int
		want      string
	}{
		{"block", `{"zone":"d","key":"192.0.2.1"}`, 400, `for must be a duration`},
		{"block", `{"zone":"d","key":"192.0.2.1","for":"0s"}`, 400, `for must be a duration`},
		{"block", `{"zone":"d","key":"192.0.2.1","for":"-1h"}`, 400, `for must be a duration`},
		{"block", `{"zone":"d","key":"192.0.2.1","for":"31d"}`, 400, `at most 720h`},
		{"block", `{"zone":"d","for":"1h"}`, 400, "name either an id, or a zone and a key"},
		{"block", `{"zone":"x","key":"192.0.2.1","for":"1h"}`, 404, `there is no zone "x"`},
		{"block", `{"zone":"b","key":"192.0.2.1","for":"1h"}`, 409, `no handler with the zone "b" blocks anybody`},
		{"block", `{"zone":"c","key":"192.0.2.1","for":"1h"}`, 409, `without dry_run`},
		{"block", `{"zone":"constant","key":"h","for":"1h"}`, 409, `a key that holds the client`},
		{"block", `{"zone":"d","key":"192.0.2.1","for":"1h","group":""}`, 409, `in the penalty group ""`},
		{"block", `{"zone":"d","key":"192.0.2.1","for":"1h","group":"x"}`, 404, `there is no penalty group "x" (groups: "", "dry", "other")`},
		{"block", `{"zone":"a","key":"192.0.2.1","for":"1h"}`, 400, `several penalty groups ("", "other")`},
		{"block", `{"id":"AAAAAAAAAAAAAAAAAAAAAA","for":"1h"}`, 400, `several penalty groups ("", "other")`},
		{"unblock", `{"zone":"a","key":"192.0.2.1","amnesty":"25h"}`, 400, "amnesty must be a duration"},
		{"unblock", `{"zone":"a","key":"192.0.2.1","group":"x"}`, 404, `there is no penalty group "x"`},
	} {
		var text struct{ Error string }
		if tell(t, n, row.act, row.body, row.status, &text); !strings.Contains(text.Error, row.want) {
			t.Errorf("%s %s: %s, want %s", row.act, row.body, text.Error, row.want)
		}
	}
	wantReasons(t, n, "ok", "/d")
	tell(t, n, "block", `{"zone":"a","key":"127.0.0.1","for":"1h","group":"other"}`, 200, nil)
	wantReasons(t, n, "blocked", "/d")
	wantReasons(t, n, "ok", "/a")
}

// hammer requests a path without a pause, until the test ends, and says since when all answers have been of a kind.
type hammer struct {
	mu      sync.Mutex
	reason  string
	since   time.Time // when the first answer with that reason in a row was asked for
	answers atomic.Int64
}

func startHammer(t *testing.T, n *node.Node, path string) *hammer {
	h := &hammer{reason: "none yet"}
	stop := make(chan struct{})
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				begun := time.Now()
				if answer, err := n.Try("GET", path, ""); err == nil {
					h.note(begun, answer.Header.Get("X-RateLimit-Reason"))
				}
			}
		})
	}
	t.Cleanup(func() { close(stop); work.Wait() })
	return h
}

func (h *hammer) note(begun time.Time, reason string) {
	h.answers.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if reason != h.reason {
		h.reason, h.since = reason, begun
	}
}

// sees waits until the client gets answers of a kind, and returns when the first of them was asked for.
func (h *hammer) sees(t *testing.T, reason string) (since time.Time) {
	t.Helper()
	proc.Eventually(t, fmt.Sprintf("the client sees %q", reason), func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		since = h.since
		return h.reason == reason
	})
	return since
}

// An operator acts on one node; the other follows within the time in which a known block is asked about, while the client hammers
// it, with leases and without.
func TestBlockByHandReachesOtherNodes(t *testing.T) {
	for _, lease := range []string{"", "lease auto"} {
		redis := redistest.Start(t)
		zone := "penalty {\n after 1\n}\nzone a {\n rate 100000/s\n burst 200000\n " + lease + "\n}"
		config := strings.ReplaceAll(sites(zone), "{$STORE}", patientRedis+"nodes 2")
		a, b := node.Start(t, config, node.Env("REDIS", redis.Addr())), node.Start(t, config, node.Env("REDIS", redis.Addr()))
		client := startHammer(t, b, "/a")
		client.sees(t, "")
		for range 2 {
			acted := time.Now()
			tell(t, a, "block", `{"zone":"a","key":"127.0.0.1","for":"10m"}`, 200, nil)
			blocked := client.sees(t, "blocked").Sub(acted)
			wantReasons(t, a, "blocked", "/a")
			before := client.answers.Load()
			proc.Eventually(t, "the client goes on", func() bool { return client.answers.Load() > before+1000 })
			client.sees(t, "blocked")

			acted = time.Now()
			tell(t, a, "unblock", `{"zone":"a","key":"127.0.0.1"}`, 200, nil)
			freed := client.sees(t, "").Sub(acted)
			wantReasons(t, a, "ok", "/a")
			t.Logf("%s: a block acts on the other node after %s, lifting it after %s", lease, blocked.Round(time.Millisecond), freed.Round(time.Millisecond))
			if most := micro(recheckEvery) + 2*time.Second; blocked > most || freed > most {
				t.Errorf("the block acted after %s, lifting it after %s, want at most 5 s, and what a busy machine takes", blocked, freed)
			}
		}
	}
}

// While Redis is down, an operator acts on this node, and is told what was not done.
func TestByHandWhileRedisIsDown(t *testing.T) {
	c := newCutOff(t, 1, "nodes 1", fmt.Sprintf(clientZone, "20", ""))
	n := c.nodes[0]
	failed := func(act, body, want string) {
		t.Helper()
		var text struct{ Error string }
		if tell(t, n, act, body, 503, &text); !strings.Contains(text.Error, want) {
			t.Errorf("%s: %s, want %s", act, text.Error, want)
		}
	}
	c.want(t, "before", c.answers(0, 1, "bad"), "200", 1)
	c.during(t, func() {
		failed("block", `{"zone":"api","key":"bad","for":"1h"}`, "on this node the block holds")
		c.want(t, "who is blocked here", c.answers(0, 20, "bad"), "429blocked", 20)
		failed("unblock", `{"zone":"api","key":"bad"}`, "other nodes still block")
		c.want(t, "who is let go here", c.answers(0, 5, "bad"), "200", 5)
		failed("block", `{"zone":"api","key":"bad","for":"1h"}`, "not blocked in redis")
	})
	proc.Eventually(t, "the node asks Redis, which was never told of the block", func() bool { return c.answers(0, 1, "bad")["200"] == 1 })
	tell(t, n, "block", `{"zone":"api","key":"bad","for":"1h"}`, 200, nil)
	c.during(t, func() { c.want(t, "a block by hand", c.answers(0, 20, "bad"), "429blocked", 20) })
	c.want(t, "a block by hand", c.answers(0, 20, "bad"), "429blocked", 20)
	checkKeys(t, c.redis, 31*24*time.Hour, "bad")
}

// Whoever blocks an attacker by hand while Redis is down does not free him: neither when the shorter block ends, nor where Redis has
// lost the one for strikes meanwhile.
func TestShortBlockByHandFreesNobody(t *testing.T) {
	c := newCutOff(t, 1, "nodes 1", fmt.Sprintf(clientZone, "20", ""))
	n := c.nodes[0]
	c.want(t, "strikes", c.answers(0, 24, "bad"), "429blocked", 1)
	before := awaitBlocks(t, n, 1)[0]
	c.during(t, func() {
		text := tell(t, n, "block", `{"zone":"api","key":"bad","for":"1ms"}`, 503, nil)
		c.want(t, text, c.answers(0, 5, "bad"), "429blocked", 5)
		if known := inspected(t, n, "api", `"bad"`); known.KnownUntil == nil || known.KnownUntil.Sub(before.Until).Abs() > time.Second {
			t.Errorf("known until %v, want %s", known.KnownUntil, before.Until)
		}
		c.redis.Do("flushall")
	})
	awaited := time.Now().Add(micro(recheckEvery))
	proc.Eventually(t, "the node has asked again", func() bool { c.answers(0, 1, "bad"); return time.Now().After(awaited) })
	c.want(t, "Redis has lost the block", c.answers(0, 5, "bad"), "429blocked", 5)
	awaitBlocks(t, n, 1)
}

// One penalty group on two Redis: what one told of a client is not asked of the other, nor does lifting it there end it here.
func TestPenaltyGroupOnTwoRedis(t *testing.T) {
	first, second := redistest.Start(t), redistest.Start(t)
	config := sites(
		"redis {$FIRST} {\n timeout 1s\n sensitive_timeout 1s\n}\npenalty {\n after 0\n}\nzone a {\n rate 1/h\n burst 1\n}",
		"redis {$SECOND} {\n timeout 1s\n sensitive_timeout 1s\n}\npenalty {\n after 0\n}\nzone b {\n rate 1/h\n burst 2\n}",
	)
	n := node.Start(t, strings.ReplaceAll(config, "{$STORE}", "nodes 1"), node.Env("FIRST", first.Addr()), node.Env("SECOND", second.Addr()))
	wantReasons(t, n, "ok blocked blocked", "/a")
	wantReasons(t, n, "ok ok blocked blocked", "/b") // its own strikes
	awaitBlocks(t, n, 2)
	var lifted unblockResult
	if tell(t, n, "unblock", `{"zone":"a","key":"127.0.0.1"}`, 200, &lifted); lifted.Forgotten != 2 {
		t.Errorf("unblocked: %+v", lifted)
	}
	awaitBlocks(t, n, 0)
	tell(t, n, "block", `{"zone":"a","key":"127.0.0.1","for":"1h"}`, 200, nil)
	awaitBlocks(t, n, 2)
	wantReasons(t, n, "blocked", "/a")
	wantReasons(t, n, "blocked", "/b")
	for _, s := range []*redistest.Server{first, second} {
		if n := s.Do("zcard", "tollgate:blocks"); n != int64(1) {
			t.Errorf("%v blocks are listed, want one in each Redis", n)
		}
	}
}
