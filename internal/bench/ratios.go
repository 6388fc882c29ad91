package bench

import (
	"slices"
	"time"
)

// spread is the median of what the rounds gave, and its extremes.
type spread struct{ median, low, high float64 }

func spreadOf(values []float64) spread {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return spread{}
	}
	return spread{median: (sorted[(n-1)/2] + sorted[n/2]) / 2, low: sorted[0], high: sorted[n-1]}
}

// comparison is what a server costs against the bare one. Times are in milliseconds, CPU in microseconds a request.
type comparison struct {
	name string
	// throughput is that of the server as a part of the bare one's.
	throughput spread
	// What is added to the bare one.
	p50, p99, server, redis, both spread
	// Of the server itself.
	perSecond, calls, executed, callsPerSecond spread
}

// compare takes each round of a server against the mean of the bare rounds before and after it, so that a machine that slowly
// becomes faster or slower cancels out.
func compare(bare, other rounds) comparison {
	ratio := func(value func(round) float64) spread {
		return each(bare, other, value, func(base, got float64) float64 { return got / base })
	}
	added := func(value func(round) float64) spread {
		return each(bare, other, value, func(base, got float64) float64 { return got - base })
	}
	own := func(value func(round) float64) spread {
		return each(bare, other, value, func(_, got float64) float64 { return got })
	}
	perSecond := func(r round) float64 { return r.perSecond }
	return comparison{
		name:           other.name,
		throughput:     ratio(perSecond),
		p50:            added(func(r round) float64 { return milliseconds(r.p50) }),
		p99:            added(func(r round) float64 { return milliseconds(r.p99) }),
		server:         added(func(r round) float64 { return r.server }),
		redis:          added(func(r round) float64 { return r.redis }),
		both:           added(func(r round) float64 { return r.server + r.redis }),
		perSecond:      own(perSecond),
		calls:          own(func(r round) float64 { return r.calls }),
		executed:       own(func(r round) float64 { return r.executed }),
		callsPerSecond: own(func(r round) float64 { return r.callsPerSecond }),
	}
}

// each applies a function to the neighbours' mean and the value of every round.
func each(bare, other rounds, value func(round) float64, apply func(base, got float64) float64) spread {
	values := make([]float64, len(other.all))
	for i, r := range other.all {
		base := (value(bare.all[i]) + value(bare.all[i+1])) / 2
		values[i] = apply(base, value(r))
	}
	return spreadOf(values)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// median returns the median over the rounds of one server.
func (r rounds) median(value func(round) float64) float64 {
	values := make([]float64, len(r.all))
	for i := range r.all {
		values[i] = value(r.all[i])
	}
	return spreadOf(values).median
}

// comparisons returns that of each server with the bare one.
func (r result) comparisons() []comparison {
	all := make([]comparison, 0, len(r.servers))
	for _, other := range r.servers[1:] {
		all = append(all, compare(r.servers[0], other))
	}
	return all
}

// generatorCost returns the median of what the clients of bare servers took, in microseconds of CPU a request.
func generatorCost(results []result) float64 {
	var all rounds
	for _, r := range results {
		all.all = append(all.all, r.servers[0].all...)
	}
	return all.median(func(r round) float64 { return r.own })
}
