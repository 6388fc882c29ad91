package ratelimit

import (
	"context"
	"fmt"
)

// This file fills the bucket of one client in one zone, wherever there is one. Strikes and blocks stay.

// reset fills the bucket of a charge, and returns which stores kept one. It holds at once on this node, and within the second that
// others may remember a refusal on those. Tokens that a node leased before stay its own.
func (h *Handler) reset(ctx context.Context, c *Charge) (where []string, err error) {
	where = []string{}
	l := h.limiter
	if h.remote == nil || c.Local {
		if l.local.reset(c.ID, c.Zone) {
			where = append(where, SourceMemory.String())
		}
		return where, nil
	}
	had, err := h.remote.reset(ctx, c)
	if had {
		where = append(where, SourceRedis.String())
	}
	if l.shares.reset(c.ID, c.Zone) { // also if Redis is down: then it is what counts
		where = append(where, SourceShare.String())
	}
	l.refusals.took([]Charge{*c}) // or requests are refused by what Redis said before
	if err != nil && len(where) > 0 {
		return where, fmt.Errorf("only the share was reset, and it counts until Redis answers: %w", err)
	}
	return where, err
}

// reset drops the bucket of an identity in a zone, and says whether there was one.
func (m *memoryStore) reset(id ID, zone string) bool {
	s, name := m.shardOf(id), m.names.number(zone)
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.buckets.find(entryKey{id, name})
	if at < 0 {
		return false
	}
	s.buckets.remove(at)
	m.total.Add(-1)
	return true
}
