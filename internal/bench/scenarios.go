// Package bench measures what a limiter costs: it runs Caddys with and without one as users run them, loads them in turns, and reports
// medians of ratios. `make bench` runs it, in a test with the build tag bench, so that servers end as they do in other tests.
//
// The servers are in rig.go and rival.go, what is sent to them in load.go, what the kernel and Redis have counted in meter.go; rounds.go
// measures, ratios.go compares, and table.go, plot.go and document.go report.
package bench

import "time"

// scenario is one question: what does a limiter cost in this situation?
type scenario struct {
	name, about string
	load        load
	// fill sends every key once before the first round, so that all buckets are there.
	fill bool
	// distance is the round trip to Redis; 0: as it is.
	distance time.Duration
	// down says that Redis cannot be reached.
	down bool
	// subjects are compared with the first one.
	subjects []subject
}

// subject is one of the servers that a scenario compares.
type subject struct {
	name string
	// site is what stands in the Caddyfile.
	site string
	// status is what the answers have, 200 if it is 0.
	status int
	// program is another Caddy than ours, as a package of this module.
	program string
}

const (
	bareName, oursName = "bare", "Tollgate"

	manyKeys = 100_000

	hello   = "respond hello\n"
	forward = "reverse_proxy {$BACKEND}\n"

	// A bucket that is seldom full and never empty, so that every request updates it: a thousand requests of each client.
	roomy = "rate 10/h\nburst 1000\n"
	// A bucket that nobody empties.
	endless = "rate 1000000/s\n"
	tiny    = "rate 1/h\n"

	byKey = "key {header.X-Key}\n"
	// With the default timeout of 50 ms a machine that is too busy would make decisions without Redis, and look fast.
	shared = "redis {$REDIS} {\ntimeout 1s\nsensitive_timeout 1s\n}\nnodes 1\n"

	roomyReference   = "bench_reference {$REDIS} {$SCRIPT} 1 360 1000\n"
	endlessReference = "bench_reference {$REDIS} {$SCRIPT} 1000000 1 1000000\n"
)

// limit returns a rate_limit directive.
func limit(store, rest string) string { return "rate_limit {\n" + store + rest + "}\n" }

// zone returns a zone of a rate_limit directive.
func zone(name, rest string) string { return "zone " + name + " {\n" + rest + "}\n" }

func bare(site string) subject { return subject{name: bareName, site: site} }

func ours(site string) subject { return subject{name: oursName, site: site} }

// reference is ours as one would write it first: every request is a call of its own on a connection of its own.
func reference(limit string) subject {
	return subject{name: "one call each", site: limit + hello, program: "./internal/bench/reference"}
}

var (
	exact    = limit(shared, zone("api", byKey+roomy))
	inMemory = limit("redis off\n", zone("api", byKey+roomy))
	everyKey = load{conns: 64, keys: manyKeys}
	oneKey   = load{conns: 64, keys: 1}
)

// scenarios returns all of them, in the order of the report.
func scenarios() []scenario {
	all := []scenario{
		{name: "memory", about: "buckets in the process, 100 000 keys", load: everyKey, fill: true,
			subjects: []subject{bare(hello), ours(inMemory + hello)}},
		{name: "redis", about: "buckets in Redis, 100 000 keys, every decision exact", load: everyKey, fill: true,
			subjects: withRedis(exact, roomyReference)},
		{name: "hot", about: "buckets in Redis, one key far from its limit", load: oneKey,
			subjects: withRedis(limit(shared, zone("api", byKey+endless)), endlessReference)},
		{name: "leased", about: "the same with `lease auto`", load: oneKey,
			subjects: []subject{bare(hello), ours(limit(shared, zone("api", byKey+endless+"lease auto\n")) + hello)}},
		{name: "zones", about: "three zones in Redis: two on each of 100 000 keys, one on the address", load: everyKey, fill: true,
			subjects: []subject{bare(hello), ours(limit(shared, threeZones) + hello)}},
		{name: "proxy memory", about: "buckets in the process, before a reverse proxy", load: everyKey,
			subjects: []subject{bare(forward), ours(inMemory + forward)}},
		{name: "proxy redis", about: "buckets in Redis, before a reverse proxy", load: everyKey,
			subjects: []subject{bare(forward), ours(exact + forward)}},
	}
	return append(append(all, floods()...), distances()...)
}

const threeZones = "zone day {\nkey {header.X-Key}\nrate 10000/day\n}\n" +
	"zone api {\nkey {header.X-Key}\nrate 10/h\nburst 1000\n}\n" +
	"zone address {\nrate 1000000/s\n}\n"

func withRedis(limit, referenceLimit string) []subject {
	return []subject{bare(hello), ours(limit + hello), reference(referenceLimit)}
}

// floods are requests of which none reaches what is behind the limiter. What they would cost without one is seen by a reverse
// proxy, too.
func floods() []scenario {
	proxied := subject{name: "bare proxy", site: forward}
	refused := ours(limit(shared, zone("api", byKey+tiny)) + hello)
	blocked := ours(limit(shared, "penalty {\nafter 0\nbase 1h\n}\n"+zone("api", byKey+tiny)) + hello)
	shed := ours(limit(shared, "shed 1\n"+zone("api", byKey+endless)) + "handle /hold {\nreverse_proxy {$HOLD}\n}\n" + hello)
	refused.status, blocked.status, shed.status = 429, 429, 503
	return []scenario{
		{name: "refused", about: "one key over its limit, without penalties", load: oneKey, subjects: []subject{bare(hello), refused, proxied}},
		{name: "blocked", about: "one key that is blocked", load: oneKey, subjects: []subject{bare(hello), blocked, proxied}},
		{name: "shed", about: "all slots of requests in flight are taken", load: oneKey, subjects: []subject{bare(hello), shed, proxied}},
	}
}

// distances vary the way to Redis and the number of connections.
func distances() []scenario {
	paced := load{conns: 64, keys: manyKeys, pace: 2000}
	all := []scenario{
		{name: "far", about: "Redis 1 ms away", load: everyKey, distance: time.Millisecond, subjects: withRedis(exact, roomyReference)},
		{name: "far paced", about: "Redis 1 ms away, 2 000 requests/s", load: paced, distance: time.Millisecond, subjects: withRedis(exact, roomyReference)},
		{name: "down paced", about: "Redis down, 2 000 requests/s", load: paced, down: true, subjects: []subject{bare(hello), ours(exact + hello)}},
	}
	for _, c := range []struct {
		name  string
		conns int
	}{{"1 connection", 1}, {"8 connections", 8}, {"512 connections", 512}} {
		all = append(all, scenario{name: c.name, about: "buckets in Redis, 100 000 keys",
			load: load{conns: c.conns, keys: manyKeys}, subjects: withRedis(exact, roomyReference)})
	}
	return all
}
