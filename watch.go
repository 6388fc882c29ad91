package ratelimit

import (
	"errors"
	"net/http"

	"go.uber.org/zap"
)

// This file is where the way of a request meets those who watch it: nothing here changes a decision.

// watcher tells operators what one handler does. Its methods are called at the end of each request's way through the limiter.
type watcher struct{ h *Handler }

// exempt is told of a request to which nothing of the handler applies.
func (w *watcher) exempt() { w.count(resultExempt) }

// count counts what became of a request that no zone decided.
func (w *watcher) count(r result) { w.h.app.unzoned.decisions[r][SourceNone].Add(1) }

// shed is told of a request for which there was no slot.
func (w *watcher) shed(_ *http.Request) { w.count(resultShed) }

// wouldShed is told of a request for which there was no slot, and which goes on because of a dry run.
func (w *watcher) wouldShed() { w.h.app.unzoned.wouldDeny[resultShed].Add(1) }

// unclaimed is told of a request that could not be charged.
func (w *watcher) unclaimed(err error) {
	switch {
	case errors.Is(err, errEarlyData), errors.Is(err, errIdentityRequired):
		w.count(resultRejected)
	case errors.Is(err, errNoAddress):
		w.count(resultUnavailable)
	}
}

// decided is told of a decision about charges.
func (w *watcher) decided(r *http.Request, _ *progress, charges []Charge, d *Decision) {
	countDecided(charges, d)
	if d.Strikes > 0 {
		w.h.penalty.countDry(decidingCharge(charges, d).counts, d.Strikes)
	}
	if d.BlockStarted {
		w.blocked(r, charges, d)
	}
}

// blocked tells of a block that has just started.
func (w *watcher) blocked(r *http.Request, charges []Charge, d *Decision) {
	c := chargeIn(charges, d.Zone)
	fields := []zap.Field{
		zap.String("zone", d.Zone), zap.String("client_ip", clientAddress(r)), zap.Stringer("id", c.ID),
		zap.Int64("strikes", d.Strikes), zap.Duration("duration", d.RetryAfter),
		zap.Time("until", wall(d.Now+d.RetryAfter.Microseconds())),
	}
	if w.h.LogKey {
		fields = append(fields, zap.String("key", w.h.plainKey(c.Zone, r)))
	}
	w.h.logger.Info("blocked", fields...)
}
