package ratelimit

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// wrong is a part of a Caddyfile and the whole error that it gets.
type wrong struct{ text, want string }

const (
	knownInZone   = "known here: burst, cost, dry_run, headers, ipv4_prefix, ipv6_prefix, key, lease, match, on_empty, on_store_error, penalty, rate, sensitive, store"
	knownInBlock  = "known here: answer, dry_run, dry_run_header, exempt, headers, jitter, log_key, log_refusals, nodes, penalty, redis, reset, shed, zone"
	knownInRedis  = "known here: address, cluster, db, master_name, password, pool_size, sensitive_timeout, sentinel_password, sentinel_username, timeout, tls_client_cert_path, tls_client_cert_pem, tls_client_key_path, tls_client_key_pem, tls_enabled, tls_insecure, tls_server_certs_path, tls_server_certs_pem, tls_server_name, username"
	knownInGlobal = "known here: key_secret, max_keys, nodes, penalty, prefix, redis, top, zone"
)

const (
	inZone   = ":80 {\n\trate_limit {\n\t\tzone api {\n%s\n\t\t}\n\t}\n}\n"
	inBlock  = ":80 {\n\trate_limit {\n%s\n\t}\n}\n"
	inGlobal = "{\n\trate_limit {\n%s\n\t}\n}\n"
)

// Lines in a zone; the first of them is line 4.
var wrongInZone = []wrong{
	{`rate`, `zone api: rate needs a count and a unit, like 100/m, at Caddyfile:4`},
	{`rate 5r/s`, `zone api: rate "5r/s": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4`},
	{`rate 100`, `zone api: rate "100": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4`},
	{`rate 100 m`, `zone api: rate "100": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4`},
	{`rate 0/s`, `zone api: rate "0/s": the count must be above 0; to refuse everything, use the directive error, at Caddyfile:4`},
	{`rate -1/s`, `zone api: rate "-1/s": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4`},
	{`rate 10/fortnight`, `zone api: rate "10/fortnight": the unit "fortnight" is no duration; write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4`},
	{`rate 99999999999/s`, `zone api: rate "99999999999/s" cannot be calculated exactly: use a rounder count or unit, and at most 4 billion a second, at Caddyfile:4`},
	{`rate 10/s burst`, `zone api: rate: unexpected argument "burst", at Caddyfile:4`},
	{"rate 10/s {\n}", `zone api: rate takes no block, at Caddyfile:4`},
	{"rate 10/s\nrate 20/s", `zone api: rate is set already at Caddyfile:4, at Caddyfile:5`},
	{`burst 10`, `zone api: rate is missing: write one, like rate 100/m, at Caddyfile:3`},
	{`burst`, `zone api: burst needs a whole number, at Caddyfile:4`},
	{`burst 0`, `zone api: burst "0": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst -1`, `zone api: burst "-1": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst 1.5`, `zone api: burst "1.5": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst NaN`, `zone api: burst "NaN": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst 99999999999999999999`, `zone api: burst "99999999999999999999": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst 9007199255`, `zone api: burst "9007199255": write a whole number from 1 to 9007199254, at Caddyfile:4`},
	{`burst 10 20`, `zone api: burst: unexpected argument "20", at Caddyfile:4`},
	{`burst }`, `zone api: the closing brace needs a line of its own, at Caddyfile:4`},
	{`cost`, `zone api: cost needs a whole number, at Caddyfile:4`},
	{`cost ten`, `zone api: cost "ten": write a whole number from 0 to 9007199254, at Caddyfile:4`},
	{`cost -1`, `zone api: cost "-1": write a whole number from 0 to 9007199254, at Caddyfile:4`},
	{`cost /search 10`, `zone api: cost "/search": write a whole number from 0 to 9007199254, at Caddyfile:4`},
	{`cost 2 search`, `zone api: cost "search": no matcher: write *, a path like /api/*, or define a named one, like @api method POST, and write @api, at Caddyfile:4`},
	{`cost 2 /a /b`, `zone api: cost: unexpected argument "/b": one matcher a line; repeat the line, or name a matcher, like @api path /a /b, at Caddyfile:4`},
	{`cost 2 @missing`, `zone api: cost @missing: no such matcher in this site: define it, like @missing path /a /b, at Caddyfile:4`},
	{"cost 2\ncost 3 /a", `zone api: cost 3 never counts: the cost before it is for every request; write that last, at Caddyfile:5`},
	{"cost 2 *\ncost 3 /a", `zone api: cost 3 never counts: the cost before it is for every request; write that last, at Caddyfile:5`},
	{"rate 10/s\ncost 11 /export", `zone api: cost 11 is above the burst of 10, so no request could ever pay it: raise burst or lower the cost, at Caddyfile:5`},
	{"rate 10/s\nburst 20\ncost 21", `zone api: cost 21 is above the burst of 20, so no request could ever pay it: raise burst or lower the cost, at Caddyfile:6`},
	{`key`, `zone api: key needs text with placeholders, at Caddyfile:4`},
	{`key {client_ip`, `zone api: key: "{client_ip": a { is not closed; write \{ for a brace that is text, at Caddyfile:4`},
	{`key {ip}`, `zone api: key: there is no placeholder {ip}: did you mean {client_ip}?, at Caddyfile:4`},
	{`key {http.request.remote_ip}`, `zone api: key: there is no placeholder {http.request.remote_ip}: did you mean {client_ip}?, at Caddyfile:4`},
	{`key {http.request.uuid}`, `zone api: key: {http.request.uuid} cannot be part of a key: it changes with every request, so nobody would ever be limited, at Caddyfile:4`},
	{`key ""`, `zone api: key is empty: write {client_ip} for one bucket per client, or a word like all for one bucket in total, at Caddyfile:4`},
	{`key {client_ip} {header.X}`, `zone api: key: unexpected argument "{http.request.header.X}": text with spaces needs quotes, at Caddyfile:4`},
	{`on_empty allow`, `zone api: on_empty "allow": write ip, skip or deny, at Caddyfile:4`},
	{`ipv4_prefix 33`, `zone api: ipv4_prefix "33": write a whole number from 0 to 32, at Caddyfile:4`},
	{`ipv4_prefix /24`, `zone api: ipv4_prefix "/24": write a whole number from 0 to 32, at Caddyfile:4`},
	{`ipv6_prefix 129`, `zone api: ipv6_prefix "129": write a whole number from 0 to 128, at Caddyfile:4`},
	{`sensitive /a /b`, `zone api: sensitive: unexpected argument "/b": one matcher a line; repeat the line, or name a matcher, like @api path /a /b, at Caddyfile:4`},
	{`sensitive login`, `zone api: sensitive "login": no matcher: write *, a path like /api/*, or define a named one, like @api method POST, and write @api, at Caddyfile:4`},
	{`sensitive @missing`, `zone api: sensitive @missing: no such matcher in this site: define it, like @missing path /a /b, at Caddyfile:4`},
	{"rate 1/s\nlease auto\nstore memory", `zone api: lease takes tokens ahead from Redis: leave it out where there is store memory, and in a dry run, at Caddyfile:3`},
	{"rate 1/s\nlease auto\ndry_run", `zone api: lease takes tokens ahead from Redis: leave it out where there is store memory, and in a dry run, at Caddyfile:3`},
	{"rate 1/s\nsensitive\non_store_error deny", `zone api: sensitive and on_store_error both say what happens while the store is down: write one of them, at Caddyfile:3`},
	{`on_store_error`, `zone api: on_store_error "": write local, local full, deny or allow, at Caddyfile:4`},
	{`on_store_error full`, `zone api: on_store_error "full": write local, local full, deny or allow, at Caddyfile:4`},
	{`on_store_error local some`, `zone api: on_store_error "local some": write local, local full, deny or allow, at Caddyfile:4`},
	{`store redis`, `zone api: store "redis": write memory, at Caddyfile:4`},
	{`penalty on`, `zone api: penalty "on": write off, at Caddyfile:4`},
	{"penalty {\nafter 3\n}", `zone api: penalty needs a value: off, at Caddyfile:4`},
	{`headers on`, `zone api: headers "on": write off, at Caddyfile:4`},
	{`dry_run on`, `zone api: dry_run: unexpected argument "on", at Caddyfile:4`},
	{`match`, `zone api: match is empty: write a matcher, or leave match out to count every request, at Caddyfile:4`},
	{"match {\n}", `zone api: match is empty: write a matcher, or leave match out to count every request, at Caddyfile:4`},
	{`match @missing`, `zone api: match @missing: no such matcher in this site: define it, like @missing path /a /b, at Caddyfile:4`},
	{`match @missing /x`, `zone api: match @missing: no such matcher in this site: define it, like @missing path /a /b, at Caddyfile:4`},
	{`match path`, `zone api: match path needs arguments, at Caddyfile:4`},
	{`match pth /a`, `zone api: match: getting matcher module 'pth': module not registered: http.matchers.pth, at Caddyfile:4`},
	{`match /a /b`, `zone api: match: unexpected argument "/b": one matcher a line; repeat the line, or name a matcher, like @api path /a /b, at Caddyfile:4`},
	{"match {\nheader X-A\n}", `zone api: match: malformed header matcher: expected both field and value, at Caddyfile:5`},
	{`events 100`, `zone api: events is not supported yet: write rate, like rate 100/m, at Caddyfile:4`},
	{`max_events 100`, `zone api: max_events is not supported yet: write rate, like rate 100/m, at Caddyfile:4`},
	{`window 1m`, `zone api: window is not supported yet: write rate, like rate 100/m, at Caddyfile:4`},
	{`lease on`, `zone api: lease "on": write auto, at Caddyfile:4`},
	{`plan {header.X-Plan}`, `zone api: plan is not supported yet, at Caddyfile:4`},
	{`charge_on 401`, `zone api: charge_on is not supported yet, at Caddyfile:4`},
	{`strike_on 401`, `zone api: strike_on is not supported yet, at Caddyfile:4`},
	{`cost_from X-Cost`, `zone api: cost_from is not supported yet, at Caddyfile:4`},
	{`refund_on 5xx`, `zone api: refund_on is not supported yet, at Caddyfile:4`},
	{`requests 10`, `zone api: unknown option "requests": write rate, like rate 100/m; ` + knownInZone + `, at Caddyfile:4`},
	{`limit 10`, `zone api: unknown option "limit": write rate, like rate 100/m; ` + knownInZone + `, at Caddyfile:4`},
	{`nodelay`, `zone api: unknown option "nodelay": there is no queue, a refusal is answered at once: leave it out; ` + knownInZone + `, at Caddyfile:4`},
	{`brust 10`, `zone api: unknown option "brust" (did you mean burst?); ` + knownInZone + `, at Caddyfile:4`},
	{`distributed`, `zone api: unknown option "distributed": write redis <address> to share limits between nodes; ` + knownInZone + `, at Caddyfile:4`},
	{`after 3`, `zone api: unknown option "after": it belongs in the penalty block; ` + knownInZone + `, at Caddyfile:4`},
	{`exempt /health`, `zone api: unknown option "exempt": it belongs in the rate_limit block; ` + knownInZone + `, at Caddyfile:4`},
	{`zone inner`, `zone api: unknown option "zone": it belongs in the rate_limit block; ` + knownInZone + `, at Caddyfile:4`},
	{`timeout 1s`, `zone api: unknown option "timeout": it belongs in the redis block; ` + knownInZone + `, at Caddyfile:4`},
	{`@api path /api`, `zone api: unknown option "@api": named matchers are defined in the site, beside rate_limit; ` + knownInZone + `, at Caddyfile:4`},
	{`something`, `zone api: unknown option "something"; ` + knownInZone + `, at Caddyfile:4`},
}

// Lines in the directive's block; the first of them is line 3.
var wrongInBlock = []wrong{
	{``, `rate_limit: nothing is limited: write a block with a zone or shed, at Caddyfile:2`},
	{`exempt /health`, `rate_limit: nothing is limited: write a block with a zone or shed, at Caddyfile:2`},
	{`zone`, `rate_limit: zone needs a name, at Caddyfile:3`},
	{"zone {\nrate 1/s\n}", `rate_limit: zone needs a name, at Caddyfile:3`},
	{`zone api`, `zone api: write a block with a rate: without one this is a shared zone, and no global option rate_limit defines any, at Caddyfile:3`},
	{"zone api {\n}", `zone api: rate is missing: write one, like rate 100/m, at Caddyfile:3`},
	{"zone \"a b\" {\nrate 1/s\n}", `rate_limit: zone "a b": a name is 1 to 64 letters, digits and any of -_., at Caddyfile:3`},
	{"zone {http.request.host} {\nrate 1/s\n}", `rate_limit: zone "{http.request.host}": a name is 1 to 64 letters, digits and any of -_., at Caddyfile:3`},
	{"zone aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa {\nrate 1/s\n}", `rate_limit: zone "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa": a name is 1 to 64 letters, digits and any of -_., at Caddyfile:3`},
	{"zone api web {\nrate 1/s\n}", `rate_limit: zone: unexpected argument "web", at Caddyfile:3`},
	{"zone api {\nrate 1/s\n}\nzone api {\nrate 1/s\n}", `rate_limit: zone api is in this block already at Caddyfile:3: give one of them another name, at Caddyfile:6`},
	{"zone api {\nmatch /a\n}", `zone api: rate is missing: write one, like rate 100/m, at Caddyfile:3`},
	{`burst 10`, `rate_limit: unknown option "burst": it belongs in a zone; ` + knownInBlock + `, at Caddyfile:3`},
	{`rate 100/m`, `rate_limit: unknown option "rate": it belongs in a zone; ` + knownInBlock + `, at Caddyfile:3`},
	{`key {client_ip}`, `rate_limit: unknown option "key": it belongs in a zone; ` + knownInBlock + `, at Caddyfile:3`},
	{"zonne api {\nrate 1/s\n}", `rate_limit: unknown option "zonne" (did you mean zone?); ` + knownInBlock + `, at Caddyfile:3`},
	{`key_secret hunter2`, `rate_limit: unknown option "key_secret": it belongs in the global option rate_limit; ` + knownInBlock + `, at Caddyfile:3`},
	{`redis`, `rate_limit: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{`redis ""`, `rate_limit: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{`redis {$TOLLGATE_TEST_UNSET}`, `rate_limit: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{"redis {\ntimeout 1s\n}", `rate_limit: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{"redis a:1\nredis off", `rate_limit: redis is set already at Caddyfile:3, at Caddyfile:4`},
	{`nodes 0`, `rate_limit: nodes "0": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`nodes auto`, `rate_limit: nodes auto needs a number too, which holds until Redis has told and is the least that is believed, like nodes auto 3, at Caddyfile:3`},
	{`nodes auto 0`, `rate_limit: nodes: auto "0": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`nodes auto many`, `rate_limit: nodes: auto "many": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`nodes auto 3 4`, `rate_limit: nodes: unexpected argument "4", at Caddyfile:3`},
	{`nodes 3 auto`, `rate_limit: nodes: unexpected argument "auto", at Caddyfile:3`},
	{`nodes automatic`, `rate_limit: nodes "automatic": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`exempt`, `rate_limit: exempt needs a matcher: *, a path or a named matcher, at Caddyfile:3`},
	{`exempt /a /b`, `rate_limit: exempt: unexpected argument "/b": one matcher a line; repeat the line, or name a matcher, like @api path /a /b, at Caddyfile:3`},
	{`exempt path /a`, `rate_limit: exempt "path": no matcher: write *, a path like /api/*, or define a named one, like @api method POST, and write @api, at Caddyfile:3`},
	{`exempt @missing`, `rate_limit: exempt @missing: no such matcher in this site: define it, like @missing path /a /b, at Caddyfile:3`},
	{`penalty off`, `rate_limit: penalty off: here stands the name of a group; leave penalty out for none, or write penalty off in a zone, at Caddyfile:3`},
	{`penalty a b`, `rate_limit: penalty: unexpected argument "b", at Caddyfile:3`},
	{`penalty "a b"`, `rate_limit: penalty "a b": a name is 1 to 64 letters, digits and any of -_., at Caddyfile:3`},
	{"penalty {\nafter -1\n}", `penalty: after "-1": write a whole number from 0 to 65534, at Caddyfile:4`},
	{"penalty {\nafter 70000\n}", `penalty: after "70000": write a whole number from 0 to 65534, at Caddyfile:4`},
	{"penalty {\nbase 2h\n}", `penalty: base is above max: raise max (default 1h) or lower base (default 1m), at Caddyfile:3`},
	{"penalty {\nmax 0\n}", `penalty: max "0": write a duration above 0 and below 10 years, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"penalty {\nwindow 20000d\n}", `penalty: window "20000d": write a duration above 0 and below 10 years, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"penalty {\nexcept\n}", `penalty: except needs a matcher: *, a path or a named matcher, at Caddyfile:4`},
	{"penalty {\nburst 3\n}", `penalty: unknown option "burst": it belongs in a zone; known here: after, base, dry_run, every, except, max, window, at Caddyfile:4`},
	{"penalty\npenalty", `rate_limit: penalty is set already at Caddyfile:3, at Caddyfile:4`},
	{`shed 0`, `rate_limit: shed "0": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`shed off`, `rate_limit: shed "off": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`shed 10 20`, `rate_limit: shed: unexpected argument "20", at Caddyfile:3`},
	{"shed {\nmax_in_flight 10\n}", `shed: unknown option "max_in_flight": write the number behind shed, like shed 100; known here: pool, retry_after, at Caddyfile:4`},
	{"shed {\nclass low /bots/*\n}", `shed: class is not supported yet, at Caddyfile:4`},
	{"shed {\nadaptive\n}", `shed: adaptive is not supported yet, at Caddyfile:4`},
	{"shed {\npool a/b\n}", `shed: pool "a/b": a name is 1 to 64 letters, digits and any of -_., at Caddyfile:4`},
	{"shed {\nretry_after 5\n}", `shed: retry_after "5": write a duration above 0 and below 10 years, like 50ms, 10s or 1h, at Caddyfile:4`},
	{`headers maybe`, `rate_limit: headers "maybe": write on or off, at Caddyfile:3`},
	{`headers draft`, `rate_limit: headers draft is not supported yet, at Caddyfile:3`},
	{`headers both`, `rate_limit: headers both is not supported yet, at Caddyfile:3`},
	{`reset seconds`, `rate_limit: reset "seconds": write epoch or delta, at Caddyfile:3`},
	{`answer html`, `rate_limit: answer "html": write auto, json or error, at Caddyfile:3`},
	{`jitter 2`, `rate_limit: jitter "2": write a number from 0 to 1, like 0.1, at Caddyfile:3`},
	{`jitter NaN`, `rate_limit: jitter "NaN": write a number from 0 to 1, like 0.1, at Caddyfile:3`},
	{`jitter 10%`, `rate_limit: jitter "10%": write a number from 0 to 1, like 0.1, at Caddyfile:3`},
	{`log_key yes`, `rate_limit: log_key "yes": write on or off, at Caddyfile:3`},
	{`log_refusals`, `rate_limit: log_refusals needs a value: off, debug, info, warn or error, at Caddyfile:3`},
	{`log_refusals on`, `rate_limit: log_refusals "on": write off, debug, info, warn or error, at Caddyfile:3`},
	{`dry_run_header`, `rate_limit: dry_run_header needs the name of a request header, at Caddyfile:3`},
	{`dry_run_header "X Dry"`, "rate_limit: dry_run_header \"X Dry\": the name of a header is 1 to 64 letters, digits and any of !#$%&'*+-.^_`|~, at Caddyfile:3"},
	{`dry_run_header X-Dry:`, "rate_limit: dry_run_header \"X-Dry:\": the name of a header is 1 to 64 letters, digits and any of !#$%&'*+-.^_`|~, at Caddyfile:3"},
	{`dry_run_header connection`, `rate_limit: dry_run_header "connection": the header has a meaning of its own: invent one, like X-Dry-Run, at Caddyfile:3`},
	{`dry_run_header X_RateLimit_Reason`, `rate_limit: dry_run_header "X_RateLimit_Reason": the header has a meaning of its own: invent one, like X-Dry-Run, at Caddyfile:3`},
	{`dry_run off`, `rate_limit: dry_run: unexpected argument "off", at Caddyfile:3`},
	{"distributed {\nread_interval 5s\n}", `rate_limit: unknown option "distributed": write redis <address> to share limits between nodes; ` + knownInBlock + `, at Caddyfile:3`},
	{`@api path /api`, `rate_limit: unknown option "@api": named matchers are defined in the site, beside rate_limit; ` + knownInBlock + `, at Caddyfile:3`},
}

// Lines in a block about Redis; the first of them is line 3, where the block begins.
var wrongInRedis = []wrong{
	// Addresses.
	{"redis off {\ntimeout 1s\n}", `redis: off takes no block, at Caddyfile:3`},
	{`redis off now`, `redis: off takes no argument, at Caddyfile:3`},
	{`redis a:1 off`, `redis: the address has no port: write host:port, or a URL like redis://host:6379/0, at Caddyfile:3`},
	{`redis a:1 ""`, `rate_limit: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{`redis hunter2`, `redis: the address has no port: write host:port, or a URL like redis://host:6379/0, at Caddyfile:3`},
	{`redis hunter2@a:1`, `redis: the address is more than host:port: write user and password as username and password, or as a URL like redis://user:password@host:6379/0, at Caddyfile:3`},
	{`redis hunter2://a:1`, `redis: the URL must begin with redis://, rediss:// or unix://, at Caddyfile:3`},
	{`redis redis://:hunter2@{http.request.host}`, `redis: the address cannot depend on a request: use {env.NAME}, or {file.…} with the absolute path of a file, at Caddyfile:3`},
	{`redis a:1 b:2`, `redis: several addresses are one Redis only with cluster, or with master_name and the addresses of its Sentinels: write one of these, at Caddyfile:3`},
	{`redis a:1,b:2`, `redis: several addresses are one Redis only with cluster, or with master_name and the addresses of its Sentinels: write one of these, at Caddyfile:3`},
	{`redis a:1,`, `redis: the address has no port: write host:port, or a URL like redis://host:6379/0, at Caddyfile:3`},
	{"redis a:1 redis://:hunter2@b:1 {\ncluster\n}", `redis: with several addresses, write each as host:port, and what else stands in a URL as username, password, db and tls_enabled, at Caddyfile:3`},
	{"redis cluster {\naddress a:1\n}", `redis: cluster is no address: write the addresses behind redis, and cluster into the block, at Caddyfile:3`},
	{"redis failover {\naddress a:1\n}", `redis: failover is no address: write the addresses of the Sentinels behind redis, and master_name into the block, at Caddyfile:3`},
	{"redis {\naddress\n}", `redis: address needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:4`},
	{"redis {\naddress a:1 b\n}", `redis: the address has no port: write host:port, or a URL like redis://host:6379/0, at Caddyfile:4`},
	{"redis a:1 {\naddress b:1\n}", `redis: addresses stand behind redis already: write all of them there or all here, at Caddyfile:4`},
	{"redis {\naddress unix:///a unix:///b\ncluster\n}", `redis: with several addresses, write each as host:port, and what else stands in a URL as username, password, db and tls_enabled, at Caddyfile:3`},
	// Values.
	{"redis a:1 {\ntimeout 50\n}", `redis: timeout "50": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"redis a:1 {\ntimeout 0s\n}", `redis: timeout "0s": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"redis a:1 {\ntimeout -1s\n}", `redis: timeout "-1s": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"redis a:1 {\nsensitive_timeout forever\n}", `redis: sensitive_timeout "forever": write a duration above 0 and below 10 years, with its unit, like 50ms, 10s or 1h, at Caddyfile:4`},
	{"redis a:1 {\ntimeout 1s\nsensitive_timeout 900ms\n}", `redis: timeout must be at least 1ms and sensitive_timeout at least timeout, got 1s and 900ms, at Caddyfile:3`},
	{"redis a:1 {\ndb one\n}", `redis: db "one": write a whole number from 0 to 2147483647, at Caddyfile:4`},
	{"redis a:1 {\ndb -1\n}", `redis: db "-1": write a whole number from 0 to 2147483647, at Caddyfile:4`},
	{"redis :6379", `redis: the address has no host: perhaps an environment variable is empty; write host:port, at Caddyfile:3`},
	{"redis a:1 {\npool_size 0\n}", `redis: pool_size "0": write a whole number from 3 to 10000, at Caddyfile:4`},
	{"redis a:1 {\ncluster yes\n}", `redis: cluster "yes": write on, off, true or false, at Caddyfile:4`},
	{"redis a:1 {\ncluster on off\n}", `redis: cluster has more than one argument: text with spaces needs quotes, at Caddyfile:4`},
	{"redis a:1 {\ncluster {\n}\n}", `redis: cluster takes no block, at Caddyfile:4`},
	{"redis a:1 {\ncluster \"\"\n}", `redis: cluster is empty: perhaps an environment variable is; leave cluster out to do without, at Caddyfile:4`},
	{"redis a:1 {\ntls_enabled 1\n}", `redis: tls_enabled "1": write on, off, true or false, at Caddyfile:4`},
	{"redis a:1 {\npassword\n}", `redis: password needs an argument: perhaps an environment variable is empty, at Caddyfile:4`},
	{"redis a:1 {\npassword hunter2 hunter2\n}", `redis: password has more than one argument: text with spaces needs quotes, at Caddyfile:4`},
	{"redis a:1 {\npassword {http.request.header.hunter}\n}", `redis: password cannot depend on a request: use {env.NAME}, or {file.…} with the absolute path of a file, at Caddyfile:4`},
	{"redis a:1 {\npassword {file.hunter}\n}", `redis: password cannot depend on a request: use {env.NAME}, or {file.…} with the absolute path of a file, at Caddyfile:4`},
	{"redis a:1 {\npassword hunter2\npassword hunter2\n}", `redis: password is set already at Caddyfile:4, at Caddyfile:5`},
	{"redis a:1 {\ntls_client_key_pem -----BEGIN hunter2\n}", `redis: tls_client_key_pem has more than one argument: text with spaces needs quotes, at Caddyfile:4`},
	{"redis a:1 {\ntls_client_key_path \"-----BEGIN hunter2\"\n}", `redis: tls_client_key_path: this is the text of a certificate or a key, not the path of a file: write the option that ends with _pem, at Caddyfile:4`},
	{"redis rediss://a:1 {\ntls_server_certs_pem hunter2\n}", `redis: tls_server_certs holds no certificate: it must be PEM, -----BEGIN CERTIFICATE----- and so on; a file is named by tls_server_certs_path, at Caddyfile:3`},
	{"redis rediss://a:1 {\ntls_client_cert_pem hunter2\ntls_client_key_pem hunter2\n}", `redis: tls_client_cert and tls_client_key must be PEM and belong together: tls: failed to find any PEM data in certificate input, at Caddyfile:3`},
	// Combinations.
	{"redis redis://hunter:hunter2@a:1 {\nusername bob\n}", `redis: username stands in the URL and in the block: write it in one of them, at Caddyfile:3`},
	{"redis redis://:hunter2@a:1 {\npassword hunter2\n}", `redis: password stands in the URL and in the block: write it in one of them, at Caddyfile:3`},
	{"redis redis://a:1/0 {\ndb 1\n}", `redis: db stands in the URL and in the block: write it in one of them, at Caddyfile:3`},
	{"redis unix:///run/redis.sock?db=0 {\ndb 1\n}", `redis: db stands in the URL and in the block: write it in one of them, at Caddyfile:3`},
	{"redis rediss://a:1 {\ntls_enabled off\n}", `redis: the URL begins with rediss, which is TLS, but tls_enabled is off: write redis://, or leave tls_enabled out, at Caddyfile:3`},
	{"redis a:1 {\ncluster\nmaster_name main\n}", `redis: cluster and master_name are two ways to run Redis: write cluster for a Redis Cluster, or master_name for a master that Sentinels watch, at Caddyfile:3`},
	{"redis a:1 {\ncluster\ndb 1\n}", `redis: a Redis Cluster has no db but 0: leave it out, and tell environments apart by prefix, at Caddyfile:3`},
	{"redis redis://a:1/2 {\ncluster\n}", `redis: a Redis Cluster has no db but 0: leave it out, and tell environments apart by prefix, at Caddyfile:3`},
	{"redis a:1 {\nsentinel_password {env.HUNTER}\n}", `redis: sentinel_username and sentinel_password are for Sentinels: write master_name too, or username and password for Redis itself, at Caddyfile:3`},
	{"redis a:1 {\ncluster\nsentinel_username hunter2\n}", `redis: sentinel_username and sentinel_password are for Sentinels: write master_name too, or username and password for Redis itself, at Caddyfile:3`},
	{"redis a:1 {\nusername bob\n}", `redis: username needs a password: Redis is told both or none, at Caddyfile:3`},
	{"redis a:1 {\nmaster_name main\nsentinel_username bob\n}", `redis: sentinel_username needs a sentinel_password: Sentinels are told both or none, at Caddyfile:3`},
	{"redis unix:///run/redis.sock {\ncluster\n}", `redis: cluster and master_name need addresses as host:port: a unix socket leads to one server only, at Caddyfile:3`},
	{"redis unix:///run/redis.sock {\nmaster_name main\n}", `redis: cluster and master_name need addresses as host:port: a unix socket leads to one server only, at Caddyfile:3`},
	{"redis unix:///run/redis.sock {\ntls_enabled\n}", `redis: a unix socket does not leave this machine and has no TLS: leave tls_enabled out, at Caddyfile:3`},
	{"redis a:1 {\ntls_server_name a\n}", `redis: there are tls_ options, but TLS is off: write tls_enabled or a URL that begins with rediss://, or leave them out, at Caddyfile:3`},
	{"redis a:1 {\ntls_enabled off\ntls_insecure\n}", `redis: there are tls_ options, but TLS is off: write tls_enabled or a URL that begins with rediss://, or leave them out, at Caddyfile:3`},
	{"redis a:1 {\ntls_enabled\ntls_client_cert_path /a.crt\n}", `redis: tls_client_cert needs its key: write tls_client_key_path or tls_client_key_pem, at Caddyfile:3`},
	{"redis a:1 {\ntls_enabled\ntls_client_key_pem {env.HUNTER}\n}", `redis: tls_client_key needs its certificate: write tls_client_cert_path or tls_client_cert_pem, at Caddyfile:3`},
	{"redis a:1 {\ntls_enabled\ntls_server_certs_path /a.crt\ntls_server_certs_pem {env.HUNTER}\n}", `redis: tls_server_certs_path and tls_server_certs_pem say the same: write one of them, at Caddyfile:3`},
	// Words.
	{"redis a:1 {\nredis://:hunter2@b:1\n}", `redis: a URL is no option; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\ntimout 1s\n}", `redis: unknown option "timout" (did you mean timeout?); ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\npasword hunter2\n}", `redis: unknown option "pasword" (did you mean password?); ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nsentinel main\n}", `redis: unknown option "sentinel": write master_name, and the addresses of the Sentinels behind redis; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nhost a\nport 1\n}", `redis: unknown option "host": write host:port behind redis; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nkey_prefix caddy\n}", `redis: unknown option "key_prefix": write prefix in the global option rate_limit; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nprefix caddy\n}", `redis: unknown option "prefix": it belongs in the global option rate_limit; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nroute_by_latency\n}", `redis: unknown option "route_by_latency": masters make all decisions: leave it out; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nencryption_key hunter2\n}", `redis: unknown option "encryption_key": keys are hashed under key_secret, and nothing else is secret: leave it out; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\nclient_type failover\n}", `redis: unknown option "client_type": write cluster, or master_name for Sentinel, or neither; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\npool 8\n}", `redis: unknown option "pool": write pool_size; ` + knownInRedis + `, at Caddyfile:4`},
	{"redis a:1 {\ntls_server_certs /a.crt\n}", `redis: unknown option "tls_server_certs": write tls_server_certs_path or tls_server_certs_pem; ` + knownInRedis + `, at Caddyfile:4`},
}

// Lines in the global option's block; the first of them is line 3.
var wrongInGlobal = []wrong{
	{`zone api`, `zone api: write a block with a rate: here shared zones are defined, at Caddyfile:3`},
	{"zone api {\n}", `zone api: write a block with a rate: here shared zones are defined, at Caddyfile:3`},
	{"zone api {\nmatch @api\n}", `zone api: match @api: named matchers belong to sites: write a path here, or in a zone match path /a /b, at Caddyfile:4`},
	{"zone api {\nrate 1/s\nsensitive @api\n}", `zone api: sensitive @api: named matchers belong to sites: write a path here, or in a zone match path /a /b, at Caddyfile:5`},
	{"zone api {\nrate 1/s\n}\nzone api {\nrate 2/s\n}", `global option: zone api is in this block already at Caddyfile:3: give one of them another name, at Caddyfile:6`},
	{"zone api {\nrate 1/s\n}\nzone api {\nrate 1/s\n}", `global option: zone api is in this block already at Caddyfile:3: give one of them another name, at Caddyfile:6`},
	{`exempt /a`, `global option: unknown option "exempt": it belongs in the rate_limit block; ` + knownInGlobal + `, at Caddyfile:3`},
	{`shed 10`, `global option: unknown option "shed": it belongs in the rate_limit block; ` + knownInGlobal + `, at Caddyfile:3`},
	{`prefix {host}`, `global option: prefix "{host}": write letters, digits and any of -_.:/, at Caddyfile:3`},
	{`prefix ""`, `global option: prefix "": write letters, digits and any of -_.:/, at Caddyfile:3`},
	{`max_keys 0`, `global option: max_keys "0": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`top 0`, `global option: top "0": write a whole number from 1 to 10000, at Caddyfile:3`},
	{`top 10001`, `global option: top "10001": write a whole number from 1 to 10000, at Caddyfile:3`},
	{`top 1 2`, `global option: top: unexpected argument "2", at Caddyfile:3`},
	{`max_keys 1e6`, `global option: max_keys "1e6": write a whole number from 1 to 2147483647, at Caddyfile:3`},
	{`key_secret`, `global option: key_secret needs an argument: perhaps an environment variable is empty, at Caddyfile:3`},
	{`key_secret ""`, `global option: key_secret is empty: perhaps an environment variable is; leave key_secret out to do without, at Caddyfile:3`},
	{`key_secret hunter2 hunter3`, `global option: key_secret has more than one argument: text with spaces needs quotes, at Caddyfile:3`},
	{`nodes auto`, `global option: nodes auto needs a number too, which holds until Redis has told and is the least that is believed, like nodes auto 3, at Caddyfile:3`},
	{`maxkeys 10`, `global option: unknown option "maxkeys" (did you mean max_keys?); ` + knownInGlobal + `, at Caddyfile:3`},
	{`redis`, `global option: redis needs an address: perhaps an environment variable is empty; write redis off to do without Redis, at Caddyfile:3`},
	{`penalty off`, `global option: penalty off: here stands the name of a group; leave penalty out for none, or write penalty off in a zone, at Caddyfile:3`},
	{"zone api {\nrate 1/s\nkey {client_ip} {host}\n}", `zone api: key: unexpected argument "{http.request.host}": text with spaces needs quotes, at Caddyfile:5`},
}

// Whole Caddyfiles.
var wrongFiles = []wrong{
	{`:80 {
	rate_limit
}
`, `'rate_limit': rate_limit: nothing is limited: write a block with a zone or shed, at Caddyfile:2`},
	{`:80 {
	rate_limit {remote_host} 5r/s
}
`, `'rate_limit': rate_limit: unexpected argument "{http.request.remote.host}": the settings stand in a block, and more than one matcher needs a name, like @api path /a /b, at Caddyfile:2`},
	{`:80 {
	rate_limit /a /b {
		shed
	}
}
`, `'rate_limit': rate_limit: unexpected argument "/b": the settings stand in a block, and more than one matcher needs a name, like @api path /a /b, at Caddyfile:2`},
	{`:80 {
	rate_limit @missing {
		shed
	}
}
`, `'rate_limit': unrecognized matcher name: @missing`},
	{`:80 {
	route {
		rate_limit {
			zone a {
				rate fast
			}
		}
	}
}
`, `'route': parsing caddyfile tokens for 'rate_limit': zone a: rate "fast": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:5, at Caddyfile:8`},
	{`:80 {
	handle /a/* {
		@x path /a/x
		rate_limit {
			exempt @x
			exempt @y
			shed
		}
	}
}
`, `'handle': parsing caddyfile tokens for 'rate_limit': rate_limit: exempt @y: no such matcher in this site: define it, like @y path /a /b, at Caddyfile:6, at Caddyfile:9`},
	{`{
	rate_limit
}
`, `'rate_limit': global option: rate_limit needs a block, at Caddyfile:2`},
	{`{
	rate_limit off
}
`, `'rate_limit': global option: unexpected argument "off": the settings stand in a block, at Caddyfile:2`},
	{`{
	rate_limit {
		nodes 2
	}
	rate_limit {
		nodes 3
	}
}
`, `'rate_limit': global option: rate_limit is there already: write everything into one block, at Caddyfile:5`},
	{`{
	rate_limit {
		zone web {
			rate 1/s
		}
		zone api {
			rate 1/s
		}
	}
}
:80 {
	rate_limit {
		zone wbe
	}
}
`, `'rate_limit': zone wbe: write a block with a rate: without one this is a shared zone, and the global option defines only api, web, at Caddyfile:13`},
	{`{
	rate_limit {
		zone web {
			rate 1/s
			key {client_ip}
		}
	}
}
:80 {
	rate_limit {
		zone web {
			rate 2/s
			key {client_ip}{host}
		}
	}
}
`, `'rate_limit': zone web: differs in rate, burst, key from the definition at Caddyfile:3: a name is one budget wherever it stands; write the same or choose another name, at Caddyfile:11`},
	{`{
	rate_limit {
		penalty {
			after 5
		}
	}
}
:80 {
	rate_limit {
		zone web {
			rate 2/s
		}
		penalty
	}
}
`, `'rate_limit': penalty: differs in after from the definition at Caddyfile:3: strikes of a group are counted together; write the same or name another group, like penalty strict, at Caddyfile:13`},
	{`:80 {
	rate_limit {
		zone web {
			rate 1/s
		}
	}
}
:81 {
	handle {
		rate_limit {
			zone web {
				rate 1/s
				burst 10
				ipv4_prefix 24
				ipv6_prefix 56
				store memory
				on_store_error allow
			}
		}
	}
}
`, `'handle': parsing caddyfile tokens for 'rate_limit': zone web: differs in burst, ipv4_prefix, ipv6_prefix, store, on_store_error from the definition at Caddyfile:3: a name is one budget wherever it stands; write the same or choose another name, at Caddyfile:11, at Caddyfile:20`},
	{`:80 {
	rate_limit /a {
		shed
		penalty strict {
			base 1m
			max 2h
		}
	}
	rate_limit /b {
		shed 100
		penalty strict {
			base 2m
			window 2h
			every 1s
		}
	}
}
`, `'rate_limit': penalty strict: differs in base, max, window, every from the definition at Caddyfile:4: strikes of a group are counted together; write the same or name another group, like penalty strict, at Caddyfile:11`},
	{`:80 {
	rate_limit /a {
		shed
	}
	rate_limit /b {
		shed 50 {
			pool default
		}
	}
}
`, `'rate_limit': shed pool default: differs in max_in_flight from the definition at Caddyfile:3: a pool is one counter; write the same number or another pool, at Caddyfile:6`},
	{`(limit) {
	rate_limit {
		zone web {
			rate {args[0]}
		}
	}
}
:80 {
	import limit 1/s
}
:81 {
	import limit 2/s
}
`, `'rate_limit': zone web: differs in rate, burst from the definition at Caddyfile:3 import chain ['Caddyfile:9 (import limit)']: a name is one budget wherever it stands; write the same or choose another name, at Caddyfile:3 import chain ['Caddyfile:12 (import limit)']`},
	{`(limit) {
	rate_limit {
		zone web {
			rate {args[0]}
		}
	}
}
:80 {
	import limit ""
}
`, `'rate_limit': zone web: rate "": write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day, at Caddyfile:4 import chain ['Caddyfile:9 (import limit)']`},
	{`&(guard) {
	rate_limit {
		zone web {
			rate 1/s
			burst none
		}
	}
}
:80 {
	invoke guard
}
`, `'rate_limit': zone web: burst "none": write a whole number from 1 to 9007199254, at Caddyfile:5, at Caddyfile:8`},
}

func TestCaddyfileErrors(t *testing.T) {
	const inDirective = "parsing caddyfile tokens for 'rate_limit': "
	for _, in := range []struct {
		around, before string
		rows           []wrong
	}{
		{inZone, inDirective, wrongInZone},
		{inBlock, inDirective, wrongInBlock},
		{inBlock, inDirective, wrongInRedis},
		{inGlobal, inDirective, wrongInGlobal},
		{"%s", "parsing caddyfile tokens for ", wrongFiles},
	} {
		for _, row := range in.rows {
			config := fmt.Sprintf(in.around, row.text)
			_, err := adapted(config)
			if want := in.before + row.want; err == nil || err.Error() != want {
				t.Errorf("adapting:\n%s\ngot:  %v\nwant: %s", config, err, want)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error shows a secret: %v", err)
			}
		}
	}
}

// Options of later versions are known, and said to be missing.
func TestCaddyfileLaterOptions(t *testing.T) {
	for _, room := range (blockReader{}).rooms() {
		for word, o := range room.table {
			if o.read != nil {
				continue
			}
			config, ok := map[string]string{
				"a zone":         fmt.Sprintf(inZone, word),
				"the shed block": fmt.Sprintf(inBlock, "shed {\n"+word+"\n}"),
			}[room.name]
			if !ok {
				t.Errorf("no test for %s, which belongs in %s", word, room.name)
			}
			_, err := adapted(config)
			if err == nil || !strings.Contains(err.Error(), ": "+word+" is not supported yet") || !strings.HasSuffix(err.Error(), ", at Caddyfile:4") {
				t.Errorf("%s in %s: got error %v", word, room.name, err)
			}
		}
	}
}

func TestNearest(t *testing.T) {
	known := []string{"burst", "cost", "key", "match", "rate"}
	for word, want := range map[string]string{
		"burts":                      "burst", // two letters swapped
		"bursts":                     "burst",
		"ky":                         "key",
		"Rate":                       "rate",
		"costs":                      "cost",
		"k":                          "", // nothing of it is left
		"limits":                     "",
		"":                           "",
		strings.Repeat("key", 1<<20): "",
	} {
		if got := nearest(word, known); got != want {
			t.Errorf("nearest to %.20q is %q, want %q", word, got, want)
		}
	}
}

// Every hint for a word of another limiter is for a word that is not ours.
func TestOtherWordsAreNoOptions(t *testing.T) {
	for _, room := range (blockReader{}).rooms() {
		for word := range otherWords {
			if slices.Contains(room.table.known(), word) {
				t.Errorf("%s is an option in %s", word, room.name)
			}
		}
		for word := range otherRedisWords {
			if room.name == "the redis block" && slices.Contains(room.table.known(), word) {
				t.Errorf("%s is an option in %s", word, room.name)
			}
		}
	}
}

// Every wrong Caddyfile is also refused by caddy validate, with the same words.
func TestCaddyfileErrorsInValidate(t *testing.T) {
	var configs []wrong
	for _, in := range []struct {
		around string
		rows   []wrong
	}{{inZone, wrongInZone}, {inBlock, wrongInBlock}, {inBlock, wrongInRedis}, {inGlobal, wrongInGlobal}, {"%s", wrongFiles}} {
		for _, row := range in.rows {
			configs = append(configs, wrong{fmt.Sprintf(in.around, row.text), row.want})
		}
	}
	concurrently(len(configs), func(i int) {
		if got, _ := validated(t, "Caddyfile", configs[i].text); !strings.HasSuffix(got, configs[i].want) {
			t.Errorf("validating:\n%s\ngot:  %s\nwant: %s", configs[i].text, got, configs[i].want)
		}
	})
}
