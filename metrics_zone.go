package ratelimit

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
)

// This file counts what becomes of requests, for the metrics and for operators. Counters belong to the process and are found when
// a configuration loads, so that a reload keeps them and a request only adds to numbers.

// result is what became of a request at a handler.
type result uint8

const (
	resultAllowed result = iota
	resultLimited
	resultBlocked
	resultUnavailable
	resultShed
	// resultExempt is a request to which nothing of the handler applies.
	resultExempt
	// resultRejected is a request that no zone could charge: early data, or no identity where one is demanded.
	resultRejected
	resultCount
)

// resultNames are the words for results in metrics.
var resultNames = [resultCount]string{"allowed", "limited", "blocked", "unavailable", "shed", "exempt", "rejected"}

// refusalReasons are the reasons of results that are refusals, which are also those that a dry run keeps from happening.
// Rejected requests have several, as the log says; no header tells them.
var refusalReasons = [resultCount]Reason{
	resultLimited: ReasonLimited, resultBlocked: ReasonBlocked, resultUnavailable: ReasonUnavailable, resultShed: ReasonOverloaded,
	resultRejected: Reason(resultNames[resultRejected]),
}

func resultOf(d *Decision) result {
	if d.Allowed {
		return resultAllowed
	}
	for r := resultLimited; r < resultShed; r++ {
		if refusalReasons[r] == d.Reason {
			return r
		}
	}
	return resultShed
}

// zoneCounts are the counts of one zone. Those of the zone without a name are about requests that no zone decided.
type zoneCounts struct {
	// requests are those that the zone counted, whatever became of them.
	requests atomic.Uint64
	// near are those after which four fifths of the burst or more were used, though not by one alone.
	near                     atomic.Uint64
	strikes, blocks, missing atomic.Uint64
	wouldDeny                [resultCount]atomic.Uint64
	// decisions are those that the zone decided, or is the tightest of.
	decisions [resultCount][SourceLease + 1]atomic.Uint64
}

// Destruct implements caddy.Destructor.
func (*zoneCounts) Destruct() error { return nil }

// zonePool holds the counts of each zone by its name, for as long as a configuration has a zone of that name. Requests that
// outlive their configuration are still counted, where nobody looks any more.
var zonePool = caddy.NewUsagePool()

// countsOf returns the counts of a zone, which the app holds until releaseCounts.
func (a *App) countsOf(zone string) (*zoneCounts, error) {
	if counts, held := a.counts[zone]; held {
		return counts, nil
	}
	v, _, err := zonePool.LoadOrNew(zone, func() (caddy.Destructor, error) { return new(zoneCounts), nil })
	if err != nil {
		return nil, err
	}
	a.counts[zone] = v.(*zoneCounts)
	return a.counts[zone], nil
}

// releaseCounts gives back what countsOf returned. Those counts can still be added to.
func (a *App) releaseCounts() {
	for zone := range a.counts {
		_, _ = zonePool.Delete(zone) // Destruct returns no error
	}
	a.counts = nil
}

// countDecided counts a decision about charges: once for the zone that decided, and for each zone what concerns it alone.
func countDecided(charges []Charge, d *Decision) {
	for i := range charges {
		c := &charges[i]
		c.counts.requests.Add(1)
		if d.near.holds(c.place) {
			c.counts.near.Add(1)
		}
		if d.short.holds(c.place) {
			c.counts.wouldDeny[d.withoutDryRun(c)].Add(1)
		}
	}
	decider := decidingCharge(charges, d).counts
	decider.decisions[resultOf(d)][d.Source].Add(1)
	if d.Strikes > 0 {
		decider.strikes.Add(1)
	}
	if d.BlockStarted {
		decider.blocks.Add(1)
	}
}

// decidingCharge is that of the zone that describes a decision; where none does, because none shows its numbers, the first.
func decidingCharge(charges []Charge, d *Decision) *Charge {
	if c := chargeIn(charges, d.Zone); c != nil {
		return c
	}
	return &charges[0]
}

// withoutDryRun is what a decision that a charge's dry run kept from being a refusal would have been.
func (d *Decision) withoutDryRun(c *Charge) result {
	if d.closed.holds(c.place) {
		return resultUnavailable
	}
	return resultLimited
}

// refused counts the requests that the zone refused.
func (n *zoneCounts) refused() (sum uint64) {
	for r := resultLimited; r <= resultShed; r++ {
		for s := range n.decisions[r] {
			sum += n.decisions[r][s].Load()
		}
	}
	return sum
}

// wouldRefuse counts what only a dry run kept from being a refusal.
func (n *zoneCounts) wouldRefuse() (sum uint64) {
	for r := range n.wouldDeny {
		sum += n.wouldDeny[r].Load()
	}
	return sum
}

// zoneCounts returns how many requests a zone has counted, how many of them it refused, and how many it would have refused without
// a dry run. The configuration MUST have a zone of that name.
func (a *App) zoneCounts(name string) (requests, refused, wouldDeny uint64) {
	n := a.zones[name].charge.counts
	return n.requests.Load(), n.refused(), n.wouldRefuse()
}

// countDry counts a strike that a dry run of the penalty kept from starting a block, or from being refused as one.
func (p *Penalty) countDry(n *zoneCounts, strikes int64) {
	if p.DryRun && strikes > p.numbers().after {
		n.wouldDeny[resultBlocked].Add(1)
	}
}
