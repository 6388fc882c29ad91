package ratelimit

import (
	"fmt"
	"strings"
)

// This file holds that a name means the same to all handlers of one configuration: of a zone, a penalty group, a pool.

// claimZone notes that a handler uses a zone, with buckets in a place. Names are global: the same name is one budget, so it
// must mean the same everywhere.
func (a *App) claimZone(z *Zone, place string) error {
	name := z.charge.Zone
	first, taken := a.zones[name]
	if !taken {
		first = z
		a.zones[name] = z
	}
	if diff := z.differs(first); len(diff) > 0 {
		return fmt.Errorf("zone %q is defined twice with different %s: zone names are global, so give one of them another name", name, strings.Join(diff, ", "))
	}
	if other, kept := a.places[name]; kept && other != place {
		return fmt.Errorf("zone %q is used in two ways, in %s and in %s: a zone charges a request once, so the first way would hold; give one of them another name", name, other, place)
	}
	a.places[name] = place
	counts, err := a.countsOf(name)
	z.charge.counts = counts
	return err
}

// claimPenalty notes that a handler strikes in a penalty group, which must have the same numbers everywhere.
func (a *App) claimPenalty(p *Penalty) error {
	first, taken := a.penalties[p.Group]
	if !taken {
		a.penalties[p.Group] = p
		return nil
	}
	if diff := p.differs(first); len(diff) > 0 {
		return fmt.Errorf("penalty group %q is defined twice with different %s: give one of them another group", p.Group, strings.Join(diff, ", "))
	}
	return nil
}

// claimPool notes that a handler takes slots of a pool, which must have the same size everywhere.
func (a *App) claimPool(s *Shed) error {
	first, taken := a.pools[s.Pool]
	if !taken {
		a.pools[s.Pool] = s
		return nil
	}
	if diff := s.differs(first); len(diff) > 0 {
		return fmt.Errorf("shed pool %q is defined twice with different %s: give one of them another pool", s.Pool, strings.Join(diff, ", "))
	}
	return nil
}
