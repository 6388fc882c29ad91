package ratelimit

import (
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// ServeHTTP implements caddyhttp.MiddlewareHandler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	h.clearMarks(r)
	if r.Context().Value(caddyhttp.ErrorCtxKey) != nil { // it was limited before it failed
		return next.ServeHTTP(w, r)
	}
	exempt, err := matchesAny(h.exempt, r)
	if err != nil {
		return err
	}
	if exempt {
		h.watch.exempt()
		return next.ServeHTTP(w, r)
	}
	p := progressOf(r)
	place, admitted := h.admit(p, r)
	if !admitted {
		h.watch.shed(r)
		return h.answers.refuse(w, r, &Decision{Reason: ReasonOverloaded, RetryAfter: time.Duration(h.Shed.RetryAfter)})
	}
	defer place.release()

	charges, err := h.charges(p, r)
	if err != nil {
		return h.unclaimed(w, r, err)
	}
	if len(charges) == 0 {
		return next.ServeHTTP(w, r)
	}
	d := h.limiter.Decide(r.Context(), charges)
	if p.binds(&d) {
		h.answers.show(w.Header(), &d, &p.numbers)
	}
	h.watch.decided(r, p, charges, &d)
	if d.Reason == ReasonBlocked && d.Source == SourceRedis {
		h.list(r, charges, &d)
	}
	if !d.Allowed {
		return h.answers.refuse(w, r, &d)
	}
	if d.WouldDeny != ReasonNone {
		h.mark(r, d.WouldDeny, d.WouldDenyZone)
	}
	return next.ServeHTTP(w, r)
}

// progress is what the handlers that a request passes have done to it so far: each zone charges it once, and each pool
// gives it one slot, however many handlers name them.
type progress struct {
	zones    []string
	pools    []*slotPool
	marks    []string      // names of headers
	access   *accessRecord // nil without an access log
	shown    bool
	fraction float64

	// What one handler needs for an ordinary request, so that it is one piece of memory: places for zones and charges, and the
	// values of the headers.
	zoneRoom   [usualCharges]string
	chargeRoom [usualCharges]Charge
	roomTaken  bool
	numbers    headerNumbers
}

const progressVar = "rate_limit.progress"

func progressOf(r *http.Request) *progress {
	if p, ok := caddyhttp.GetVar(r.Context(), progressVar).(*progress); ok {
		return p
	}
	p := new(progress)
	p.zones = p.zoneRoom[:0]
	caddyhttp.SetVar(r.Context(), progressVar, p)
	return p
}

// room returns an empty list of charges. Its room is for the first handler; what another one charges must not write over what is
// still being reported.
func (p *progress) room() []Charge {
	if p.roomTaken {
		return nil
	}
	p.roomTaken = true
	return p.chargeRoom[:0]
}

// binds says whether the headers should show a decision: the tighter one of several handlers stays, and a refusal always
// shows.
func (p *progress) binds(d *Decision) bool {
	if d.Zone == "" || d.Allowed && p.shown && p.fraction <= d.fraction {
		return false
	}
	p.shown, p.fraction = true, d.fraction
	return true
}

// admission is a place in a pool; the zero value is none.
type admission struct{ pool *slotPool }

func (a admission) release() {
	if a.pool != nil {
		a.pool.release()
	}
}

// admit takes a slot of the handler's pool.
func (h *Handler) admit(p *progress, r *http.Request) (admission, bool) {
	if h.Shed == nil || slices.Contains(p.pools, h.pool) {
		return admission{}, true
	}
	if !h.pool.take(int64(h.Shed.MaxInFlight)) {
		if h.DryRun {
			h.watch.wouldShed(r)
			h.mark(r, ReasonOverloaded, "")
		}
		return admission{}, h.DryRun
	}
	p.pools = append(p.pools, h.pool)
	return admission{h.pool}, true
}

// charges collects what the zones claim of a request.
func (h *Handler) charges(p *progress, r *http.Request) ([]Charge, error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	rules, err := h.rules(r)
	if err != nil {
		return nil, err
	}
	charges := p.room()
	for _, z := range h.zones {
		if slices.Contains(p.zones, z.charge.Zone) {
			continue
		}
		c, claimed, err := h.claim(z, r, repl, rules)
		if kind, tried := h.onlyTries(z, err); tried {
			h.watch.wouldReject(r, z, kind)
			h.mark(r, kind.reason(), z.charge.Zone)
			continue
		}
		if err != nil {
			return nil, err
		}
		if !claimed {
			continue
		}
		c.place = uint8(len(charges))
		charges = append(charges, c)
		p.zones = append(p.zones, c.Zone)
	}
	return charges, nil
}

// claim returns what a zone charges a request for in this handler, and false if that is nothing.
func (h *Handler) claim(z *Zone, r *http.Request, repl *caddy.Replacer, rules *penaltyRules) (Charge, bool, error) {
	c, claimed, err := z.claim(r, repl, h.app.hasher)
	if z.punishes() {
		c.Penalty = rules
	}
	c.DryRun = c.DryRun || h.DryRun
	return c, claimed, err
}

// onlyTries says whether a dry run keeps a zone from refusing a request that it cannot charge, and as what it would refuse it.
func (h *Handler) onlyTries(z *Zone, err error) (kind refusalKind, tried bool) {
	if err == nil || !z.charge.DryRun && !h.DryRun {
		return 0, false
	}
	return unchargedKind(err)
}

// rules returns the penalty that holds for a request, nil if none does.
func (h *Handler) rules(r *http.Request) (*penaltyRules, error) {
	if h.penalty == nil {
		return nil, nil
	}
	if except, err := matchesAny(h.penalty.except, r); err != nil || except {
		return nil, err
	}
	return &h.penalty.rules, nil
}

// unclaimed answers a request that could not be charged.
func (h *Handler) unclaimed(w http.ResponseWriter, r *http.Request, err error) error {
	h.watch.unclaimed(r, err)
	switch {
	case errors.Is(err, errEarlyData):
		return h.answers.unclaimed(w, r, &kindTooEarly)
	case errors.Is(err, errIdentityRequired):
		return h.answers.missingIdentity(w, r)
	case errors.Is(err, errNoAddress):
		return h.answers.refuse(w, r, &Decision{Reason: ReasonUnavailable, RetryAfter: time.Second})
	}
	return err
}

// list notes a block that Redis has told of, for the list of blocks: one that has just started, or that has lasted for a while,
// since a failover can lose the list. Of the latter a node is told every few seconds, not for each request. Where the request is about
// more than one identity or group, the refusal may have started more blocks than the decision tells of.
func (h *Handler) list(r *http.Request, charges []Charge, d *Decision) {
	told := chargeIn(charges, d.Zone)
	for i := range charges {
		c := &charges[i]
		if c.Penalty == nil || recordOf(charges, i) != i {
			continue
		}
		same := c.ID == told.ID && c.Penalty.group == told.Penalty.group
		if !same && !d.BlockStarted {
			continue
		}
		b := knownBlock{id: c.ID, group: c.Penalty.group, until: d.Now + d.RetryAfter.Microseconds()}
		if same {
			b.byHand = d.ByHand
		} else {
			b.until, b.doubt = 0, c.Penalty
		}
		if h.LogKey && !b.byHand { // whose key an operator has given is not listed in the clear
			b.plain = h.plainKey(c.Zone, r)
		}
		h.remote.note(b, d.Now, h.app.longestBlock())
	}
}

// zone returns the handler's zone of a name, nil if it has none.
func (h *Handler) zone(name string) *Zone {
	for _, z := range h.zones {
		if z.charge.Zone == name {
			return z
		}
	}
	return nil
}

// isLocal says whether the buckets of one of its zones are in this process.
func (h *Handler) isLocal(z *Zone) bool { return h.remote == nil || z.charge.Local }

// chargeIn returns the charge of a zone, nil if there is none.
func chargeIn(charges []Charge, zone string) *Charge {
	for i := range charges {
		if charges[i].Zone == zone {
			return &charges[i]
		}
	}
	return nil
}

// plainKey returns the key of a request in the clear.
func (h *Handler) plainKey(zone string, r *http.Request) string {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	return h.zone(zone).key.plain(r, repl)
}

func clientAddress(r *http.Request) string {
	address, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	return address
}
