package ratelimit

import (
	"maps"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
)

// This file counts the calls of each Redis, for the metrics.

// callBounds are the upper bounds of the histogram of calls, in µs.
var callBounds = [...]int64{250, 500, 1_000, 2_000, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000}

// storeCounts are the counts of one Redis. Clients that differ in their settings alone share them.
type storeCounts struct {
	outages atomic.Uint64
	// took counts calls by how long they took; the last are longer than all bounds. µs is the sum of all.
	took [len(callBounds) + 1]atomic.Uint64
	µs   atomic.Int64

	mu     sync.Mutex
	errors map[string]uint64 // by class, of which there are few
}

// Destruct implements caddy.Destructor.
func (*storeCounts) Destruct() error { return nil }

// storePool holds the counts of each Redis by its name, for as long as there is a client for it.
var storePool = caddy.NewUsagePool()

func acquireStoreCounts(name string) (*storeCounts, error) {
	v, _, err := storePool.LoadOrNew(name, func() (caddy.Destructor, error) { return new(storeCounts), nil })
	if err != nil {
		return nil, err
	}
	return v.(*storeCounts), nil
}

func releaseStoreCounts(name string) {
	_, _ = storePool.Delete(name) // Destruct returns no error
}

// called counts a call that took so many µs, answered or not.
func (n *storeCounts) called(took int64) {
	i := 0
	for i < len(callBounds) && took > callBounds[i] {
		i++
	}
	n.took[i].Add(1)
	n.µs.Add(took)
}

// failed counts what a call failed with.
func (n *storeCounts) failed(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.errors == nil {
		n.errors = map[string]uint64{}
	}
	n.errors[errorName(err)]++
}

// failures returns the errors by class.
func (n *storeCounts) failures() map[string]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.errors)
}

// durations returns how many calls took at most so many seconds, as histograms count them, and of all the number and the sum.
func (n *storeCounts) durations() (upTo map[float64]uint64, calls uint64, seconds float64) {
	upTo = make(map[float64]uint64, len(callBounds))
	for i, bound := range callBounds {
		calls += n.took[i].Load()
		upTo[float64(bound)/1e6] = calls
	}
	return upTo, calls + n.took[len(callBounds)].Load(), float64(n.µs.Load()) / 1e6
}
