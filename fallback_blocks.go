package ratelimit

import "slices"

// This file remembers blocks that the remote store told of. They are refused here, so that a client who hammers costs no round
// trip, and hold while the store is down or has lost them. known_blocks.go holds them.

// recheckEvery is how often the store is asked again about a block that is known here: so long one that was lifted elsewhere
// still holds, and 5 s are promised. If there was no answer, it is asked sooner.
const recheckEvery, recheckSoon = 4_000_000, 1_000_000 // µs

// refuseKnown refuses charges of a client who is known to be blocked, or notes in them for how long he is, where it is time to
// ask the store again. One request asks; until it has an answer, the others are refused.
func (l *Limiter) refuseKnown(charges []Charge) (Decision, bool) {
	if l.known.count.Load() == 0 {
		return Decision{}, false
	}
	now := l.now()
	longest, until, due := 0, now, false
	for i := range charges {
		c := &charges[i]
		if c.Penalty == nil || c.DryRun {
			continue
		}
		b := l.known.find(now, c.ID, c.Penalty.group)
		c.BlockedFor, c.BlockTold, c.BlockByHand = max(b.until-now, 0), b.told, b.byHand
		switch {
		case c.BlockedFor == 0:
		case now-b.asked >= recheckEvery:
			due = true
		case b.until > until:
			longest, until = i, b.until
		}
	}
	if until == now && due {
		longest, until = l.claimRecheck(now, charges)
	}
	if until == now {
		return Decision{}, false
	}
	return blockedUntil(now, until, charges[longest]), true
}

// claimRecheck makes this the request that asks about all blocks, unless another one does: then its block is returned.
func (l *Limiter) claimRecheck(now int64, charges []Charge) (longest int, until int64) {
	until = now
	for i := range charges {
		c := &charges[i]
		if c.BlockedFor == 0 || slices.ContainsFunc(charges[:i], c.sharesBlock) {
			continue // no block, or one that is asked about already
		}
		if !l.known.recheck(now, c.ID, c.Penalty.group, recheckEvery) && now+c.BlockedFor > until {
			longest, until = i, now+c.BlockedFor
		}
	}
	return longest, until
}

// sharesBlock says whether two charges of a client who is known to be blocked are about the same block.
func (c *Charge) sharesBlock(other Charge) bool {
	return other.BlockedFor > 0 && other.ID == c.ID && other.Penalty.group == c.Penalty.group
}

// askAgain notes that a question about blocks got no answer.
func (l *Limiter) askAgain(charges []Charge) {
	now := l.now()
	for i := range charges {
		if c := &charges[i]; c.BlockedFor > 0 {
			l.known.setAsked(now-recheckEvery+recheckSoon, c.ID, c.Penalty.group)
		}
	}
}

// learn keeps what the store says about blocks, and forgets what it does not know any more. What was asked before an operator acted
// here is no news.
func (l *Limiter) learn(sent int64, charges []Charge, d *Decision) {
	now := l.now()
	for i := range charges {
		c := &charges[i]
		switch {
		case d.Reason == ReasonBlocked && c.Zone == d.Zone:
			block := heardBlock{until: now + d.RetryAfter.Microseconds(), byHand: d.ByHand, told: d.Now, asked: now}
			l.known.hear(sent, now, c.ID, c.Penalty.group, block, l.maxKeys)
		case d.Reason != ReasonBlocked && c.BlockedFor > 0:
			l.known.forget(sent, c.ID, c.Penalty.group)
		}
	}
}

// standingBlock refuses charges while the store is down, if their client is known to be blocked.
func (l *Limiter) standingBlock(charges []Charge) (Decision, bool) {
	if l.known.count.Load() == 0 {
		return Decision{}, false
	}
	now := l.now()
	longest, until := 0, now
	for i := range charges {
		c := &charges[i]
		if c.Penalty == nil || c.DryRun {
			continue
		}
		if b := l.known.find(now, c.ID, c.Penalty.group); b.until > until {
			longest, until = i, b.until
		}
	}
	return blockedUntil(now, until, charges[longest]), until > now
}

func blockedUntil(now, until int64, c Charge) Decision {
	out := outcome{verdict: verdictBlocked, now: now, until: until}
	return out.decision([]Charge{c}, SourceCache)
}
