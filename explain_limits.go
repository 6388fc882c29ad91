package ratelimit

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// This file asks one handler what it would do with a request. It goes the way of ServeHTTP and changes nothing.

// Verdicts that are no reasons of a refusal.
const (
	verdictPasses   = "allowed"
	verdictExempt   = "exempt"
	verdictRejected = "rejected"
)

func (x *explainedHandler) passes() bool {
	return x.Verdict == verdictPasses || x.Verdict == verdictExempt
}

// explain says what the handler would do with a request that has passed some before.
func (h *Handler) explain(ctx context.Context, r *http.Request, p *progress) (x explainedHandler, err error) {
	x.Zones = []explainedZone{}
	exempt, err := matchesAny(h.exempt, r)
	switch {
	case err != nil:
		x.Verdict, x.Error = verdictRejected, err.Error()
		return x, nil
	case exempt:
		x.Exempt, x.Verdict = true, verdictExempt
		return x, nil
	case !h.explainSlot(&x, p):
		x.Verdict = string(ReasonOverloaded)
		return x, nil
	}
	charges, err := h.explainCharges(&x, r, p)
	if err != nil {
		x.Verdict, x.Error = rejection(err)
		return x, nil
	}
	states, err := h.peek(ctx, charges)
	if err != nil {
		return x, err
	}
	overrides.apply(h.limiter.now(), charges)
	h.judge(&x, charges, states)
	return x, nil
}

// explainSlot looks whether there is a slot for the request.
func (h *Handler) explainSlot(x *explainedHandler, p *progress) bool {
	if h.Shed == nil || slices.Contains(p.pools, h.pool) {
		return true
	}
	p.pools = append(p.pools, h.pool)
	x.Pool = &poolInfo{Pool: h.Shed.Pool, InFlight: h.pool.inFlight(), MaxInFlight: int64(h.Shed.MaxInFlight)}
	return x.Pool.InFlight < x.Pool.MaxInFlight || h.DryRun
}

// rejection puts into words why a request cannot be charged.
func rejection(err error) (verdict, message string) {
	if errors.Is(err, errNoAddress) {
		return string(ReasonUnavailable), err.Error()
	}
	return verdictRejected, err.Error()
}

// explainCharges collects what the zones claim, as charges does, and describes each zone.
func (h *Handler) explainCharges(x *explainedHandler, r *http.Request, p *progress) ([]Charge, error) {
	rules, err := h.rules(r)
	if err != nil {
		return nil, err
	}
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	var charges []Charge
	for _, z := range h.zones {
		d := explainedZone{Zone: z.charge.Zone}
		if slices.Contains(p.zones, d.Zone) {
			d.Matched = true
			x.Zones = append(x.Zones, d)
			continue
		}
		c, claimed, err := h.claim(z.unwatched(), r, repl, rules)
		if _, tried := h.onlyTries(z, err); tried {
			d.Matched, d.DryRun = true, true
			d.Verdict, _ = rejection(err)
		} else if err != nil {
			return nil, err
		}
		if claimed {
			d.Matched, d.Charged, d.Cost, d.Sensitive, d.DryRun = true, true, c.Cost/Token, c.Patient, c.DryRun
			d.Key, d.KeyValue = z.countedBy(r, repl, h.app.hasher)
			charges, p.zones = append(charges, c), append(p.zones, d.Zone)
		}
		x.Zones = append(x.Zones, d)
	}
	return charges, nil
}

// unwatched returns the zone without what notes the requests that it meets.
func (z *Zone) unwatched() *Zone {
	quiet := *z
	quiet.missing = nil
	return &quiet
}

// countedBy returns the key by which the zone counts a request, and what it is: its own, or the client's address where a part of
// that is missing.
func (z *Zone) countedBy(r *http.Request, repl *caddy.Replacer, h *hasher) (key, value string) {
	if _, known := z.key.identity(r, repl, h); known {
		return z.shownKey(), z.key.plain(r, repl)
	}
	return "{client_ip}", z.address.plain(r, repl)
}

// judge says what each of the zones would do, and what comes of that: those of this process are asked first, and the others if
// they all allow.
func (h *Handler) judge(x *explainedHandler, charges []Charge, states []peeked) {
	verdicts := map[bool]string{true: verdictPasses, false: verdictPasses} // by whether it is in this process
	for i := range charges {
		c := &charges[i]
		z := x.zone(c.Zone)
		verdict, wait := h.verdict(c, &states[i])
		z.clientInfo = h.clientInfo(h.zone(c.Zone), c, &states[i])
		z.Verdict, z.RetryAfter = verdict, wholeSeconds(wait)
		here := h.isLocal(h.zone(c.Zone))
		if !c.DryRun && severity(verdict) > severity(verdicts[here]) {
			verdicts[here] = verdict
		}
	}
	if x.Verdict = verdicts[true]; x.Verdict == verdictPasses {
		x.Verdict = verdicts[false]
	}
}

// severity orders what zones of one store say: a block outweighs a store that does not answer, and that a limit.
func severity(verdict string) int {
	return slices.Index([]string{verdictPasses, string(ReasonLimited), string(ReasonUnavailable), string(ReasonBlocked)}, verdict)
}

func (x *explainedHandler) zone(name string) *explainedZone {
	i := slices.IndexFunc(x.Zones, func(z explainedZone) bool { return z.Zone == name })
	return &x.Zones[i]
}

func wholeSeconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// verdict says what a zone alone would do with a charge, and how long it would have the client wait.
func (h *Handler) verdict(c *Charge, p *peeked) (string, time.Duration) {
	if until, _ := p.blockedUntil(); until > p.now && c.Penalty != nil {
		return string(ReasonBlocked), micro(until - p.now)
	}
	if p.source == SourceShare {
		switch c.OnStoreError {
		case PolicyDeny:
			return string(ReasonUnavailable), h.remote.retryAfter(c)
		case PolicyAllow:
			return verdictPasses, 0
		case PolicyShare, PolicyFull:
		}
	}
	if p.tokens >= c.Cost {
		return verdictPasses, 0
	}
	if length := p.firstBlock(c); length > 0 {
		return string(ReasonBlocked), micro(length)
	}
	return string(ReasonLimited), micro(p.limit.wait(c.Cost - p.tokens))
}

// firstBlock returns how long the block is that this refusal would start, 0 if it starts none.
func (p *peeked) firstBlock(c *Charge) int64 {
	if c.Penalty == nil || c.NoStrike || c.DryRun || p.source == SourceShare {
		return 0
	}
	record, counted := p.record.struck(c.Penalty, p.now)
	if !counted || record.until <= p.now {
		return 0
	}
	return record.until - p.now
}
