package bench

import (
	"testing"
	"time"
)

// round is one measurement of one server.
type round struct {
	perSecond float64
	p50, p99  time.Duration
	// Microseconds of CPU a request: of the server, of Redis, and of the clients and the delaying proxy, which are this process.
	server, redis, own float64
	// Commands a request: sent to Redis, and executed there.
	calls, executed float64
	callsPerSecond  float64
}

// rounds are the measurements of one server. The first one of a scenario, bare, has one more than the others: each of theirs stands
// between two of its.
type rounds struct {
	name string
	all  []round
}

// result is what was measured in a scenario.
type result struct {
	scenario
	roundTrip time.Duration
	outages   int // of Redis, as ours saw it
	servers   []rounds
}

// run measures a scenario: bare, ours, the others, bare, ours, …, bare.
func run(t testing.TB, sc scenario, o options) result {
	t.Helper()
	r := newRig(t, &sc)
	var servers []*server
	for _, s := range sc.subjects {
		servers = append(servers, r.start(s))
	}
	if o.rival != nil && !sc.down {
		servers = append(servers, r.startRival(o.rival, servers[1].site.status))
	}
	res := result{scenario: sc, roundTrip: r.roundTrip, servers: make([]rounds, len(servers))}
	for i, s := range servers {
		res.servers[i].name = s.name
		r.prepare(sc, s)
	}
	for range o.rounds {
		for i, s := range servers {
			res.servers[i].all = append(res.servers[i].all, r.measure(sc.load, s, o.duration))
		}
	}
	res.servers[0].all = append(res.servers[0].all, r.measure(sc.load, servers[0], o.duration))
	res.outages = outages(servers)
	return res
}

// settle is how long after its start a server may still wait for its first connection to Redis.
const settle = 1200 * time.Millisecond

// prepare sends what must have been sent before a server is measured.
func (r *rig) prepare(sc scenario, s *server) {
	r.t.Helper()
	l, duration := load{conns: 8, keys: sc.load.keys}, 50*time.Millisecond
	if sc.down {
		duration = settle
	}
	if !sc.fill || s.name == bareName {
		_, err := l.run(&s.site, duration, 0, func() {})
		r.check(s, err)
		return
	}
	for s.site.turn < sc.load.keys/everyKey.conns { // each of the connections sends its part of the keys
		_, err := everyKey.run(&s.site, 500*time.Millisecond, 0, func() {})
		r.check(s, err)
	}
}

func (r *rig) check(s *server, err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatalf("%s: %v", s.name, err)
	}
}

// maxWarm is the longest time for which a round warms up.
const maxWarm = 300 * time.Millisecond

func (r *rig) measure(l load, s *server, duration time.Duration) round {
	r.t.Helper()
	m := &meter{t: r.t, redis: r.redis, serverPids: s.pids(), redisPids: r.redis.Pids()}
	got, err := l.run(&s.site, min(duration/5, maxWarm), duration, m.mark)
	r.check(s, err)
	if got.requests == 0 {
		r.t.Fatalf("%s answered nothing", s.name)
	}
	if got.odd*100 > got.requests {
		r.t.Errorf("%s: %d of %d answers have not the status %d, one of them %d", s.name, got.odd, got.requests, s.site.status, got.oddStatus)
	}
	return m.round(got)
}

// round puts what the clients saw and what the processes used together.
func (m *meter) round(got *sample) round {
	n, seconds := float64(got.requests), got.elapsed.Seconds()
	micros := func(from, to time.Duration) float64 { return float64(to-from) / float64(time.Microsecond) / n }
	sent, executed := calls(m.before.commands, m.after.commands)
	return round{
		perSecond: n / seconds, p50: got.latency.quantile(0.50), p99: got.latency.quantile(0.99),
		server: micros(m.before.server, m.after.server), redis: micros(m.before.redis, m.after.redis), own: micros(m.before.own, m.after.own),
		calls: float64(sent) / n, executed: float64(executed) / n, callsPerSecond: float64(sent) / seconds,
	}
}

// outages counts how often ours took Redis for down: what it did meanwhile is not what the scenario is about.
func outages(servers []*server) (times int) {
	for _, s := range servers {
		if s.node != nil {
			times += s.node.LogLines("deciding without it")
		}
	}
	return times
}
