package ratelimit

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"
	"time"
)

// This file simulates many nodes on one Redis: the limiters are real, Redis is the model of its script, and time is a number.
// docs/scaling.md holds what comes out of it.

// traffic is what a simulation is asked: requests come at random moments to random nodes, by keys of which few are used a lot.
type traffic struct {
	nodes     int
	perSecond int // requests, over all nodes
	seconds   int
	limit     Limit // of each key
	leases    bool
}

const (
	// simulatedWay is how long a call is under way to Redis, and its reply back, in microseconds.
	simulatedWay = 500
	// simulatedKeys are used by Zipf's law with this exponent: the first of them makes about an eighth of the requests.
	simulatedKeys, simulatedExponent = 10_000, 1.1
)

// simulation is a run of it.
type simulation struct {
	traffic
	now     int64
	begun   int64
	nodes   []*Limiter
	redis   *plain
	keys    []simulatedKey
	random  *rand.Rand
	zipf    *rand.Zipf
	running *caller
	idle    []*caller
	// onTheWay are calls and replies, in the order in which they arrive: all are under way for the same time.
	onTheWay []*caller

	requests, calls, admitted, granted, served int64 // the latter two are tokens
	err                                        error
}

// simulatedKey is what a key was offered and what it got.
type simulatedKey struct {
	meter          meter
	offered, calls int64
	// ideal decides about the same requests the moment they come.
	ideal         Bucket
	idealAdmitted int64
}

// caller is a coroutine in which requests are decided about, one after the other. It stops where a call is under way.
type caller struct {
	node    *Limiter
	key     int
	charges []Charge
	arrives int64 // when what is under way is there
	resume  func() (done, ok bool)
	pause   func(done bool) bool
	stop    func()
}

// simulate runs it. The same traffic has the same requests with leases and without.
func simulate(tr traffic) (*simulation, error) {
	const start = 1_764_550_000_000_000
	random := rand.New(rand.NewPCG(1, 2))
	s := &simulation{
		traffic: tr, now: start, begun: start, nodes: make([]*Limiter, tr.nodes), redis: newPlain(), keys: make([]simulatedKey, simulatedKeys),
		random: random, zipf: rand.NewZipf(random, simulatedExponent, 1, simulatedKeys-1),
	}
	for i := range s.nodes {
		s.nodes[i], _ = newTestLimiter(&simulatedRedis{simulation: s}, int64(tr.nodes))
		s.nodes[i].now = func() int64 { return s.now }
	}
	for i := range s.keys {
		s.keys[i].meter = meter{limit: tr.limit, tokens: tr.limit.Burst, at: start}
	}
	s.run()
	return s, s.err
}

func (s *simulation) run() {
	between := 1e6 / float64(s.perSecond)
	end := float64(s.begun) + float64(s.seconds)*1e6
	for at := float64(s.begun) + between*s.random.ExpFloat64(); at < end; at += between * s.random.ExpFloat64() {
		s.deliver(int64(at))
		s.now = int64(at)
		s.request(s.random.IntN(len(s.nodes)), int(s.zipf.Uint64()))
	}
	s.deliver(int64(end) + 2*simulatedWay)
	for _, v := range s.idle {
		v.stop()
	}
}

// deliver lets calls and replies arrive until a time.
func (s *simulation) deliver(until int64) {
	for len(s.onTheWay) > 0 && s.onTheWay[0].arrives <= until {
		v := s.onTheWay[0]
		s.onTheWay = s.onTheWay[1:]
		s.now = v.arrives
		s.goOn(v)
	}
}

func (s *simulation) request(node, key int) {
	v := s.idleCaller()
	v.node, v.key = s.nodes[node], key
	c := Charge{Zone: "api", Limit: s.limit, Cost: Token, Floor: Token, Leases: s.leases, OnStoreError: PolicyDeny}
	binary.BigEndian.PutUint64(c.ID[:], uint64(key))
	v.charges = append(v.charges[:0], c)
	s.requests++
	s.keys[key].offer(s.now, s.limit)
	s.goOn(v)
}

func (s *simulation) goOn(v *caller) {
	s.running = v
	if done, _ := v.resume(); done {
		s.idle = append(s.idle, v)
	} else {
		v.arrives = s.now + simulatedWay
		s.onTheWay = append(s.onTheWay, v)
	}
}

func (s *simulation) idleCaller() *caller {
	if n := len(s.idle); n > 0 {
		v := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return v
	}
	v := &caller{}
	v.resume, v.stop = iter.Pull(func(pause func(bool) bool) {
		v.pause = pause
		for more := true; more; more = pause(true) {
			s.served += s.decide(v)
		}
	})
	return v
}

// decide returns what was served from a lease.
func (s *simulation) decide(v *caller) int64 {
	switch d := v.node.Decide(context.Background(), v.charges); d.Source {
	case SourceRedis, SourceCache:
		return 0
	case SourceLease:
		s.admit(v.key)
		return Token
	default:
		s.err = fmt.Errorf("decided by %d: %+v", d.Source, d)
		return 0
	}
}

// admit counts an admission when it is decided about, wherever that is.
func (s *simulation) admit(key int) {
	s.admitted++
	if err := s.keys[key].meter.admit(s.now, Token); err != nil {
		s.err = errors.Join(s.err, fmt.Errorf("key %d: %w", key, err))
	}
}

func (k *simulatedKey) offer(now int64, l Limit) {
	k.offered++
	k.ideal, _ = k.ideal.settled(l, now)
	if k.ideal.Tokens >= Token {
		k.ideal.Tokens -= Token
		k.idealAdmitted++
	}
}

// simulatedRedis is what a node sees of Redis.
type simulatedRedis struct {
	scriptedStore
	*simulation
}

// Take stops twice: until the call has arrived, and until the reply has.
func (r *simulatedRedis) Take(_ context.Context, charges []Charge) (Decision, error) {
	s, v := r.simulation, r.running
	v.pause(false)
	s.calls++
	s.keys[v.key].calls++
	d := s.redis.decide(s.now, charges)
	if d.Allowed {
		s.admit(v.key)
	}
	for _, tokens := range d.grants {
		s.granted += tokens
	}
	v.pause(false)
	return d, nil
}

// bound is the most that a key can be admitted.
func (s *simulation) bound() float64 {
	return float64(s.limit.Burst)/Token + float64(s.seconds)*float64(s.limit.Num)/float64(s.limit.Den)
}

// hot returns how many keys were offered twice as much as their limit, or more, and which part of it they were admitted together.
func (s *simulation) hot() (keys int, part float64) {
	admitted := int64(0)
	for i := range s.keys {
		if k := &s.keys[i]; float64(k.offered) >= 2*s.bound() {
			keys++
			admitted += k.meter.admitted / Token
		}
	}
	return keys, float64(admitted) / (s.bound() * float64(max(keys, 1)))
}

// part is what was admitted, of what one bucket would have that every request reaches the moment it comes.
func (s *simulation) part() float64 {
	ideal := int64(0)
	for i := range s.keys {
		ideal += s.keys[i].idealAdmitted
	}
	return float64(s.admitted) / float64(ideal)
}

func (s *simulation) callsPerRequest() float64 { return float64(s.calls) / float64(s.requests) }

// stranded is what was leased and not used, as a part of what was admitted.
func (s *simulation) stranded() float64 {
	return float64(s.granted-s.served) / Token / float64(s.admitted)
}

const simulationHead = `| nodes | leases | requests/s | calls/s | calls a request | of the hottest key | keys far over | their admitted ÷ limit | admitted ÷ ideal | stranded ÷ admitted |
|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|`

// String returns a row of the table.
func (s *simulation) String() string {
	leases, stranded, hot := "off", "", ""
	if s.leases {
		leases, stranded = "auto", fmt.Sprintf("%.3f", s.stranded())
	}
	keys, part := s.hot()
	if keys > 0 {
		hot = fmt.Sprintf("%.3f", part)
	}
	seconds, hottest := int64(s.seconds), &s.keys[0]
	return fmt.Sprintf("| %d | %s | %d | %d | %.3f | %.3f | %d | %s | %.3f | %s |", len(s.nodes), leases, s.requests/seconds, s.calls/seconds,
		s.callsPerRequest(), float64(hottest.calls)/float64(hottest.offered), keys, hot, s.part(), stranded)
}

// perSecond is a limit of so many a second, with a burst of as many.
func perSecond(n int64) Limit { return Limit{Num: n, Den: 1, Burst: n * Token} }

// However many nodes there are: no key is admitted more than its limit, leases cost hot keys next to nothing of it, and no calls.
func TestScaling(t *testing.T) {
	begun := time.Now()
	for _, nodes := range []int{1, 10, 100} {
		var runs [2]*simulation
		for i := range runs {
			var err error
			runs[i], err = simulate(traffic{nodes: nodes, perSecond: 10_000, seconds: 2, limit: perSecond(150), leases: i == 1})
			if err != nil {
				t.Fatalf("%d nodes: %v", nodes, err)
			}
			t.Log(runs[i])
		}
		keys, exact := runs[0].hot()
		if _, leased := runs[1].hot(); keys == 0 || leased < 0.9*exact {
			t.Errorf("%d keys far over their limit were admitted %.3f of it, and %.3f with leases", keys, exact, leased)
		}
		// Which refusals displace each other differs from table to table: their seeds are drawn.
		if exact, leased := runs[0].callsPerRequest(), runs[1].callsPerRequest(); leased > 1.001*exact {
			t.Errorf("%.4f calls a request, %.4f with leases", exact, leased)
		}
	}
	t.Logf("in %s", time.Since(begun))
}
