package ratelimit

import "net/http"

// This file is where the way of a request meets those who watch it: nothing here changes a decision.

// watcher tells operators what one handler does. Its methods are called at the end of each request's way through the limiter.
type watcher struct{ h *Handler }

// exempt is told of a request to which nothing of the handler applies.
func (w *watcher) exempt() {}

// shed is told of a request for which there was no slot.
func (w *watcher) shed(_ *http.Request) { w.h.journal.overloaded() }

// unclaimed is told of a request that could not be charged.
func (w *watcher) unclaimed(err error) { w.h.journal.unclaimed(err) }

// decided is told of a decision about charges.
func (w *watcher) decided(r *http.Request, _ *progress, charges []Charge, d *Decision) {
	w.h.journal.decided(r, charges, d)
}
