package ratelimit

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// This file carries decisions to one server. What comes while a batch is on its way is the next batch: a lone request waits for
// nothing, and many share a round trip and a run of the script. To a server that is far away several batches are on their way, or
// who comes just too late for one would wait for nearly two round trips.

const (
	// maxBatch bounds what one call of the script decides about, for which everybody else at the server waits.
	maxBatch = 128
	// maxQueued bounds the requests that wait for a batch, so that a stall costs no memory.
	maxQueued = 16384
	// maxFlights bounds the batches under way at a time. There is one, and another for every farther of the round trip: what a
	// server next door saves by large batches is worth more than the wait. Both lanes and a probe have room in the pool, so that
	// none waits for the other.
	maxFlights = 4
	farther    = 400 // µs
)

// errBusy says that nothing was sent, because too many wait already.
var errBusy = errors.New("too many decisions wait for redis")

// lane is a way to a server, on which few batches at a time are under way.
type lane struct {
	endpoint *endpoint
	client   *redis.Client // its timeouts are the budget of the lane
	budget   time.Duration
	most     int // batches that may be under way

	mu      sync.Mutex
	queue   []*errand
	flights int   // batches under way
	away    int64 // µs: the shortest of the latest round trips, without what a busy moment adds; 0 until there was one
}

// errand is a request on its way.
type errand struct {
	charges []Charge
	out     outcome
	err     error
	// abandoned says that nobody waits any more. What was not sent by then is never sent.
	abandoned atomic.Bool
	done      chan struct{} // takes one value, when out or err is there
	timer     *time.Timer
}

// errands are used again, but for those that were abandoned: somebody may still write to them.
var errands = sync.Pool{New: func() any {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return &errand{done: make(chan struct{}, 1), timer: timer}
}}

func newLane(e *endpoint, client *redis.Client, budget time.Duration) *lane {
	// A clone has timeouts of its own on the same connections.
	most := min((client.Options().PoolSize-1)/2, maxFlights)
	return &lane{endpoint: e, client: client.WithTimeout(budget), budget: budget, most: most}
}

// take decides about the charges of a request, within the budget.
func (l *lane) take(ctx context.Context, charges []Charge) (outcome, error) {
	r := errands.Get().(*errand)
	r.charges, r.err = charges, nil
	if !l.enqueue(r) {
		return outcome{}, errBusy
	}
	r.timer.Reset(l.budget)
	select {
	case <-r.done:
		r.timer.Stop()
		out, err := r.out, r.err
		r.charges, r.out = nil, outcome{}
		errands.Put(r)
		return out, err
	case <-r.timer.C:
		r.abandoned.Store(true)
		return outcome{}, errTimeout
	case <-ctx.Done():
		r.abandoned.Store(true)
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return outcome{}, errTimeout
		}
		return outcome{}, ctx.Err()
	}
}

func (l *lane) enqueue(r *errand) bool {
	l.mu.Lock()
	if len(l.queue) >= maxQueued {
		l.mu.Unlock()
		return false
	}
	l.queue = append(l.queue, r)
	start := l.departs()
	if start {
		l.flights++
	}
	l.mu.Unlock()
	if start {
		go l.fly()
	}
	return true
}

// departs tells whether another batch may be on its way: not on a connection that would first have to be opened, since the one
// under way may be back sooner. The lane is locked.
func (l *lane) departs() bool {
	if l.flights == 0 {
		return true
	}
	return l.flights < l.allowed() && l.client.PoolStats().IdleConns > 0
}

// allowed returns how many batches may be under way, the server being as far away as it is. The lane is locked.
func (l *lane) allowed() int { return min(1+int(l.away/farther), l.most) }

// arrived learns from a round trip how far away the server is. The lane forgets short ones slowly, a sixteenth at a time.
func (l *lane) arrived(took int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away == 0 {
		l.away = took
	}
	l.away = min(l.away+l.away/16+1, took)
}

// fly sends one batch after the other until nobody waits.
func (l *lane) fly() {
	for batch := l.next(); len(batch) > 0; batch = l.next() {
		l.send(batch)
	}
}

// next takes the next batch from the queue.
func (l *lane) next() []*errand {
	l.mu.Lock()
	defer l.mu.Unlock()
	next := make([]*errand, 0, min(len(l.queue), maxBatch))
	taken := 0
	for _, r := range l.queue {
		if len(next) == maxBatch {
			break
		}
		taken++
		if !r.abandoned.Load() {
			next = append(next, r)
		}
	}
	rest := copy(l.queue, l.queue[taken:])
	clear(l.queue[rest:])
	l.queue = l.queue[:rest]
	if len(next) == 0 {
		l.flights--
	}
	return next
}

// send carries a batch to the server and its answers back, and lets the endpoint know how the round trip went.
func (l *lane) send(batch []*errand) {
	started := processMicros()
	if !l.endpoint.breaker.start(started) {
		for _, r := range batch {
			r.end(errDown)
		}
		return
	}
	calls := l.calls(batch)
	l.run(calls)
	err := l.verdict(calls)
	if err == nil {
		l.arrived(processMicros() - started)
	}
	l.endpoint.ended(l, started, err)
	for _, c := range calls {
		if l.canFollow(c) {
			go l.follow(c)
		} else {
			c.deliver(l.endpoint)
		}
	}
}

// verdict returns what the calls of one round trip say about the server, nil if it is well. One that knows who else keeps a key
// is, and so is one that has nothing but our own mistakes to tell.
func (l *lane) verdict(calls []*call) error {
	for _, c := range calls {
		if classify(c.err) == classUnavailable && !l.canFollow(c) {
			return c.err
		}
	}
	return nil
}

func (l *lane) canFollow(c *call) bool { return l.endpoint.follow != nil && isRedirect(c.err) }

func (r *errand) end(err error) {
	r.err = err
	r.done <- struct{}{}
}

// call is one execution of the script, and whom it decides about.
type call struct {
	batch   batch
	errands []*errand
	cmd     onceCmd
	err     error
}

// calls sorts a batch into calls: one, but for a Cluster one for each key, since keys of other slots may be elsewhere.
func (l *lane) calls(requests []*errand) []*call {
	prefix := l.endpoint.client.settings.prefix
	if l.endpoint.follow == nil {
		c := &call{errands: requests}
		for _, r := range requests {
			c.batch.add(prefix, r.charges)
		}
		return []*call{c}
	}
	var calls []*call
	byKey := map[ID]*call{}
	for _, r := range requests {
		id := r.charges[0].ID
		c := byKey[id]
		if c == nil {
			c = new(call)
			byKey[id], calls = c, append(calls, c)
		}
		c.batch.add(prefix, r.charges)
		c.errands = append(c.errands, r)
	}
	return calls
}

// run executes calls by the hash of the script, and once more by its text where the server has forgotten it.
func (l *lane) run(calls []*call) {
	l.execute(calls, "evalsha", bucketSHA)
	var forgotten []*call
	for _, c := range calls {
		if isForgotten(c.err) {
			forgotten = append(forgotten, c)
		}
	}
	if len(forgotten) > 0 {
		l.execute(forgotten, "eval", bucketScript)
	}
}

// execute sends each of the calls once.
func (l *lane) execute(calls []*call, verb, script string) {
	ctx := context.Background() // connections are the lane's, and not opened within the time of one request
	if len(calls) == 1 {
		c := calls[0]
		c.cmd = c.batch.command(verb, script, "")
		c.err = l.client.Process(ctx, c.cmd)
		return
	}
	pipe := l.client.Pipeline()
	for _, c := range calls {
		c.cmd = c.batch.command(verb, script, "")
		_ = pipe.Process(ctx, c.cmd) // only queues it
	}
	_, _ = pipe.Exec(ctx)
	for _, c := range calls {
		c.err = c.cmd.Err()
	}
}

// follow sends a call to where a Cluster says that it belongs: who says so has not executed it. Nobody else waits for that.
func (l *lane) follow(c *call) {
	// Not within the life of the endpoint: that a master retires is no reason not to ask the one that took its place.
	ctx, cancel := context.WithTimeout(context.Background(), l.budget)
	defer cancel()
	c.cmd = c.batch.command("evalsha", bucketSHA, "") // one that was sent is never used again
	if c.err = l.endpoint.follow(ctx, c.cmd); isForgotten(c.err) {
		c.cmd = c.batch.command("eval", bucketScript, "")
		c.err = l.endpoint.follow(ctx, c.cmd)
	}
	c.deliver(l.endpoint)
}

// deliver hands the outcomes to those who wait.
func (c *call) deliver(e *endpoint) {
	var replies *replyReader
	if c.err == nil {
		replies, c.err = newReplyReader(c.cmd.Val())
	}
	for _, r := range c.errands {
		if c.err == nil {
			r.out, c.err = replies.outcome(r.charges)
		}
		r.end(c.err)
	}
	if classify(c.err) == classMistake {
		e.client.counts.failed(c.err)
		e.client.complain("redis refused the script, deciding without it", c.err)
	}
	if replies != nil && replies.healed > 0 {
		e.client.complain("deleted a key that is not ours", errHealed)
	}
}

// onceCmd is a command that is never sent twice: after a lost reply, nobody knows whether it was executed.
type onceCmd struct{ *redis.IntSliceCmd }

// NoRetry implements redis.Cmder.
func (onceCmd) NoRetry() bool { return true }

func newOnceCmd(args ...any) onceCmd {
	return onceCmd{redis.NewIntSliceCmd(context.Background(), args...)}
}
