package ratelimit

import (
	"net/http"

	"go.uber.org/zap"
)

// This file is where the way of a request meets those who watch it: nothing here changes a decision.

// watcher tells operators what one handler does. Its methods are called at the end of each request's way through the limiter.
type watcher struct{ h *Handler }

// exempt is told of a request to which nothing of the handler applies.
func (w *watcher) exempt() {}

// shed is told of a request for which there was no slot.
func (w *watcher) shed(_ *http.Request) {}

// wouldShed is told of a request for which there was no slot, and which goes on because of a dry run.
func (w *watcher) wouldShed() {}

// unclaimed is told of a request that could not be charged.
func (w *watcher) unclaimed(_ error) {}

// decided is told of a decision about charges.
func (w *watcher) decided(r *http.Request, _ *progress, charges []Charge, d *Decision) {
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
