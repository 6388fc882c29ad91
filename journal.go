package ratelimit

import (
	"errors"
	"fmt"
	"net"
	"net/http"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// This file says what operators read in the log about the requests of one handler.
//
// A line for each refusal would make the log the second victim of an attack. So a client has a line when it is refused for the
// first time in ten minutes, there are at most ten such lines a second, and the rest is summed up every ten seconds. What changes the
// state of something has a line each time: a block, the begin and the end of shedding.

// journal writes about one handler.
type journal struct {
	h     *Handler
	book  *logbook
	level zapcore.Level
	// silent says that refusals are not written about at all; changes of state still are.
	silent bool
	// zones are the tallies of the handler's zones, in their order; shed is that of its pool, and rest of what concerns no zone.
	zones      []*tally
	shed, rest *tally
}

// refusalLevels are the words of log_refusals but off.
var refusalLevels = map[string]zapcore.Level{
	"": zapcore.InfoLevel, "debug": zapcore.DebugLevel, "info": zapcore.InfoLevel, "warn": zapcore.WarnLevel, "error": zapcore.ErrorLevel,
}

// newJournal returns the journal of a handler that has its zones.
func newJournal(h *Handler, book *logbook) (*journal, error) {
	j := &journal{h: h, book: book, silent: h.LogRefusals == "off"}
	level, known := refusalLevels[h.LogRefusals]
	if !known && !j.silent {
		return nil, fmt.Errorf("log_refusals: must be off, debug, info, warn or error, got %q", h.LogRefusals)
	}
	j.level = level
	for _, z := range h.zones {
		j.zones = append(j.zones, j.tally(z.charge.Zone, ""))
	}
	j.rest = j.tally("", "")
	if h.Shed != nil {
		j.shed = j.tally("", h.Shed.Pool)
	}
	return j, nil
}

func (j *journal) tally(zone, pool string) *tally {
	return &tally{book: j.book, log: j.h.logger, level: j.level, zone: zone, pool: pool, print: j.book.recent.of(zone)}
}

// tallyOf returns the tally of a zone.
func (j *journal) tallyOf(zone string) *tally {
	for _, t := range j.zones {
		if t.zone == zone {
			return t
		}
	}
	return j.rest
}

// decided writes about a decision, if there is something to say.
func (j *journal) decided(r *http.Request, charges []Charge, d *Decision) {
	if !d.Allowed {
		j.refused(r, charges, d)
	}
	if d.WouldDeny != ReasonNone && !j.silent {
		j.wouldDeny(charges, d)
	}
}

// wouldDeny counts the charges that a dry run kept from refusing.
func (j *journal) wouldDeny(charges []Charge, d *Decision) {
	for i := range charges {
		if d.short.holds(charges[i].place) {
			j.tallyOf(charges[i].Zone).count(refusedDryRun)
		}
	}
}

// refused writes about a refusal: a line if it starts a block, or is the client's first for a while.
func (j *journal) refused(r *http.Request, charges []Charge, d *Decision) {
	c, t, now := chargeIn(charges, d.Zone), j.tallyOf(d.Zone), j.book.now()
	if c == nil {
		return
	}
	seen := j.book.recent.see(now, t.print, &c.ID)
	if !j.silent {
		t.count(refusalKindOf(d.Reason))
		if !seen.counted {
			t.clients.Add(1)
		}
	}
	if seen.first {
		emit(eventExceeded, func() map[string]any { return eventOf(r, c, d) })
	}
	switch {
	case d.BlockStarted:
		j.blocked(r, c, d, now)
	case (seen.first || seen.owed) && !j.silent:
		j.firstRefusal(r, c, d, &seen)
	}
}

// blocked writes about a block that has just started.
func (j *journal) blocked(r *http.Request, c *Charge, d *Decision, now int64) {
	emit(eventBlocked, func() map[string]any {
		data := eventOf(r, c, d)
		data["group"], data["strikes"], data["until"] = c.Penalty.group, d.Strikes, wall(d.Now+d.RetryAfter.Microseconds())
		return data
	})
	if !j.book.blocks.take(now) {
		j.tallyOf(d.Zone).suppress()
		return
	}
	if line := j.h.logger.Check(zap.InfoLevel, "blocked"); line != nil {
		line.Write(append(j.client(r, c),
			zap.Int64("strikes", d.Strikes), zap.Duration("duration", d.RetryAfter), zap.Time("until", wall(d.Now+d.RetryAfter.Microseconds())))...)
	}
}

// firstRefusal writes about a client that was not refused for a while, or whose line there was no room for then.
func (j *journal) firstRefusal(r *http.Request, c *Charge, d *Decision, seen *refusedClient) {
	if !j.h.logger.Core().Enabled(j.level) {
		return
	}
	if !j.book.refusals.take(j.book.now()) {
		if !seen.owed {
			j.tallyOf(d.Zone).suppress()
			seen.owe()
		}
		return
	}
	if seen.owed && !seen.settle() {
		return
	}
	if line := j.h.logger.Check(j.level, "refused"); line != nil {
		line.Write(append(j.client(r, c),
			zap.String("reason", string(d.Reason)), zap.Duration("wait", d.RetryAfter),
			zap.String("method", shortened(r.Method)), zap.String("host", shortened(r.Host)), zap.String("path", shortened(r.URL.Path)))...)
	}
}

// eventOf returns what events tell of a refusal.
func eventOf(r *http.Request, c *Charge, d *Decision) map[string]any {
	return map[string]any{
		"zone": c.Zone, "reason": string(d.Reason), "wait": d.RetryAfter,
		"remote_ip": peerAddress(r), "client_ip": clientAddress(r), "id": c.ID.String(),
	}
}

// peerAddress returns the address of the other end of the connection.
func peerAddress(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// client returns the fields that say who it was.
func (j *journal) client(r *http.Request, c *Charge) []zap.Field {
	fields := make([]zap.Field, 0, 10)
	fields = append(fields, zap.String("zone", c.Zone), zap.String("client_ip", clientAddress(r)), zap.Stringer("id", c.ID))
	if j.h.LogKey {
		fields = append(fields, zap.String("key", j.h.plainKey(c.Zone, r)))
	}
	return fields
}

// maxLogged bounds what a client can put into a field of a line.
const maxLogged = 256

func shortened(text string) string {
	if len(text) > maxLogged {
		return text[:maxLogged] + "…"
	}
	return text
}

// overloaded writes about a request for which there was no slot.
func (j *journal) overloaded() {
	if !j.silent {
		j.shed.count(refusedOverloaded)
	}
	s, now := &j.h.pool.shedding, j.book.now()
	if !s.note(now) {
		return
	}
	s.began, s.pool, s.log = now, j.h.Shed.Pool, j.h.logger
	inFlight, most := j.h.pool.inFlight(), int64(j.h.Shed.MaxInFlight)
	j.h.logger.Warn("shedding", zap.String("pool", s.pool), zap.Int64("in_flight", inFlight), zap.Int64("max_in_flight", most))
	j.book.watch(s)
	emit(eventShed, func() map[string]any {
		return map[string]any{"pool": s.pool, "in_flight": inFlight, "max_in_flight": most}
	})
}

// wouldShed counts a request that found no slot and goes on because of a dry run.
func (j *journal) wouldShed() {
	if !j.silent {
		j.shed.count(refusedDryRun)
	}
}

// wouldReject counts a request that a zone could not charge, and that goes on because of a dry run.
func (j *journal) wouldReject(zone string) {
	if !j.silent {
		j.tallyOf(zone).count(refusedDryRun)
	}
}

// unclaimed counts a request that could not be charged.
func (j *journal) unclaimed(err error) {
	if kind, ours := unchargedKind(err); ours && !j.silent {
		j.rest.count(kind)
	}
}

// unchargedKind says as what a request is refused that could not be charged. Errors of matchers are the user's.
func unchargedKind(err error) (kind refusalKind, ours bool) {
	switch {
	case errors.Is(err, errEarlyData):
		return refusedTooEarly, true
	case errors.Is(err, errIdentityRequired):
		return refusedNoIdentity, true
	case errors.Is(err, errNoAddress):
		return refusedUnavailable, true
	}
	return 0, false
}
