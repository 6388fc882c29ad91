package ratelimit

import (
	"context"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
)

// This file holds what a Redis client does while Redis does not answer: who waits, how it is probed, what is said.

const (
	// connectGrace is how long after the start decisions wait for the first connection.
	connectGrace = time.Second
	// The pause between two probes of a Redis that is down grows from the first to the second.
	probeFirst, probeMax = 25 * time.Millisecond, 250 * time.Millisecond
	// A Redis that goes down within steady after it came up is left alone for longer each time, at most for calm: one that
	// answers probes but not requests would otherwise change its state, and log it, some hundred times a second.
	steady, calm = 10 * time.Second, 5 * time.Second
)

// ready says whether Redis is worth a try, and waits a little where that is better than to give up: for the first
// connection, and, on a sensitive route, while Redis may just have hiccuped.
func (c *redisClient) ready(ctx context.Context, patient bool) bool {
	down, since := c.breaker.state()
	if !down {
		return true
	}
	c.mu.Lock()
	up, connecting := c.up, c.connecting
	c.mu.Unlock()
	until, now := since, processMicros()
	switch {
	case connecting && patient:
		until = since + connectGrace.Microseconds()
	case connecting:
		until = min(since+connectGrace.Microseconds(), now+c.settings.timeout.Microseconds())
	case patient:
		until = since + c.settings.patience.Microseconds()
	}
	if until <= now {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, micro(until-now))
	defer cancel()
	select {
	case <-up:
		return true
	case <-ctx.Done():
		return false
	}
}

func (c *redisClient) wentDown(w *wire, err error) {
	c.mu.Lock()
	current := c.wire == w
	var rest time.Duration
	if current {
		c.up = make(chan struct{})
		rest = c.restLocked()
	}
	c.mu.Unlock()
	if !current {
		return
	}
	c.log().Warn("redis is down, deciding without it", zap.Stringer("redis", &c.settings), zap.Error(err))
	go c.probe(w, rest)
}

// restLocked returns how long a Redis that has just gone down is left alone.
func (c *redisClient) restLocked() time.Duration {
	if time.Since(c.cameUpAt) >= steady {
		c.flaps = 0
		return 0
	}
	rest := min(probeFirst<<min(c.flaps, 16), calm)
	c.flaps++
	c.nextProbe = time.Now().Add(rest)
	return rest
}

// probe asks a Redis that is down, after a rest, until it answers the script itself within the budget, so that one that is
// too far away stays down. There is one probe at a time; it ends with the wire.
func (c *redisClient) probe(w *wire, rest time.Duration) {
	if !w.sleep(rest) {
		return
	}
	for pause := probeFirst; ; pause = min(2*pause, probeMax) {
		err := c.answers(w)
		if w.ctx.Err() != nil {
			return
		}
		if err == nil {
			c.cameUp(w)
			return
		}
		c.stillDown(err)
		jittered := pause/2 + rand.N(pause) //nolint:gosec // no secret
		c.mu.Lock()
		c.nextProbe = time.Now().Add(jittered)
		c.mu.Unlock()
		if !w.sleep(jittered) {
			return
		}
	}
}

// sleep waits, and says whether the wire is still open then.
func (w *wire) sleep(d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-w.ctx.Done():
		return false
	}
}

// probeCharge is one that is always allowed and always written: a replica, or a Redis without memory, also answers.
var probeCharge = Charge{Zone: "probe", Limit: Limit{Num: Token, Den: 1, Burst: Token}, Cost: Token}

// answers takes the charge of the probe: once for as long as opening a connection may take, then within the budget.
func (c *redisClient) answers(w *wire) error {
	_, args := new(redisStore).arguments([]Charge{probeCharge})
	keys := []string{c.settings.prefix + ":{probe}"}
	begun := time.Now()
	if _, err := eval(w.ctx, w.quick, dialTimeout+c.settings.timeout, keys, args); err != nil {
		return err
	}
	if time.Since(begun) <= c.settings.timeout {
		return nil
	}
	_, err := eval(w.ctx, w.quick, c.settings.timeout, keys, args)
	return err
}

func (c *redisClient) cameUp(w *wire) {
	c.mu.Lock()
	if c.wire != w { // closed meanwhile; what is open now has a probe of its own
		c.mu.Unlock()
		return
	}
	outage := c.breaker.reset(processMicros())
	first := c.connecting
	c.connecting, c.cameUpAt = false, time.Now()
	close(c.up)
	c.mu.Unlock()
	if first {
		c.log().Info("redis is up", zap.Stringer("redis", &c.settings))
		return
	}
	c.log().Info("redis is up again", zap.Stringer("redis", &c.settings), zap.Duration("outage", micro(outage)))
}

// stillDown says once that the first connection could not be made.
func (c *redisClient) stillDown(err error) {
	_, since := c.breaker.state()
	c.mu.Lock()
	first := c.connecting && processMicros()-since >= connectGrace.Microseconds()
	c.connecting = c.connecting && !first
	c.mu.Unlock()
	if first {
		c.log().Warn("redis cannot be reached, deciding without it", zap.Stringer("redis", &c.settings), zap.Error(err))
	}
}

// retryAfter returns how long until it is worth to try again, while Redis is down.
func (c *redisClient) retryAfter() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(time.Until(c.nextProbe), time.Second)
}
