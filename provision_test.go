package ratelimit

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
)

// validated runs caddy validate on a configuration and returns the error, empty if it is valid, and the warnings of this
// module.
func validated(t *testing.T, name, config string) (message string, warnings []string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	_, stderr, code := node.Run(t, "validate", "--config", file)
	for line := range strings.Lines(stderr) {
		var entry struct{ Level, Logger, Msg string }
		switch {
		case json.Unmarshal([]byte(line), &entry) != nil:
			t.Errorf("not a log line: %s", line)
		case entry.Level == "error":
			message = entry.Msg
		case entry.Level == "warn" && entry.Logger == "rate_limit":
			warnings = append(warnings, entry.Msg)
		}
	}
	if code == 0 {
		return "", warnings
	}
	return strings.ReplaceAll(message, file, name), warnings
}

// concurrently runs the function for each of so many rows, two at a time: each starts a process.
func concurrently(n int, run func(i int)) {
	var wg sync.WaitGroup
	rows := make(chan int)
	for range 2 {
		wg.Go(func() {
			for i := range rows {
				run(i)
			}
		})
	}
	for i := range n {
		rows <- i
	}
	close(rows)
	wg.Wait()
}

// What a configuration of one handler in JSON is wrong about when it is provisioned. The Caddyfile says most of it earlier, and where.
func TestErrorsOfProvision(t *testing.T) {
	const before = `loading http app module: provision http: server srv0: setting up route handlers: route 0: loading handler modules: position 0: loading module 'rate_limit': provision http.handlers.rate_limit: `
	var many []string
	for i := range 256 {
		many = append(many, fmt.Sprintf(`"z%d":{"rate":"10/s"}`, i))
	}
	long := strings.Repeat("x", 65)
	rows := []struct{ handler, want string }{
		{`"rate_limits":{` + strings.Join(many, ",") + `}`, `rate_limits: a handler has at most 255 zones, got 256: spread them over several`},
		{`"rate_limits":{"` + long + `":{"rate":"10/s"}}`, `zone "` + long + `": a name has at most 64 bytes`},
		{`"penalty":{"group":"` + long + `"}`, `penalty: group must have at most 64 bytes, got "` + long + `"`},
		{`"rate_limits":{"a":{"rate":"0/s"}}`, `rate "0/s": the count must be above 0`},
		{`"rate_limits":{"a":{"rate":"10/s","burst":-1}}`, `must be a whole number from 1, got -1; leave it out for the default`},
		{`"rate_limits":{"a":{"rate":"10/s","burst":0}}`, `must be a whole number from 1, got 0; leave it out for the default`},
		{`"shed":{"max_in_flight":0}`, `must be a whole number from 1, got 0; leave it out for the default`},
		{`"nodes":0`, `must be a whole number from 1, got 0; leave it out for the default`},
		{`"rate_limits":{"a":{"rate":"10/s","burst":9007199255}}`, `zone "a": burst: must be from 1 to 9007199254, got 9007199255`},
		{`"rate_limits":{"a":{"rate":"1/day","burst":100000}}`, `zone "a": a bucket of 100000 at 1/day takes more than ten years to refill: raise the rate or lower the burst`},
		{`"rate_limits":{"a":{"rate":"10/s","cost":[{"tokens":11}]}}`, `zone "a": cost: must be from 0 to the burst of 10, or no request could ever pay it; got 11`},
		{`"rate_limits":{"a":{"rate":"10/s","cost":[{"tokens":-1}]}}`, `zone "a": cost: must be from 0 to the burst of 10, or no request could ever pay it; got -1`},
		{`"rate_limits":{"a":{"key":"all"}}`, `zone "a": rate: a zone needs one, like 100/m; without any field it stands for the shared zone of its name`},
		{`"rate_limits":{"a":{}}`, `zone "a": it has no rate, and there is no shared zone of that name (shared zones: [])`},
		{`"rate_limits":{"a":{"rate":"10/s","ipv4_prefix":33}}`, `zone "a": key: ipv4_prefix must be from 0 to 32 and ipv6_prefix from 0 to 128, got 33 and 64`},
		{`"rate_limits":{"a":{"rate":"10/s","on_empty":"block"}}`, `zone "a": on_empty: must be ip or skip or deny, got "block"`},
		{`"rate_limits":{"a":{"rate":"10/s","store":"redis"}}`, `zone "a": store: must be memory, got "redis"`},
		{`"rate_limits":{"a":{"rate":"10/s","penalty":"on"}}`, `zone "a": penalty: must be off, got "on"`},
		{`"rate_limits":{"a":{"rate":"10/s","headers":"on"}}`, `zone "a": headers: must be off, got "on"`},
		{`"rate_limits":{"a":{"rate":"10/s","on_store_error":"open"}}`, `zone "a": on_store_error: must be local, full, deny or allow, got "open"`},
		{`"rate_limits":{"a":{"rate":"10/s","lease":"on"}}`, `zone "a": lease: must be auto, got "on"`},
		{`"rate_limits":{"a":{"rate":"10/s","lease":"auto","store":"memory"}}`, `zone "a": lease takes tokens ahead from Redis: leave it out where store is memory, and in a dry run`},
		{`"rate_limits":{"a":{"rate":"10/s","on_store_error":"deny","sensitive":[{}]}}`, `zone "a": sensitive and on_store_error both say what happens while the store is down: use one of them`},
		{`"rate_limits":{"a":{"rate":"10/s","key":"{http.request.remote_ip}"}}`, `zone "a": key: there is no placeholder {http.request.remote_ip}`},
		{`"penalty":{"after":-1}`, `penalty: after must be from 0 to 65534, got -1`},
		{`"penalty":{"base":"2h"}`, `penalty: base, max, window and every must be durations above 0, and max at least base`},
		{`"penalty":{"group":"a b"}`, `penalty: group must be letters, digits and -_. only, got "a b"`},
		{`"penalty":{"max":"100000h"}`, `penalty: max and window must be below ten years`},
		{`"nodes":-1`, `must be a whole number from 1, got -1; leave it out for the default`},
		{`"nodes":1099511627776`, `nodes: must be from 1 to 2147483647, got 1099511627776`},
		{`"nodes_auto":true`, `nodes_auto: needs nodes beside it, the number that holds until Redis has told, and the least that is believed`},
		{`"rate_limits":{"":{"rate":"10/s"}}`, `rate_limits: a zone needs a name`},
		{`"redis":{"address":["localhost:6379","localhost:6380"]}`, `redis: several addresses are one Redis only with cluster, or with master_name and the addresses of its Sentinels: write one of these`},
		{`"redis":{}`, `redis: an address is missing: write host:port, or a URL like redis://host:6379/0, or redis off`},
		{`"redis":{"address":["localhost"]}`, `redis: the address has no port: write host:port, or a URL like redis://host:6379/0`},
		{`"redis":{"address":["{env.TOLLGATE_NOT_SET}"]}`, `redis: evaluated placeholder {env.TOLLGATE_NOT_SET} is empty; write redis off to keep buckets in this process`},
		{`"redis":{"address":["redis://:secret@{env.TOLLGATE_NOT_SET}"]}`, `redis: evaluated placeholder {env.TOLLGATE_NOT_SET} is empty; write redis off to keep buckets in this process`},
		{`"redis":{"address":["http://:secret@localhost"]}`, `redis: the URL must begin with redis://, rediss:// or unix://`},
		{`"redis":{"address":["localhost:6379"],"timeout":"1s","sensitive_timeout":"500ms"}`, `redis: timeout must be at least 1ms and sensitive_timeout at least timeout, got 1s and 500ms`},
	}
	concurrently(len(rows), func(i int) {
		config := fmt.Sprintf(`{"apps":{"http":{"servers":{"srv0":{"listen":[":80"],"routes":[{"handle":[{"handler":"rate_limit",%s}]}]}}}}}`, rows[i].handler)
		got, _ := validated(t, "caddy.json", config)
		// Rates are read while the module is decoded, which Caddy words differently.
		if rest, ok := strings.CutPrefix(got, before); ok && !strings.HasPrefix(rest, rows[i].want) || !ok && !strings.Contains(got, rows[i].want) {
			t.Errorf("%s\ngot  %s\nwant %s", rows[i].handler, got, rows[i].want)
		}
		if strings.Contains(got, "secret") {
			t.Errorf("a password is repeated: %s", got)
		}
	})
}

// One name is one budget: it cannot be two things, nor in two places.
func TestZoneInTwoPlaces(t *testing.T) {
	for _, test := range []struct{ first, second, want string }{
		{`"rate_limits":{"a":{"rate":"10/s"}}`, `"rate_limits":{"a":{"rate":"20/s","key":"all"}}`,
			`zone "a" is defined twice with different rate, burst, key: zone names are global, so give one of them another name`},
		{`"rate_limits":{"a":{"rate":"10/s"}}`, `"redis":{"address":["127.0.0.1:1"]},"rate_limits":{"a":{"rate":"10/s"}}`,
			`zone "a" is used in two ways, in memory and in redis 127.0.0.1:1/0: a zone charges a request once, so the first way would hold; give one of them another name`},
		{`"rate_limits":{"a":{"rate":"10/s","dry_run":true}}`, `"rate_limits":{"a":{"rate":"10/s"}}`,
			`zone "a" is used in two ways, in memory as a dry run and in memory: a zone charges a request once, so the first way would hold; give one of them another name`},
		{`"penalty":{},"rate_limits":{"a":{"rate":"10/s"}}`, `"penalty":{"after":1},"rate_limits":{"b":{"rate":"10/s"}}`,
			`penalty group "" is defined twice with different after: give one of them another group`},
		{`"shed":{}`, `"shed":{"max_in_flight":7}`, `shed pool "default" is defined twice with different max_in_flight: give one of them another pool`},
		{`"rate_limits":{"a":{"rate":"10/s"}}`, `"rate_limits":{"a":{"rate":"10/s","cost":[{"tokens":2}]}}`, ""},
	} {
		config := fmt.Sprintf(`{"apps":{"http":{"servers":{"srv0":{"listen":[":80"],"routes":[{"handle":[{"handler":"rate_limit",%s},{"handler":"rate_limit",%s}]}]}}}}}`, test.first, test.second)
		if got, _ := validated(t, "caddy.json", config); !strings.HasSuffix(got, test.want) || test.want == "" && got != "" {
			t.Errorf("%s and %s\ngot  %s\nwant %s", test.first, test.second, got, test.want)
		}
	}
}

// What is legal but usually a mistake is said once, with what to write instead.
func TestWarnings(t *testing.T) {
	const (
		zone     = "zone api {\n rate 10/s\n}"
		redis    = "redis 127.0.0.1:1"
		noNodes  = "nodes is not set: while Redis is down, every node admits the whole limit; write nodes <n> with the number of nodes, or nodes auto <n>"
		noSecret = "key_secret is not set: who reads Redis finds the IPv4 addresses behind hashed identities by trying all; write key_secret {env.…}, the same on all nodes"
	)
	block := func(global, servers, lines string) string {
		return "{\n" + servers + "\n rate_limit {\n" + global + "\n }\n}\nhttp://a.localhost {\n rate_limit {\n" + lines + "\n }\n}\nhttp://b.localhost {\n rate_limit {\n" + lines + "\n }\n}\n"
	}
	rows := []struct {
		why, config string
		want        []string
	}{
		{"nothing to say", block("redis off", "", zone), nil},
		{"no nodes, no secret, in two sites", block(redis, "", zone), []string{noNodes, noSecret}},
		{"counted nodes, and a secret", block(redis+"\nnodes auto 2\nkey_secret s", "", zone), nil},
		{"nothing to count nodes in", block("key_secret s", "", "nodes auto 2\n"+zone), []string{
			"nodes auto counts in Redis, but buckets live in this process; name a redis, or write redis off if that is meant",
		}},
		{"counted nodes, but no Redis on purpose", block("redis off\nnodes auto 2", "", zone), nil},
		{"both set", block(redis+"\nnodes 2\nkey_secret s", "", zone), nil},
		{"a password in the open", block("redis redis://:secret@127.0.0.1:1\nnodes 2\nkey_secret s", "", zone), []string{
			"secrets of Redis stand in the configuration, which the admin endpoint shows: password; write {env.…} or {file.…} in their place",
		}},
		{"other secrets in the open, in two sites", block("nodes 2\nkey_secret s", "", "redis 127.0.0.1:1 {\n master_name m\n password secret\n sentinel_password secret\n}\n"+zone), []string{
			"secrets of Redis stand in the configuration, which the admin endpoint shows: password, sentinel_password; write {env.…} or {file.…} in their place",
		}},
		{"exact path", block("redis off", "", "zone login {\n match path /login\n rate 1/s\n sensitive\n}"), []string{
			"a sensitive zone matches an exact path only: /login does not match /login/; write both /login and /login/*",
		}},
		{"exact path in sensitive", block("redis off", "", "zone login {\n rate 1/s\n sensitive /reset\n}"), []string{
			"a sensitive zone matches an exact path only: /reset does not match /reset/; write both /reset and /reset/*",
		}},
		{"with its twin", block("redis off", "", "zone login {\n match path /login /login/*\n rate 1/s\n sensitive\n}"), nil},
		{"a prefix", block("redis off", "", "zone login {\n match path /login*\n rate 1/s\n sensitive\n}"), nil},
		{"suffix in exempt", block("redis off", "", "exempt @css\n"+zone) + "", nil}, // replaced below
		{"only headers", block("redis off", "", "zone keys {\n key {header.X-Api-Key}\n rate 1/s\n}"), []string{
			"a client can change the key as it likes, and no zone of this block counts by client address alone: invented keys have a fresh bucket each; add a zone with the key {client_ip}",
		}},
		{"headers beside addresses", block("redis off", "", "zone keys {\n key {header.X-Api-Key}\n rate 1/s\n}\n"+zone), nil},
		{"proxies", block("redis off", "servers {\n trusted_proxies static 10.0.0.0/8\n}", zone), []string{
			"trusted_proxies without trusted_proxies_strict: the left-most forwarded address counts, so a client can pick a fresh bucket for each request, or somebody else's; add trusted_proxies_strict",
		}},
		{"strict proxies", block("redis off", "servers {\n trusted_proxies static 10.0.0.0/8\n trusted_proxies_strict\n}", zone), nil},
		{"sensitive without a store that can fail", block("key_secret s", "", "zone login {\n rate 1/s\n sensitive\n}"), []string{
			"a zone is sensitive, but buckets live in this process, where no store can fail; name a redis, or write redis off if that is meant",
		}},
	}
	for i := range rows {
		if rows[i].why == "suffix in exempt" {
			rows[i].config = "http://a.localhost {\n @css path *.css\n rate_limit {\n redis off\n exempt @css\n" + zone + "\n }\n}\n"
			rows[i].want = []string{"exempt matches a suffix, which reaches scripts too (/login.php/x.css); write the folder instead, like /assets/*"}
		}
	}
	concurrently(len(rows), func(i int) {
		message, got := validated(t, "Caddyfile", rows[i].config)
		if message != "" || !slices.Equal(got, rows[i].want) {
			t.Errorf("%s: %s\ngot  %q\nwant %q", rows[i].why, message, got, rows[i].want)
		}
	})
}
