package ratelimit

import (
	"cmp"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// This file adds to a request's line in Caddy's access log what was decided about it: one field, rate_limit. It holds all that is
// needed to make the decision again: who was charged how much in which zone, and when that was, by the clock that decided.

// accessField is the name of the field.
const accessField = "rate_limit"

// accessRecord is the field of one request. It is put into words when the line is written, if it is.
type accessRecord struct {
	decisions []accessDecision // of the handlers that the request has met, in their order
	room      [1]accessDecision
}

// accessDecision is what one handler decided: about charges, or about a request that it did not charge. Where a dry run let one
// pass that was not charged, WouldDeny says as what it would have been refused.
type accessDecision struct {
	Decision
	h       *Handler
	charges []Charge
	// refusal is why a request without charges was refused, "" if it was not, and pool the one that had no slot for it.
	refusal string
	pool    string
}

// hasAccessLog says whether requests of the server that a handler is provisioned for have lines in the access log.
func hasAccessLog(ctx caddy.Context) bool {
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	return ok && server.Logs != nil
}

// record adds a decision to the line of a request. It is only called where there is an access log.
func (p *progress) record(r *http.Request, d accessDecision) {
	if p.access == nil {
		extra, ok := r.Context().Value(caddyhttp.ExtraLogFieldsCtxKey).(*caddyhttp.ExtraLogFields)
		if !ok {
			return
		}
		p.access = new(accessRecord)
		p.access.decisions = p.access.room[:0]
		extra.Set(zap.Object(accessField, p.access))
	}
	p.access.decisions = append(p.access.decisions, d)
}

// binding returns the decision that the client feels: the refusal, or else the one with the smallest part of a burst left.
func (a *accessRecord) binding() *accessDecision {
	binding := &a.decisions[0]
	for i := range a.decisions {
		d := &a.decisions[i]
		switch {
		case d.passed():
		case !d.Allowed, binding.passed(), binding.Zone == "", d.Zone != "" && d.fraction < binding.fraction:
			binding = d
		}
	}
	return binding
}

// passed says whether this is about a request that was not charged because of a dry run, and so decides nothing.
func (d *accessDecision) passed() bool { return d.Allowed && d.charges == nil }

// wouldDeny returns the first decision that would have been a refusal without its dry run, nil if none would.
func (a *accessRecord) wouldDeny() *accessDecision {
	for i := range a.decisions {
		if a.decisions[i].WouldDeny != ReasonNone {
			return &a.decisions[i]
		}
	}
	return nil
}

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (a *accessRecord) MarshalLogObject(e zapcore.ObjectEncoder) error {
	binding := a.binding()
	binding.encode(e)
	if d := a.wouldDeny(); d != nil {
		e.AddString("would_deny", string(d.WouldDeny))
		if d.pool != "" && binding.pool == "" {
			e.AddString("pool", d.pool)
		}
	}
	return e.AddArray("zones", zapcore.ArrayMarshalerFunc(func(list zapcore.ArrayEncoder) error {
		for i := range a.decisions {
			d := &a.decisions[i]
			if d.passed() && d.WouldDenyZone != "" {
				if err := list.AppendObject(accessTried{d, binding.Now}); err != nil {
					return err
				}
			}
			for n := range d.charges {
				if err := list.AppendObject(accessCharge{&d.charges[n], d, binding.Now}); err != nil {
					return err
				}
			}
		}
		return nil
	}))
}

func (d *accessDecision) encode(e zapcore.ObjectEncoder) {
	if d.charges == nil {
		if d.WouldDenyZone != "" {
			e.AddString("zone", d.WouldDenyZone)
		}
		e.AddString("decision", cmp.Or(d.refusal, "allowed"))
		if d.pool != "" {
			e.AddString("pool", d.pool)
		}
		e.AddInt64("at", d.Now)
		return
	}
	c := chargeIn(d.charges, d.Zone)
	if c == nil { // no zone shows its numbers
		c = &d.charges[0]
	}
	e.AddString("zone", c.Zone)
	e.AddString("decision", cmp.Or(string(d.Reason), "allowed"))
	e.AddString("source", d.Source.String())
	if hasNumbers(&d.Decision) {
		e.AddInt64("remaining", max(d.Remaining, 0))
	}
	e.AddInt64("cost", c.Cost/Token)
	e.AddString("id", c.ID.String())
	e.AddInt64("at", d.Now)
}

// accessCharge is a charge in the list of all.
type accessCharge struct {
	*Charge
	of *accessDecision
	at int64 // of the line
}

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (c accessCharge) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddString("zone", c.Zone)
	e.AddString("id", c.ID.String())
	e.AddInt64("cost", c.Cost/Token)
	if c.of.Now != c.at {
		e.AddInt64("at", c.of.Now)
	}
	if c.of.short.holds(c.place) {
		e.AddString("would_deny", string(refusalReasons[c.of.withoutDryRun(c.Charge)]))
	}
	if c.of.h.spares(c.Charge) {
		e.AddBool("spared", true)
	}
	return nil
}

// accessTried is a zone in that list which could not charge the request, and is in a dry run.
type accessTried struct {
	*accessDecision
	at int64 // of the line
}

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (z accessTried) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddString("zone", z.WouldDenyZone)
	if z.Now != z.at {
		e.AddInt64("at", z.Now)
	}
	e.AddString("would_deny", string(z.WouldDeny))
	return nil
}

// spares says whether a charge is neither struck nor blocked although others of its zone are: by except, or in early data.
func (h *Handler) spares(c *Charge) bool {
	if h.penalty == nil || c.DryRun || c.Penalty != nil {
		return c.NoStrike && c.Penalty != nil
	}
	i := slices.IndexFunc(h.zones, func(z *Zone) bool { return z.charge.Zone == c.Zone })
	return i >= 0 && h.zones[i].punishes()
}
