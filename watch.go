package ratelimit

import (
	"errors"
	"net/http"
)

// This file is where the way of a request meets those who watch it: nothing here changes a decision.

// watcher tells operators what one handler does. Its methods are called at the end of each request's way through the limiter.
type watcher struct{ h *Handler }

// exempt is told of a request to which nothing of the handler applies.
func (w *watcher) exempt() { w.count(resultExempt) }

// count counts what became of a request that no zone decided.
func (w *watcher) count(r result) { w.h.app.unzoned.decisions[r][SourceNone].Add(1) }

// shed is told of a request for which there was no slot.
func (w *watcher) shed(r *http.Request) {
	w.count(resultShed)
	w.h.journal.overloaded()
	w.uncharged(r, refusedOverloaded, w.h.Shed.Pool)
}

// wouldShed is told of a request for which there was no slot, and which goes on because of a dry run.
func (w *watcher) wouldShed(r *http.Request) {
	w.h.app.unzoned.wouldDeny[resultShed].Add(1)
	w.h.journal.wouldShed()
	w.passed(r, refusedOverloaded, "", w.h.Shed.Pool)
}

// wouldReject is told of a request that a zone could not charge, and which goes on because of a dry run.
func (w *watcher) wouldReject(r *http.Request, z *Zone, kind refusalKind) {
	as := resultRejected
	if kind == refusedUnavailable {
		as = resultUnavailable
	}
	z.charge.counts.wouldDeny[as].Add(1)
	w.h.journal.wouldReject(z.charge.Zone)
	w.passed(r, kind, z.charge.Zone, "")
}

// unclaimed is told of a request that could not be charged.
func (w *watcher) unclaimed(r *http.Request, err error) {
	switch {
	case errors.Is(err, errEarlyData), errors.Is(err, errIdentityRequired):
		w.count(resultRejected)
	case errors.Is(err, errNoAddress):
		w.count(resultUnavailable)
	}
	w.h.journal.unclaimed(err)
	if kind, ours := unchargedKind(err); ours {
		w.uncharged(r, kind, "")
	}
}

// decided is told of a decision about charges.
func (w *watcher) decided(r *http.Request, p *progress, charges []Charge, d *Decision) {
	countDecided(charges, d)
	if d.Strikes > 0 {
		w.h.penalty.countDry(decidingCharge(charges, d).counts, d.Strikes)
	}
	w.h.countTop(r, charges, d)
	w.h.journal.decided(r, charges, d)
	if w.h.accessLog {
		p.record(r, accessDecision{Decision: *d, h: w.h, charges: charges})
	}
}

// uncharged tells the access log of a request that was refused without charges.
func (w *watcher) uncharged(r *http.Request, kind refusalKind, pool string) {
	if w.h.accessLog {
		progressOf(r).record(r, accessDecision{Decision: Decision{Now: processMicros()}, h: w.h, refusal: refusalWords[kind], pool: pool})
	}
}

// passed tells the access log of a request that was not charged, and that only a dry run kept from being refused.
func (w *watcher) passed(r *http.Request, kind refusalKind, zone, pool string) {
	if w.h.accessLog {
		d := Decision{Allowed: true, Now: processMicros(), WouldDeny: kind.reason(), WouldDenyZone: zone}
		progressOf(r).record(r, accessDecision{Decision: d, h: w.h, pool: pool})
	}
}
