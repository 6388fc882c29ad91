package ratelimit

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// reasons gets a path n times and returns why it was refused, ok where it was not.
func reasons(n *node.Node, times int, path string, headers ...string) string {
	var all []string
	for range times {
		answer := n.Get(path, headers...)
		reason := answer.Header.Get("X-RateLimit-Reason")
		if answer.Status == 200 {
			reason = "ok"
		}
		all = append(all, reason)
	}
	return strings.Join(all, " ")
}

func wantReasons(t *testing.T, n *node.Node, want, path string, headers ...string) {
	t.Helper()
	if got := reasons(n, len(strings.Fields(want)), path, headers...); got != want {
		t.Errorf("%s %q: %s, want %s", path, headers, got, want)
	}
}

// awaitBlocks returns who is blocked once these are so many: they are listed a moment after the answer that says so.
func awaitBlocks(t *testing.T, n *node.Node, count int) (list []blockInfo) {
	t.Helper()
	proc.Eventually(t, fmt.Sprintf("%d blocks are listed", count), func() bool {
		list = listedBlocks(t, n)
		return len(list) == count
	})
	return list
}

// listedBlocks returns who is blocked, as the admin endpoint says.
func listedBlocks(t *testing.T, n *node.Node) (list []blockInfo) {
	t.Helper()
	answer := n.Admin("GET", "/rate_limit/blocks", "")
	var info blocksInfo
	if err := json.Unmarshal([]byte(answer.Body), &info); err != nil || answer.Status != 200 || len(info.Errors) > 0 {
		t.Fatalf("status %d: %s", answer.Status, answer.Body)
	}
	return info.Blocks
}

// sites is a Caddyfile with one rate_limit block for each path below /.
func sites(blocks ...string) string {
	text := "{\n admin {$ADMIN}\n servers {\n trusted_proxies static 127.0.0.1/32\n trusted_proxies_strict\n }\n rate_limit {\n {$STORE}\n }\n}\nhttp://:{$PORT} {\n"
	for i, block := range blocks {
		text += fmt.Sprintf("handle /%c* {\n rate_limit {\n%s\n }\n respond ok\n}\n", 'a'+i, block)
	}
	return text + "}\n"
}

// Strikes and blocks belong to a group: another group, or none, knows nothing of them; the same group does wherever the key is
// the same. Answers gateways C-5 69, 74, caddy-field c 36, shedding d 59.
func TestPenaltyGroups(t *testing.T) {
	config := sites(
		"penalty one {\n after 0\n}\nzone a {\n rate 1/h\n burst 1\n}",
		"penalty two {\n after 0\n}\nzone b {\n rate 1/h\n burst 3\n}",
		"penalty one {\n after 0\n}\nzone c {\n rate 1/h\n burst 3\n}",
		"zone d {\n rate 1/h\n burst 3\n}",
		"penalty one {\n after 0\n}\nzone e {\n key {client_ip}-{path}\n rate 1/h\n burst 3\n}",
		"penalty one {\n after 0\n}\nzone f {\n rate 1/h\n burst 3\n penalty off\n}",
		"penalty one {\n after 0\n}\nzone g {\n rate 1/h\n burst 3\n ipv4_prefix 24\n}",
	)
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		wantReasons(t, n, "ok blocked blocked", "/a")
		wantReasons(t, n, "blocked", "/c")                            // the same group, the same key
		wantReasons(t, n, "ok ok ok blocked", "/b")                   // another group
		wantReasons(t, n, "ok ok ok limited", "/d")                   // none
		wantReasons(t, n, "ok ok ok blocked", "/e")                   // another key
		wantReasons(t, n, "ok ok ok limited", "/f")                   // penalty off: neither struck nor blocked
		wantReasons(t, n, "ok", "/g")                                 // the prefix length is part of who it is
		wantReasons(t, n, "ok", "/c", "X-Forwarded-For: 203.0.113.1") // another client
	})
}

// Two nodes on one Redis: a block by one holds on the other, within its group. Answers shedding d 46, gateways C-5 73.
func TestBlockHoldsOnOtherNodes(t *testing.T) {
	redis := redistest.Start(t)
	config := func(group string) string {
		return strings.ReplaceAll(sites("penalty "+group+" {\n after 0\n}\nzone a {\n rate 1/h\n burst 1\n}\nzone b {\n match path /ab\n rate 1/h\n burst 2\n}"), "{$STORE}", patientRedis+"nodes 3")
	}
	first, same, other := node.Start(t, config("one"), node.Env("REDIS", redis.Addr())), node.Start(t, config("one"), node.Env("REDIS", redis.Addr())), node.Start(t, config("two"), node.Env("REDIS", redis.Addr()))
	wantReasons(t, first, "ok blocked", "/a")
	wantReasons(t, same, "blocked", "/ab")
	// The bucket is one for all three; this node's group strikes for itself.
	wantReasons(t, other, "blocked", "/a")
	if list := awaitBlocks(t, same, 2); list[0].Group == list[1].Group {
		t.Errorf("blocks: %+v", list)
	}
	// Lifted on one node, it is lifted on the others, while the client goes on.
	one := "one"
	body, _ := json.Marshal(map[string]any{"zone": "a", "key": "127.0.0.1", "group": one})
	if answer := same.Admin("POST", "/rate_limit/unblock", string(body)); answer.Status != 200 {
		t.Errorf("unblock: %+v", answer)
	}
	// What the first remembers of the block, it asks about every 5 s. The bucket is as empty as before: after 0 the first refusal
	// blocks again.
	proc.Eventually(t, "the first finds the block lifted", func() bool {
		wantReasons(t, first, "blocked", "/a")
		return len(listedBlocks(t, first)) == 2
	})
}

// every, except and dry_run of a penalty. Answers caddy-field c 15 and 22 (every option does something), shedding d 50, 57,
// caddy-field c 48 (a shadow mode), gateways C-6 79.
func TestPenaltyOptions(t *testing.T) {
	config := sites(
		"penalty every {\n after 1\n every 1h\n}\nzone a {\n rate 1/h\n burst 1\n}",
		"penalty except {\n after 0\n except /b/office*\n}\nzone b {\n rate 1/h\n burst 1\n}",
		"penalty dry {\n after 0\n dry_run\n}\nzone c {\n rate 1/h\n burst 1\n}",
		"penalty zone {\n after 0\n}\nzone d {\n rate 1/h\n burst 1\n dry_run\n}",
		"penalty block {\n after 0\n}\ndry_run\nzone e {\n rate 1/h\n burst 1\n}",
	)
	onEveryNode(t, config, func(t *testing.T, n *node.Node) {
		wantReasons(t, n, "ok limited limited limited limited limited", "/a")
		wantReasons(t, n, "ok limited limited", "/b/office")
		wantReasons(t, n, "blocked blocked", "/b")
		wantReasons(t, n, "limited", "/b/office") // not blocked either
		wantReasons(t, n, "ok limited limited limited limited limited limited", "/c")
		wantReasons(t, n, "ok ok ok ok", "/d")
		wantReasons(t, n, "ok ok ok ok", "/e")
		awaitBlocks(t, n, 1) // that of /b
		// Without its dry run, the penalty starts with no strikes.
		serious := strings.Replace(config, "penalty dry {\n after 0\n dry_run\n}", "penalty dry {\n after 1\n}", 1)
		if err := n.Load(config2(serious, n)); err != nil {
			t.Fatal(err)
		}
		wantReasons(t, n, "limited blocked", "/c")
	})
}

// Whoever is blocked can be found and let go, by id or by address, at once and with a clean slate. Answers caddy-field c 67,
// shedding d 44, 46, 48, 51, gateways C-3 46, C-6 81.
func TestBlocksCanBeLifted(t *testing.T) {
	config := func(log string) string {
		return sites("penalty {\n after 1\n}\nlog_key "+log+"\nzone a {\n rate 1/h\n burst 1\n}\nzone b {\n match path /ab\n rate 1/h\n burst 50\n}", "penalty {\n after 1\n}\nzone c {\n key {header.X-Api-Key}\n rate 1/h\n burst 1\n}")
	}
	onEveryNode(t, config("off"), func(t *testing.T, n *node.Node) {
		const client = "X-Forwarded-For: 2001:db8::7"
		wantReasons(t, n, "ok limited blocked", "/a", client)
		list := awaitBlocks(t, n, 1)
		if list[0].Key != "" || len(list[0].ID) != 22 || list[0].Until.IsZero() {
			t.Fatalf("blocks: %+v", list)
		}
		wantReasons(t, n, "blocked", "/ab", client)
		// By the key: any address of its network is the same client.
		lift := func(body string) *node.Response { return n.Admin("POST", "/rate_limit/unblock", body) }
		if answer := lift(`{"zone":"a","key":"2001:db8::ffff:1"}`); answer.Status != 200 || strings.TrimSpace(answer.Body) != `{"id":"`+list[0].ID+`","forgotten":1}` {
			t.Errorf("unblock by key: %+v", answer)
		}
		if again := listedBlocks(t, n); len(again) != 0 {
			t.Errorf("blocks: %+v", again)
		}
		wantReasons(t, n, "limited blocked blocked", "/a", client) // a clean slate: again one strike is forgiven
		if answer := lift(`{"id":"` + list[0].ID + `"}`); answer.Status != 200 || !strings.Contains(answer.Body, `"forgotten":1`) {
			t.Errorf("unblock by id: %+v", answer)
		}
		if answer := lift(`{"id":"` + list[0].ID + `"}`); answer.Status != 200 || !strings.Contains(answer.Body, `"forgotten":0`) {
			t.Errorf("unblock of nobody: %+v", answer)
		}
		wantReasons(t, n, "limited", "/a", client)
		wantReasons(t, n, "ok limited blocked", "/b", "X-Api-Key: alice")
		if answer := lift(`{"zone":"c","key":["alice"]}`); answer.Status != 200 || !strings.Contains(answer.Body, `"forgotten":1`) || strings.Contains(answer.Body, "alice") {
			t.Errorf("unblock of a header: %+v", answer)
		}

		for _, row := range []struct {
			method, path, body string
			status             int
			want               string
		}{
			{"GET", "/rate_limit/unblock", "", 405, "use POST"},
			{"DELETE", "/rate_limit/blocks", "", 405, "use GET"},
			{"POST", "/rate_limit/blocks", "{}", 405, "use GET"},
			{"POST", "/rate_limit/unblock", `{"zone":"x","key":"1"}`, 404, `there is no zone "x" (zones: a, b, c)`},
			{"POST", "/rate_limit/unblock", `{"zone":`, 400, "reading the request"},
			{"POST", "/rate_limit/unblock", `{"zone":"a","kay":"1"}`, 400, "kay"},
			{"POST", "/rate_limit/unblock", `{"zone":"a"}`, 400, "name either an id, or a zone and a key"},
			{"POST", "/rate_limit/unblock", `{"id":"short"}`, 400, "is not one of ours"},
			{"POST", "/rate_limit/unblock", `{"zone":"a","key":"nobody"}`, 400, "nobody"},
			{"POST", "/rate_limit/unblock", `[]`, 400, "reading the request"},
			{"POST", "/rate_limit/unblock", strings.Repeat(" ", maxAdminBody+1), 400, "reading the request"},
		} {
			answer := n.Admin(row.method, row.path, row.body, "Content-Type: application/json")
			var text struct{ Error string }
			if err := json.Unmarshal([]byte(answer.Body), &text); err != nil || answer.Status != row.status || !strings.Contains(text.Error, row.want) {
				t.Errorf("%s %s %.40s: status %d: %s", row.method, row.path, row.body, answer.Status, answer.Body)
			}
			if allow := answer.Header.Get("Allow"); row.status == 405 && "use "+allow != row.want {
				t.Errorf("%s %s: Allow is %q", row.method, row.path, allow)
			}
		}

		if n.LogLines("2001:db8::/64") != 0 {
			t.Error("a key in the clear in the log without log_key")
		}
		if err := n.Load(config2(config("on"), n)); err != nil {
			t.Fatal(err)
		}
		wantReasons(t, n, "ok limited blocked", "/a", "X-Forwarded-For: 2001:db8:1::1")
		if n.LogLines("2001:db8:1::/64") != 2 { // refused, blocked
			t.Error("no key in the clear in the log with log_key")
		}
		if list := awaitBlocks(t, n, 1); list[0].Store == "redis" && list[0].Key != "2001:db8:1::/64" {
			t.Errorf("blocks with log_key: %+v", list)
		}
	})
}

// A blocked client is answered the same until the block ends, whatever it sends: nothing is written, nothing is extended, one
// block is one event. Answers gateways C-6 76, 77, 82; shedding d 36, 37, 38, 40, 45; caddy-field c 56.
func TestBlockedRequestsWriteNothing(t *testing.T) {
	redis := redistest.Start(t)
	n := node.Start(t, site(patientRedis+"nodes 1", "penalty {\n after 0\n}\nzone a {\n rate 1/h\n burst 1\n}"), node.Env("REDIS", redis.Addr()))
	wantReasons(t, n, "ok blocked", "/")
	until := awaitBlocks(t, n, 1)[0].Until
	written := func() (n int) {
		for _, command := range []string{"hset", "pexpire", "del", "zadd"} {
			n += redis.Calls(command)
		}
		return n
	}
	proc.Eventually(t, "the list of blocks is written whole", func() bool { return redis.TTLs()["tollgate:blocks"] > 0 })
	before := written()
	if got := storm(t, 1000, "/", n); got[429] != 1000 {
		t.Errorf("answers by status %v", got)
	}
	if more := written() - before; more != 0 {
		t.Errorf("%d writes for 1000 requests in a block", more)
	}
	if list := listedBlocks(t, n); len(list) != 1 || !list[0].Until.Equal(until) {
		t.Errorf("the block ends at %v, at first %s", list, until)
	}
	if lines := n.LogLines(`"msg":"blocked"`); lines != 1 {
		t.Errorf("%d log lines for one block and 1001 refusals", lines)
	}
	for key, ttl := range redis.TTLs() {
		if ttl <= 0 {
			t.Errorf("%s has no TTL", key)
		}
	}
}
