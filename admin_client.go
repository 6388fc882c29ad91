package ratelimit

import (
	"context"
	"net/http"
	"time"
)

// This file shows the state of one client in one zone, and gives him a full bucket.

const inspectHelp = `{"zone": "…", "key": "…"} or {"zone": "…", "id": "…"}`

func inspect(ctx context.Context, a *App, r *http.Request) (any, error) {
	request, err := readRequest[inspectRequest](r, inspectHelp)
	if err != nil {
		return nil, err
	}
	h, z, c, err := a.chargeOf(request.who)
	if err != nil {
		return nil, err
	}
	states, err := h.peek(ctx, []Charge{c})
	if err != nil {
		return nil, adminError(http.StatusServiceUnavailable, "%w", err)
	}
	return h.clientInfo(z, &c, &states[0]), nil
}

// chargeOf returns a charge for the client that an operator names, as his requests have it in the zone, but for their cost.
func (a *App) chargeOf(w who) (*Handler, *Zone, Charge, error) {
	id, err := a.identifyIn(w)
	if err != nil {
		return nil, nil, Charge{}, err
	}
	h, z, err := a.zoneInUse(w.Zone)
	if err != nil {
		return nil, nil, Charge{}, err
	}
	c := z.charge
	c.ID = id
	if h.penalty != nil && z.punishes() {
		c.Penalty = &h.penalty.rules
	}
	return h, z, c, nil
}

// clientInfo puts a state into the words of operators.
func (h *Handler) clientInfo(z *Zone, c *Charge, p *peeked) clientInfo {
	info := clientInfo{
		Zone: c.Zone, ID: c.ID.String(), Source: p.source.String(),
		Rate: z.Rate.String(), Limit: p.limit.Burst / Token, Remaining: float64(p.tokens) / Token,
		Reset: later(p.now, p.now+p.limit.wait(p.limit.Burst-p.tokens)),
	}
	if p.limit != c.Limit {
		info.Rate = z.Rate.shared(h.limiter.nodes())
	}
	if c.Penalty == nil {
		return info
	}
	info.Group, info.Strikes = &h.penalty.Group, p.record.strikes
	if p.record.strikes > 0 {
		info.LastStrike = later(0, p.record.last)
		info.ForgottenAt = later(p.now, p.record.forgotten(c.Penalty))
	}
	until, byHand := p.blockedUntil()
	info.BlockedUntil, info.ByHand = later(p.now, until), byHand
	info.AmnestyUntil = later(p.now, -p.record.hand)
	info.KnownUntil = later(0, p.known)
	return info
}

// later returns a time if it is after another, both in microseconds.
func later(than, us int64) *time.Time {
	if us <= than {
		return nil
	}
	t := wall(us)
	return &t
}

func resetBucket(ctx context.Context, a *App, r *http.Request) (any, error) {
	request, err := readRequest[resetRequest](r, inspectHelp)
	if err != nil {
		return nil, err
	}
	h, _, c, err := a.chargeOf(request.who)
	if err != nil {
		return nil, err
	}
	where, err := h.reset(ctx, &c)
	if err != nil {
		return nil, adminError(http.StatusServiceUnavailable, "%w", err)
	}
	return resetResult{Zone: c.Zone, ID: c.ID.String(), Reset: where}, nil
}
