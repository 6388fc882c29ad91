package ratelimit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// asked posts a body, or gets a path without one, and returns the answer of a type.
func asked[T any](t *testing.T, n *node.Node, path, body string) (info T) {
	t.Helper()
	method := http.MethodPost
	if body == "" {
		method = http.MethodGet
	}
	answer := n.Admin(method, "/rate_limit/"+path, body)
	if err := json.Unmarshal([]byte(answer.Body), &info); err != nil || answer.Status != 200 {
		t.Fatalf("%s %s: status %d: %s", path, body, answer.Status, answer.Body)
	}
	return info
}

// inspected returns the state of a client, whose key is given as JSON.
func inspected(t *testing.T, n *node.Node, zone, key string) clientInfo {
	t.Helper()
	return asked[clientInfo](t, n, "inspect", fmt.Sprintf(`{"zone":%q,"key":%s}`, zone, key))
}

// The state of a client is found by any address of his network or by id, and is what his next request finds. A reset gives the
// bucket back, at once, and leaves strikes alone.
func TestInspectAndReset(t *testing.T) {
	config := sites("penalty strict {\n after 2\n}\nzone a {\n rate 1/h\n burst 4\n}", "zone b {\n key {header.X-Tenant}-{header.X-Api-Key}\n rate 6/m\n burst 3\n}")
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		const client = "X-Forwarded-For: 2001:db8::7"
		const address = `"2001:db8::ffff:1"`
		fresh := inspected(t, n, "a", address)
		if fresh.Remaining != 4 || fresh.Limit != 4 || fresh.Reset != nil || fresh.Strikes != 0 || fresh.Group == nil || *fresh.Group != "strict" || fresh.Rate != "1/h" {
			t.Errorf("somebody new: %+v", fresh)
		}
		wantReasons(t, n, "ok ok ok", "/a", client)
		begun := time.Now()
		some := inspected(t, n, "a", address)
		if again := asked[clientInfo](t, n, "inspect", `{"zone":"a","id":"`+some.ID+`"}`); int(again.Remaining) != 1 || again.ID != some.ID {
			t.Errorf("by id: %+v", again)
		}
		if some.Remaining < 1 || some.Remaining > 1.1 || some.Reset == nil || some.Reset.Sub(begun).Round(time.Minute) != 3*time.Hour {
			t.Errorf("three requests later: %+v", some)
		}
		wantReasons(t, n, "ok limited limited", "/a", client)
		struck := inspected(t, n, "a", address)
		if struck.Strikes != 2 || struck.LastStrike == nil || struck.ForgottenAt == nil || struck.ForgottenAt.Sub(*struck.LastStrike) != time.Hour || struck.BlockedUntil != nil || int(struck.Remaining) != 0 {
			t.Errorf("after two strikes: %+v", struck)
		}
		reset := asked[resetResult](t, n, "reset", `{"zone":"a","key":`+address+`}`)
		if fmt.Sprint(reset.Reset) != "["+struck.Source+"]" || reset.ID != struck.ID {
			t.Errorf("reset: %+v", reset)
		}
		if after := inspected(t, n, "a", address); after.Remaining != 4 || after.Reset != nil || after.Strikes != 2 {
			t.Errorf("after the reset: %+v", after)
		}
		wantReasons(t, n, "ok ok ok ok blocked blocked", "/a", client)
		blocked := inspected(t, n, "a", address)
		if blocked.BlockedUntil == nil || blocked.Strikes != 3 || blocked.ForgottenAt.Sub(*blocked.BlockedUntil) != time.Hour || blocked.ByHand {
			t.Errorf("blocked: %+v", blocked)
		}
		if known := blocked.KnownUntil != nil; known != (blocked.Source == "redis") {
			t.Errorf("the node that was told of the block: %+v", blocked)
		}

		const alice = `["acme","alice"]`
		wantReasons(t, n, "ok ok ok limited limited", "/b", "X-Tenant: acme", "X-Api-Key: alice")
		if limited := inspected(t, n, "b", alice); limited.Group != nil || limited.Remaining >= 1 || limited.Limit != 3 {
			t.Errorf("without a penalty: %+v", limited)
		}
		asked[resetResult](t, n, "reset", `{"zone":"b","key":`+alice+`}`)
		wantReasons(t, n, "ok ok ok limited", "/b", "X-Tenant: acme", "X-Api-Key: alice") // though it was refused from memory a moment ago
		if nobody := asked[resetResult](t, n, "reset", `{"zone":"b","key":["acme","nobody"]}`); len(nobody.Reset) != 0 {
			t.Errorf("reset of nobody: %+v", nobody)
		}
	})
}

// Answers say what was found and what would be right.
func TestAdminAnswersToMistakes(t *testing.T) {
	config := "{\n admin {$ADMIN}\n rate_limit {\n zone unused {\n rate 1/s\n}\n}\n}\nhttp://:{$PORT} {\n rate_limit {\n redis off\n zone a {\n rate 1/h\n burst 1\n}\nzone two {\n key {header.X-One}{header.X-Two}\n rate 1/h\n}\n}\n respond ok\n}\n"
	n := node.Start(t, config)
	for _, row := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "status", "{}", 405, "use GET"},
		{"GET", "inspect", "", 405, "use POST"},
		{"PUT", "override", "{}", 405, "use DELETE, GET, POST"},
		{"POST", "inspect", "", 400, "there is no body; write"},
		{"POST", "inspect", `{"zone":"a","key":"1.2.3.4"} {}`, 400, "more than one JSON value"},
		{"POST", "inspect", `{"zone":"a","kay":"1.2.3.4"}`, 400, `"kay"`},
		{"POST", "inspect", `{"zone":"a"}`, 400, "name a zone, and either an id or a key"},
		{"POST", "inspect", `{"zone":"a","key":"1.2.3.4","id":"AAAAAAAAAAAAAAAAAAAAAA"}`, 400, "either an id or a key"},
		{"POST", "inspect", `{"id":"AAAAAAAAAAAAAAAAAAAAAA"}`, 404, `there is no zone "" (zones: a, two, unused)`},
		{"POST", "inspect", `{"zone":"b","key":"1.2.3.4"}`, 404, `there is no zone "b" (zones: a, two, unused)`},
		{"POST", "inspect", `{"zone":"unused","key":"1.2.3.4"}`, 409, "no handler uses"},
		{"POST", "inspect", `{"zone":"two","key":"x"}`, 400, "a value for each of [http.request.header.X-One http.request.header.X-Two], got 1"},
		{"POST", "reset", `{"zone":"a","id":"short"}`, 400, "is not one of ours"},
		{"POST", "override", `{"zone":"a","action":"allow","for":"30m"}`, 409, "in this process"},
		{"POST", "override", `{"zone":"b","action":"allow","for":"30m"}`, 404, "there is no zone"},
		{"POST", "override", `{"zone":"a","action":"open","for":"30m"}`, 400, `action must be allow, deny, local, got "open"`},
		{"POST", "override", `{"zone":"a","action":"allow","for":"61m"}`, 400, "at most 1h0m0s"},
		{"POST", "override", `{"zone":"a","action":"allow"}`, 400, "for must be a duration"},
		{"POST", "override", `{"zone":"a","action":"allow","for":"-5m"}`, 400, "for must be a duration"},
		{"DELETE", "override?zone=a", "", 404, `no override of a zone "a"`},
		{"DELETE", "override?zona=a", "", 400, `"zona" is unknown or repeated (known: zone)`},
		{"GET", "blocks?limit=0", "", 400, "from 1 to 10000"},
		{"GET", "blocks?limit=10001", "", 400, "from 1 to 10000"},
		{"GET", "blocks?limit=5&limit=6", "", 400, "repeated"},
		{"GET", "blocks?after=x", "", 400, "what the list before gave as next"},
	} {
		answer := n.Admin(row.method, "/rate_limit/"+row.path, row.body, "Content-Type: application/json")
		var text struct{ Error string }
		if err := json.Unmarshal([]byte(answer.Body), &text); err != nil || answer.Status != row.status || !strings.Contains(text.Error, row.want) {
			t.Errorf("%s %s %s: status %d: %s", row.method, row.path, row.body, answer.Status, answer.Body)
		}
	}
	if err := n.Load("{\n admin {$ADMIN}\n}\nhttp://:{$PORT} {\n respond ok\n}\n"); err != nil {
		t.Fatal(err)
	}
	proc.Eventually(t, "no rate_limit is served", func() bool { return n.Admin("GET", "/rate_limit/status", "").Status == http.StatusNotFound })
}

// While Redis is down, a client's state is that of the share, and of the blocks that this node remembers.
func TestInspectDuringAnOutage(t *testing.T) {
	c := newCutOff(t, 1, "nodes 4", fmt.Sprintf(clientZone, "20", ""))
	n := c.nodes[0]
	c.answers(0, 24, "bad")
	c.answers(0, 10, "good")
	c.during(t, func() {
		good := inspected(t, n, "api", `"good"`)
		if good.Source != "share" || good.Limit != 5 || good.Remaining != 5 || good.Rate != "0.25/h" || good.BlockedUntil != nil {
			t.Errorf("the share: %+v", good)
		}
		bad := inspected(t, n, "api", `"bad"`)
		if bad.Source != "share" || bad.BlockedUntil == nil || bad.KnownUntil == nil || !bad.BlockedUntil.Equal(*bad.KnownUntil) {
			t.Errorf("a block that is remembered: %+v", bad)
		}
		c.want(t, "a share", c.answers(0, 10, "good"), "200", 5)
		answer := n.Admin("POST", "/rate_limit/reset", `{"zone":"api","key":"good"}`)
		if answer.Status != http.StatusServiceUnavailable || !strings.Contains(answer.Body, "only the share was reset") {
			t.Errorf("reset without Redis: %+v", answer)
		}
		c.want(t, "after a reset", c.answers(0, 10, "good"), "200", 5)
		status := asked[statusInfo](t, n, "status", "")
		store := status.Stores[0]
		if store.Up || store.Nodes != 4 || store.Share != 0.25 || len(store.Servers) != 1 || store.Servers[0].State != "down" || store.Servers[0].Since == nil {
			t.Errorf("status: %+v", store)
		}
	})
	if good := inspected(t, n, "api", `"good"`); good.Source != "redis" || int(good.Remaining) != 10 {
		t.Errorf("afterwards: %+v", good)
	}
	if status := asked[statusInfo](t, n, "status", ""); !status.Stores[0].Up || status.Stores[0].Servers[0].State != "up" || status.Stores[0].Servers[0].Since != nil {
		t.Errorf("status afterwards: %+v", status.Stores)
	}
}
