package ratelimit

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"
)

// This file holds what is known about one server: whether it is up, who waits while it is not, how it is probed, what is said.

const (
	// connectGrace is how long after the start decisions wait for the first connection.
	connectGrace = time.Second
	// The pause between two probes of a server that is down grows from the first to the second.
	probeFirst, probeMax = 25 * time.Millisecond, 250 * time.Millisecond
	// A server that goes down within steady after it came up is left alone for longer each time, at most for calm: one that
	// answers probes but not requests would otherwise change its state, and log it, some hundred times a second.
	steady, calm = 10 * time.Second, 5 * time.Second
)

// endpoint is one server: a Redis, the master that Sentinels name, or a master of a Cluster. What it knows about the server
// outlives its connections.
type endpoint struct {
	client  *redisClient
	name    string // for logs, without credentials
	ctx     context.Context
	retire  context.CancelFunc
	breaker breaker

	// dial makes a client of its own for the server; nil where that belongs to somebody else, or there is none.
	dial func() *redis.Client
	// follow sends a command where a Cluster says that it belongs; nil without one.
	follow func(ctx context.Context, cmd redis.Cmder) error
	// lost is told of every round trip without an answer; nil if nobody cares.
	lost func()
	// probeKey is a key that the server keeps, if it keeps any.
	probeKey func() (string, bool)

	conn atomic.Pointer[connection] // nil if it is only waited for

	mu sync.Mutex
	up chan struct{} // closed when the server is up
	// connecting until the first connection, or the first failure to get one
	connecting bool
	nextProbe  time.Time
	cameUpAt   time.Time
	flaps      int // outages in a row that began within steady
}

// connection is a client of one server with two lanes, for decisions with the small and with the large budget.
type connection struct {
	client         *redis.Client
	quick, patient *lane
}

// has says whether a lane is one of the connection's.
func (c *connection) has(l *lane) bool { return l == c.quick || l == c.patient }

// newEndpoint returns a server that counts as down until a probe says otherwise. It ends with the context.
func newEndpoint(ctx context.Context, c *redisClient, name string) *endpoint {
	e := &endpoint{client: c, name: name, up: make(chan struct{}), connecting: true}
	e.ctx, e.retire = context.WithCancel(ctx)
	e.breaker.trip(processMicros())
	return e
}

// use lets the endpoint work with a client.
func (e *endpoint) use(client *redis.Client) {
	s := &e.client.settings
	e.conn.Store(&connection{client: client, quick: newLane(e, client, s.timeout), patient: newLane(e, client, s.patience)})
}

// connect replaces the connections, if they are our own to replace. What is still on its way on the old ones is answered.
func (e *endpoint) connect() {
	if e.dial == nil {
		return
	}
	old := e.conn.Load()
	e.use(e.dial())
	if e.ctx.Err() != nil { // it was shut meanwhile, with the old ones
		_ = e.conn.Load().client.Close()
	}
	if old != nil {
		time.AfterFunc(linger, func() { _ = old.client.Close() })
	}
}

// shut ends the endpoint. The client of a Cluster's node stays open: it belongs to the Cluster.
func (e *endpoint) shut() {
	e.retire()
	if e.dial != nil {
		_ = e.conn.Load().client.Close()
	}
}

// ready says whether the server is worth a try, and waits a little where that is better than to give up: for the first
// connection, and, on a sensitive route, while the server may just have hiccuped.
func (e *endpoint) ready(ctx context.Context, patient bool) bool {
	down, since := e.breaker.state()
	if !down {
		return true
	}
	e.mu.Lock()
	up, connecting := e.up, e.connecting
	e.mu.Unlock()
	until, now := since, processMicros()
	switch s := &e.client.settings; {
	case connecting && patient:
		until = since + connectGrace.Microseconds()
	case connecting:
		until = min(since+connectGrace.Microseconds(), now+s.timeout.Microseconds())
	case patient:
		until = since + s.patience.Microseconds()
	}
	if until <= now {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, micro(until-now))
	defer cancel()
	select {
	case <-up:
		return true
	case <-e.ctx.Done(): // somebody else keeps the key by now
		return true
	case <-ctx.Done():
		return false
	}
}

// patience returns how long a decision about a sensitive zone may take: what the configuration says, and until the first
// connection has had its time, that too.
func (e *endpoint) patience() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.connecting {
		return e.client.settings.patience + connectGrace
	}
	return e.client.settings.patience
}

// take decides about charges, within the budget.
func (e *endpoint) take(ctx context.Context, patient bool, charges []Charge) (outcome, error) {
	conn := e.conn.Load()
	if conn == nil {
		return outcome{}, errDown
	}
	if patient {
		return conn.patient.take(ctx, charges)
	}
	return conn.quick.take(ctx, charges)
}

// ended learns from the end of a round trip on a lane that began at started.
func (e *endpoint) ended(l *lane, started int64, err error) {
	now := processMicros()
	e.client.counts.called(now - started)
	if classify(err) == classUnavailable {
		e.client.counts.failed(err)
		e.failed(l, started, now, err)
	} else {
		e.breaker.answered(now)
	}
}

// failed counts a call without an answer. A master that has become a replica is down at once: it answers nobody who writes, and
// the way to the new one needs new connections. If it has them already, what a late answer on an old one says is known.
func (e *endpoint) failed(l *lane, started, now int64, err error) {
	e.mu.Lock()
	demoted := isReadOnly(err) && e.conn.Load().has(l)
	down := e.breaker.failed(started, now, l.budget.Microseconds()) || demoted && e.breaker.trip(now)
	var rest time.Duration
	if down {
		e.up = make(chan struct{}) // before anybody who sees it down looks for what to wait for
		rest = e.restLocked()
	}
	e.mu.Unlock()
	if e.lost != nil {
		e.lost()
	}
	if down {
		e.wentDown(err, rest)
	}
}

func (e *endpoint) wentDown(err error, rest time.Duration) {
	e.client.counts.outages.Add(1)
	e.client.log().Warn("redis is down, deciding without it", zap.String("redis", e.name), zap.Error(err))
	emitStoreDown(e.name, err)
	if isReadOnly(err) {
		e.connect()
	}
	go e.probe(e.answers, rest)
}

// restLocked returns how long a server that has just gone down is left alone.
func (e *endpoint) restLocked() time.Duration {
	if time.Since(e.cameUpAt) >= steady {
		e.flaps = 0
		return 0
	}
	rest := min(probeFirst<<min(e.flaps, 16), calm)
	e.flaps++
	e.nextProbe = time.Now().Add(rest)
	return rest
}

// probe tries, after a rest, until the server answers. There is one probe at a time; it ends with the endpoint.
func (e *endpoint) probe(try func() error, rest time.Duration) {
	if !sleep(e.ctx, rest) {
		return
	}
	for pause := probeFirst; ; pause = min(2*pause, probeMax) {
		err := try()
		if e.ctx.Err() != nil {
			return
		}
		if err == nil {
			e.cameUp()
			return
		}
		e.stillDown(err)
		if isReadOnly(err) {
			e.connect()
		}
		jittered := pause/2 + rand.N(pause) //nolint:gosec // no secret
		e.mu.Lock()
		e.nextProbe = time.Now().Add(jittered)
		e.mu.Unlock()
		if !sleep(e.ctx, jittered) {
			return
		}
	}
}

// sleep waits, and says whether the context is still alive then.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// probeCharge is one that is always allowed and always written: a replica, or a Redis without memory, also answers.
var probeCharge = Charge{Zone: "probe", Limit: Limit{Num: Token, Den: 1, Burst: Token}, Cost: Token}

var errNoSlots = errors.New("redis keeps no slot of the cluster")

// answers runs the script itself, so that a server that is too far away stays down: once within the large budget, since a
// connection may have to be opened and logged in first, then within the small one. Were the small one all it had, each probe would
// use up a connection that is about to be ready.
func (e *endpoint) answers() error {
	key, ok := e.probeKey()
	if !ok {
		return errNoSlots
	}
	conn, begun := e.conn.Load(), time.Now()
	if err := e.try(conn.patient, key); err != nil {
		return err
	}
	if time.Since(begun) <= e.client.settings.timeout {
		return nil
	}
	begun = time.Now()
	err := e.try(conn.quick, key)
	if err == nil && time.Since(begun) > e.client.settings.timeout {
		err = errTimeout
	}
	return err
}

func (e *endpoint) try(l *lane, key string) error {
	c := new(call)
	c.batch.add(e.client.settings.prefix, []Charge{probeCharge})
	// A fresh key each time, in the slot of this one: all commands of the script are run, also that which sets a TTL.
	c.batch.keys[0] = key + ":" + strconv.FormatUint(rand.Uint64(), 36) //nolint:gosec // no secret
	l.run([]*call{c})
	return c.err
}

func (e *endpoint) cameUp() {
	e.mu.Lock()
	outage := e.breaker.reset(processMicros())
	first := e.connecting
	e.connecting, e.cameUpAt = false, time.Now()
	close(e.up)
	e.mu.Unlock()
	if first {
		e.client.log().Info("redis is up", zap.String("redis", e.name))
		return
	}
	e.client.log().Info("redis is up again", zap.String("redis", e.name), zap.Duration("outage", micro(outage)))
	emitStoreUp(e.name, micro(outage))
}

// stillDown says once that the first connection could not be made.
func (e *endpoint) stillDown(err error) {
	_, since := e.breaker.state()
	e.mu.Lock()
	first := e.connecting && processMicros()-since >= connectGrace.Microseconds()
	e.connecting = e.connecting && !first
	e.mu.Unlock()
	if first {
		e.client.counts.outages.Add(1)
		e.client.log().Warn("redis cannot be reached, deciding without it", zap.String("redis", e.name), zap.Error(err))
		emitStoreDown(e.name, err)
	}
}

// retryAfter returns how long until it is worth to try again, while the server is down.
func (e *endpoint) retryAfter() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return max(time.Until(e.nextProbe), time.Second)
}
