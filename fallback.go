package ratelimit

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// This file decides, whatever happens: by the store while it answers, and by what each zone wants while it does not.

// remoteStore is a Store on the network, which can be down, in part or as a whole.
type remoteStore interface {
	Store
	// split parts charges into those that one Take can decide at once, in the order of their names; nil if one Take can decide
	// all.
	split(charges []Charge) [][]Charge
	// giveBack returns what a Take of these charges took. It waits no longer than the context lives.
	giveBack(ctx context.Context, charges []Charge)
	// budget is how long a decision about charges may take.
	budget(charges []Charge) time.Duration
	// retryAfter returns how long until it is worth to try again, while the store is down that decides about a charge.
	retryAfter(c *Charge) time.Duration
}

// Limiter decides about requests of one handler. Buckets of zones without a remote store, and those that stand in for it,
// live in this process, one set for all handlers and configurations.
type Limiter struct {
	remote remoteStore // nil: everything is local
	local  *memoryStore
	shares *memoryStore
	// What the remote store told: blocks, the refusals of a moment ago, and tokens taken ahead.
	known    *knownBlocks
	refusals *refusalCache
	leases   *leaseTable
	// nodes returns by how many the limits are shared. It is asked while the remote store does not answer.
	nodes   func() int64
	maxKeys int
	now     func() int64 // microseconds, monotonic
}

// Decide answers all charges of a request. There is always a decision, never an error. It does not end when the client leaves: a
// request whose connection was closed on purpose must neither be free nor count as a failure of the store.
//
// Charges of local zones are paid first: that costs no round trip, and what they refuse needs none. If the remote
// store refuses, they get their tokens back; meanwhile those are missing to others, which errs to the strict side.
func (l *Limiter) Decide(ctx context.Context, charges []Charge) Decision {
	local, remote := l.split(charges)
	if len(remote) == 0 {
		return l.takeLocal(local)
	}
	if d, refused := l.refuseKnown(remote); refused {
		return d
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
		there.joinDry(&here)
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

// tighter returns the one of two decisions that allow whose zone has the smaller part of its burst left, with what is known about
// the charges of both.
func tighter(a, b Decision) Decision {
	if b.Zone == "" || a.Zone != "" && a.fraction <= b.fraction {
		a, b = b, a
	}
	b.joinDry(&a)
	b.near.addAll(&a.near)
	return b
}

// joinDry adds what another decision about the same request says of its charges in a dry run.
func (d *Decision) joinDry(other *Decision) {
	d.short.addAll(&other.short)
	d.closed.addAll(&other.closed)
	if d.WouldDeny == ReasonNone {
		d.WouldDeny, d.WouldDenyZone = other.WouldDeny, other.WouldDenyZone
	}
}

func (l *Limiter) takeLocal(charges []Charge) Decision {
	var room [usualCharges]int64
	out := l.local.take(l.now(), charges, sized(room[:], len(charges)), l.maxKeys)
	return out.decision(charges, SourceMemory)
}

// takeRemote asks the remote store, once for each of its parts that is concerned.
func (l *Limiter) takeRemote(ctx context.Context, charges []Charge) Decision {
	if d, served := l.serveLeased(charges); served {
		return d
	}
	parts := l.remote.split(charges)
	if parts == nil {
		if d, refused := l.refuseCached(charges); refused {
			return d
		}
		return l.takePart(context.WithoutCancel(ctx), charges)
	}
	for _, part := range parts {
		if d, refused := l.refuseCached(part); refused {
			return d
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.remote.budget(charges))
	defer cancel()
	return l.takeParts(ctx, parts)
}

// takeParts asks one part after the other, those first where a block is known. A refusal gives back what the parts before it
// took. Only the first can strike: what the others refuse may be the fault of tokens that somebody is about to get back.
func (l *Limiter) takeParts(ctx context.Context, parts [][]Charge) (all Decision) {
	slices.SortStableFunc(parts, func(a, b []Charge) int { return cmp.Compare(blockedFor(b), blockedFor(a)) })
	from := make([]Source, len(parts))
	for i, part := range parts {
		for n := range part {
			part[n].NoStrike = part[n].NoStrike || i > 0
		}
		d := l.takePart(ctx, part)
		from[i] = d.Source
		switch {
		case !d.Allowed:
			l.giveBack(ctx, parts[:i], from)
			d.joinDry(&all)
			return d
		case i == 0:
			all = d
		default:
			all = tighter(all, d)
		}
	}
	return all
}

// giveBack returns what parts took, to the stores that they took it from. It is waited for while the decision has time.
func (l *Limiter) giveBack(ctx context.Context, parts [][]Charge, from []Source) {
	if len(parts) == 0 {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i, part := range parts {
			if from[i] == SourceRedis {
				l.remote.giveBack(context.WithoutCancel(ctx), part)
			} else {
				l.shares.giveBack(l.now(), l.counted(part))
			}
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

func blockedFor(charges []Charge) (longest int64) {
	for i := range charges {
		longest = max(longest, charges[i].BlockedFor)
	}
	return longest
}

func (l *Limiter) takePart(ctx context.Context, charges []Charge) Decision {
	sent := l.now()
	d, err := l.remote.Take(ctx, charges)
	l.leases.learn(sent, charges, &d)
	if err != nil {
		l.askAgain(charges)
		return l.standIn(charges)
	}
	l.learn(sent, charges, &d)
	switch {
	case d.Allowed:
		l.refusals.took(charges)
	case d.Reason == ReasonLimited:
		l.refusals.keep(l.now(), charges, d.tokens)
	}
	return d
}

// serveLeased pays a request from leases, if there are some for all of its charges.
func (l *Limiter) serveLeased(charges []Charge) (Decision, bool) {
	if !slices.ContainsFunc(charges, func(c Charge) bool { return c.Leases }) {
		return Decision{}, false
	}
	var room [usualCharges]int64
	out, served := l.leases.serve(l.now(), charges, sized(room[:], len(charges)))
	if !served {
		return Decision{}, false
	}
	l.refusals.took(charges)
	return out.decision(charges, SourceLease), true
}

// refuseCached refuses charges which the store would refuse, by what it said a moment ago.
func (l *Limiter) refuseCached(charges []Charge) (Decision, bool) {
	var room [usualCharges]int64
	out, refused := l.refusals.refuse(l.now(), charges, sized(room[:], len(charges)))
	if !refused {
		return Decision{}, false
	}
	return out.decision(charges, SourceCache), true
}

// standIn decides in place of a store that does not answer. Its refusals are never strikes; a block known before holds.
func (l *Limiter) standIn(charges []Charge) Decision {
	if d, blocked := l.standingBlock(charges); blocked {
		return d
	}
	overrides.apply(l.now(), charges)
	var dry Decision // what charges in a dry run would do
	var closed *Charge
	for i := range charges {
		switch c := &charges[i]; {
		case c.OnStoreError != PolicyDeny:
		case c.DryRun:
			dry.WouldDeny, dry.WouldDenyZone = ReasonUnavailable, c.Zone
			dry.short.add(c.place)
			dry.closed.add(c.place)
		case closed == nil:
			closed = c
		}
	}
	if closed != nil {
		d := Decision{Reason: ReasonUnavailable, Zone: closed.Zone, Quiet: true, RetryAfter: l.remote.retryAfter(closed), Now: l.now()}
		d.joinDry(&dry)
		return d
	}
	counted := l.counted(charges)
	if len(counted) == 0 {
		dry.Allowed, dry.Now = true, l.now()
		return dry
	}
	var room [usualCharges]int64
	out := l.shares.take(l.now(), counted, sized(room[:], len(counted)), l.maxKeys)
	d := out.decision(counted, SourceShare)
	d.joinDry(&dry)
	return d
}

// counted returns those charges that are counted here while the store does not answer, as they are counted then.
func (l *Limiter) counted(charges []Charge) []Charge {
	counted, nodes := make([]Charge, 0, len(charges)), l.nodes()
	for _, c := range charges {
		c.Penalty = nil // a share's refusal is no strike
		switch c.OnStoreError {
		case PolicyShare:
			c.Limit = c.Limit.share(nodes, c.Floor)
			counted = append(counted, c)
		case PolicyFull:
			counted = append(counted, c)
		case PolicyDeny, PolicyAllow:
		}
	}
	return counted
}
