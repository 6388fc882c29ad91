package ratelimit

import (
	"cmp"
	"fmt"
	"regexp"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// This file holds the slots of requests in flight: how many there are, and who has one.

const (
	defaultMaxInFlight    = 100
	defaultPool           = "default"
	defaultShedRetryAfter = caddy.Duration(5 * time.Second)
)

// Shed bounds the requests in flight. One more is answered 503 at once, before any key is read.
type Shed struct {
	// The most requests inside the handler at a time. Default 100.
	MaxInFlight Count `json:"max_in_flight,omitempty"`

	// The name of the counter. Handlers that name the same pool share its slots; a request takes one of them.
	// Default `default`.
	Pool string `json:"pool,omitempty"`

	// What a refused client is told to wait. Default 5s.
	RetryAfter caddy.Duration `json:"retry_after,omitempty"`
}

// poolForm is what a pool may be called: its name becomes a label of metrics.
var poolForm = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// provision fills in defaults and checks the rest.
func (s *Shed) provision() error {
	s.MaxInFlight = cmp.Or(s.MaxInFlight, defaultMaxInFlight)
	s.Pool = cmp.Or(s.Pool, defaultPool)
	s.RetryAfter = cmp.Or(s.RetryAfter, defaultShedRetryAfter)
	switch {
	case !poolForm.MatchString(s.Pool):
		return fmt.Errorf("shed: pool: must be 1 to 64 letters, digits and any of -_., got %q", s.Pool)
	case s.RetryAfter < caddy.Duration(time.Second):
		// A shorter one would be rounded up on the wire.
		return fmt.Errorf("shed: retry_after: must be at least 1s, got %s", time.Duration(s.RetryAfter))
	}
	return nil
}

// differs returns the names of the fields in which two definitions of one pool disagree, defaults applied. What a refused
// client is told may differ.
func (s *Shed) differs(other *Shed) []string {
	if cmp.Or(s.MaxInFlight, defaultMaxInFlight) != cmp.Or(other.MaxInFlight, defaultMaxInFlight) {
		return []string{"max_in_flight"}
	}
	return nil
}

// slotPools holds the pools of this process by name. A pool lives for as long as any configuration has a handler that
// uses it; a reload acquires before it releases, so that the count goes on. Requests that outlive their pool keep their
// slots in the one that they took them from.
var slotPools = caddy.NewUsagePool()

// slotPool counts the requests in flight of all handlers that name it. It has no limit of its own: that belongs to the
// configuration and travels with each call, so that a configuration that is only validated changes nothing.
type slotPool struct {
	used atomic.Int64
	// shedding is for the log.
	shedding shedding
}

// acquirePool returns the pool of a name. Each call needs one of releasePool.
func acquirePool(name string) (*slotPool, error) {
	pool, _, err := slotPools.LoadOrNew(name, func() (caddy.Destructor, error) { return new(slotPool), nil })
	if err != nil {
		return nil, err
	}
	return pool.(*slotPool), nil
}

// releasePool gives back what acquirePool returned, exactly once for each. The pool itself can still be used.
func releasePool(name string) {
	_, _ = slotPools.Delete(name) // the error would be that of Destruct
}

// take takes a slot if fewer than limit are taken; then the caller must release it, by defer: handlers panic, and
// reverse_proxy does so whenever a client goes away.
//
// The count is compared and raised in one step. To raise it first and look then would never exceed the limit either,
// but a caller on its way to being refused would for that moment hold a slot that another could have had.
func (p *slotPool) take(limit int64) bool {
	for {
		used := p.used.Load()
		if used >= limit {
			return false
		}
		if p.used.CompareAndSwap(used, used+1) {
			return true
		}
	}
}

// release gives back a slot that take took, exactly once for each.
func (p *slotPool) release() { p.used.Add(-1) }

// inFlight returns how many slots are taken.
func (p *slotPool) inFlight() int64 { return p.used.Load() }

// Destruct implements caddy.Destructor. There is nothing to end.
func (*slotPool) Destruct() error { return nil }
