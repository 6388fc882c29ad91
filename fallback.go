package ratelimit

import (
	"context"
	"time"
)

// This file decides, whatever happens: by the store while it answers, and by what each zone wants while it does not.

// remoteStore is a Store on the network, which can be down.
type remoteStore interface {
	Store
	// retryAfter returns how long until it is worth to try again, while the store is down.
	retryAfter() time.Duration
}

// Limiter decides about requests of one handler. Buckets of zones without a remote store, and those that stand in for it,
// live in this process, one set for all handlers and configurations.
type Limiter struct {
	remote  remoteStore // nil: everything is local
	local   *memoryStore
	shares  *memoryStore
	nodes   int64
	maxKeys int
	now     func() int64 // microseconds, monotonic
}

// Decide answers all charges of a request. There is always a decision, never an error.
//
// Charges of local zones are paid first: that costs no round trip, and what they refuse needs none. If the remote
// store refuses, they get their tokens back; meanwhile those are missing to others, which errs to the strict side.
func (l *Limiter) Decide(ctx context.Context, charges []Charge) Decision {
	local, remote := l.split(charges)
	if len(remote) == 0 {
		return l.takeLocal(local)
	}
	if len(local) == 0 {
		return l.takeRemote(ctx, remote)
	}
	here := l.takeLocal(local)
	if !here.Allowed {
		return here
	}
	there := l.takeRemote(ctx, remote)
	if !there.Allowed {
		l.local.giveBack(l.now(), local)
		return there
	}
	return tighter(here, there)
}

// split sorts charges by where their buckets live.
func (l *Limiter) split(charges []Charge) (local, remote []Charge) {
	if l.remote == nil {
		return charges, nil
	}
	n := 0
	for i := range charges {
		if charges[i].Local {
			n++
		}
	}
	switch n {
	case 0:
		return nil, charges
	case len(charges):
		return charges, nil
	}
	local, remote = make([]Charge, 0, n), make([]Charge, 0, len(charges)-n)
	for i := range charges {
		if charges[i].Local {
			local = append(local, charges[i])
		} else {
			remote = append(remote, charges[i])
		}
	}
	return local, remote
}

// tighter returns the one of two decisions that allow whose zone has the smaller part of its burst left.
func tighter(a, b Decision) Decision {
	if b.Zone == "" || a.Zone != "" && a.fraction <= b.fraction {
		return a
	}
	return b
}

func (l *Limiter) takeLocal(charges []Charge) Decision {
	out := l.local.take(l.now(), charges, l.maxKeys)
	return out.decision(charges, SourceMemory)
}

func (l *Limiter) takeRemote(ctx context.Context, charges []Charge) Decision {
	d, err := l.remote.Take(ctx, charges)
	if err != nil {
		return l.standIn(charges)
	}
	if d.Reason == ReasonBlocked {
		l.remember(charges, d)
	}
	return d
}

// remember keeps a block for the time when the store that knows it is down.
func (l *Limiter) remember(charges []Charge, d Decision) {
	for i := range charges {
		if c := &charges[i]; c.Zone == d.Zone {
			now := l.now()
			block := strikeRecord{strikes: c.Penalty.after + 1, until: now + d.RetryAfter.Microseconds(), last: now}
			l.shares.setRecord(now, c.ID, c.Penalty, block, l.maxKeys)
		}
	}
}

// standIn decides in place of a store that does not answer. Its refusals are never strikes; a block known before holds.
func (l *Limiter) standIn(charges []Charge) Decision {
	counted := make([]Charge, 0, len(charges))
	for _, c := range charges {
		c.NoStrike = true
		switch c.OnStoreError {
		case PolicyDeny:
			if !c.DryRun {
				return Decision{Reason: ReasonUnavailable, Zone: c.Zone, Quiet: true, RetryAfter: l.remote.retryAfter(), Now: l.now()}
			}
		case PolicyAllow:
			if d, blocked := l.knownBlock(c); blocked {
				return d
			}
		case PolicyShare:
			c.Limit = c.Limit.share(l.nodes, c.Floor)
			counted = append(counted, c)
		case PolicyFull:
			counted = append(counted, c)
		}
	}
	if len(counted) == 0 {
		return Decision{Allowed: true, Now: l.now()}
	}
	out := l.shares.take(l.now(), counted, l.maxKeys)
	return out.decision(counted, SourceShare)
}

// knownBlock refuses a charge that nobody counts while the store is down, if its client is known to be blocked.
func (l *Limiter) knownBlock(c Charge) (Decision, bool) {
	if c.Penalty == nil || c.DryRun {
		return Decision{}, false
	}
	now := l.now()
	until, blocked := l.shares.blocked(now, c.ID, c.Penalty.group)
	if !blocked {
		return Decision{}, false
	}
	out := outcome{verdict: verdictBlocked, now: now, until: until}
	return out.decision([]Charge{c}, SourceShare), true
}

// share returns one of so many equal parts of a limit. Its burst is never below floor, the largest cost of the zone.
func (l Limit) share(nodes, floor int64) Limit {
	common := gcd(l.Num, nodes)
	s := Limit{Num: l.Num / common, Den: l.Den * (nodes / common), Burst: max(l.Burst/nodes, floor)}
	for !exact(s.Num, s.Den) { // an odd rate over very many nodes: a little slower, so that it can be calculated with
		s.Num, s.Den = max(s.Num/2, 1), s.Den/2+1
	}
	return s
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}
