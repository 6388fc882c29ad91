package ratelimit

import "context"

// This file says what a client has left and what he has done, without charging him: for operators, not for requests.

// peeked is what is stored for one charge, settled at a time.
type peeked struct {
	source Source
	now    int64 // µs, by the clock of the store
	// limit is what counts: of a share, that of the share.
	limit  Limit
	tokens int64
	// record is that of the charge's penalty group.
	record strikeRecord
	// known is until when this node remembers a block that the remote store told of, by the clock of this process; 0 if it does not.
	known int64
}

// blockedUntil returns the end of the block that holds, 0 if none does, and whether an operator set it.
func (p *peeked) blockedUntil() (until int64, byHand bool) {
	if until = p.record.ends(); until <= p.now {
		return 0, false
	}
	return until, until == p.record.hand
}

// peek reads the state of charges where a request would find it now: in this process, in Redis, or in the share while Redis does not
// answer. What is stored and cannot be read is no state, as for requests. The error is one of Redis that says nothing about it.
func (h *Handler) peek(ctx context.Context, charges []Charge) ([]peeked, error) {
	states := make([]peeked, len(charges))
	var remote []int
	for i := range charges {
		c := &charges[i]
		switch {
		case h.remote == nil || c.Local:
			states[i] = h.limiter.local.peek(h.limiter.now(), c)
			states[i].source = SourceMemory
		case h.remote.isDown(c.ID):
			states[i] = h.limiter.peekShare(*c)
		default:
			remote = append(remote, i)
		}
	}
	return states, h.peekRemote(ctx, charges, remote, states)
}

// peekRemote reads the states of some of the charges in Redis.
func (h *Handler) peekRemote(ctx context.Context, charges []Charge, which []int, states []peeked) error {
	if len(which) == 0 {
		return nil
	}
	asked := make([]Charge, len(which))
	for n, i := range which {
		asked[n] = charges[i]
	}
	found, err := h.remote.peek(ctx, asked)
	if err != nil && classify(err) != classUnavailable {
		return err
	}
	for n, i := range which {
		if err != nil {
			states[i] = h.limiter.peekShare(charges[i])
		} else {
			found[n].known = h.limiter.knownBlock(&charges[i]).until
			states[i] = found[n]
		}
	}
	return nil
}

// peekShare reads what holds for a charge while its store does not answer: nothing is counted for it, if not here.
func (l *Limiter) peekShare(c Charge) peeked {
	one := []Charge{c}
	overrides.apply(l.now(), one)
	p := peeked{now: l.now(), limit: c.Limit, tokens: c.Limit.Burst}
	if counted := l.counted(one); len(counted) == 1 {
		p = l.shares.peek(l.now(), &counted[0])
	}
	block := l.knownBlock(&c)
	p.source, p.known = SourceShare, block.until
	if block.byHand {
		p.record.hand = block.until
	} else {
		p.record.until = block.until
	}
	return p
}

// knownBlock returns what this node remembers of a block of a charge's client that the remote store told of, and that still holds.
func (l *Limiter) knownBlock(c *Charge) heardBlock {
	if c.Penalty == nil {
		return heardBlock{}
	}
	return l.known.find(l.now(), c.ID, c.Penalty.group)
}

// peek reads what the memory store holds for a charge. It does not even note that it was there.
func (m *memoryStore) peek(now int64, c *Charge) peeked {
	s, zone := m.shardOf(c.ID), m.names.number(c.Zone)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest-now <= overtaking {
		now = max(now, s.latest)
	}
	p := peeked{now: now, limit: c.Limit}
	var b Bucket
	if at := s.buckets.find(entryKey{c.ID, zone}); at >= 0 && s.buckets.gone(at) > now {
		b = s.buckets.value(at).Bucket
	}
	b, _ = b.settled(c.Limit, now)
	p.tokens = b.Tokens
	if c.Penalty == nil {
		return p
	}
	if at := s.records.find(entryKey{c.ID, m.names.number(c.Penalty.group)}); at >= 0 && s.records.gone(at) > now {
		p.record, _ = s.records.value(at).settled(c.Penalty, now)
	}
	return p
}
