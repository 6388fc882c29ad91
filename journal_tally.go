package ratelimit

import (
	"cmp"
	"slices"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// This file counts what is not worth a line of its own, and writes the lines that say how much it was.

// refusalKind is why a request was refused, or in a dry run would have been. Its word is the name of a field.
type refusalKind uint8

const (
	refusedLimited refusalKind = iota
	refusedBlocked
	refusedUnavailable
	refusedOverloaded
	refusedNoIdentity
	refusedTooEarly
	refusedDryRun
	refusalKinds
)

var refusalWords = [refusalKinds]string{
	"limited", "blocked", "unavailable", "overloaded", "identity_required", "too_early", "would_deny",
}

// reason returns the word as a reason.
func (k refusalKind) reason() Reason { return Reason(refusalWords[k]) }

func refusalKindOf(reason Reason) refusalKind {
	switch reason {
	case ReasonBlocked:
		return refusedBlocked
	case ReasonUnavailable:
		return refusedUnavailable
	case ReasonOverloaded:
		return refusedOverloaded
	default:
		return refusedLimited
	}
}

// tally counts the refusals of one handler by a zone, by its pool or by neither, since the last summary.
type tally struct {
	book  *logbook
	log   *zap.Logger
	level zapcore.Level
	zone  string
	pool  string
	print uint64 // the zone in fingerprints

	counts [refusalKinds]atomic.Uint64
	// clients counts how many different ones were refused, as far as they are remembered, and suppressed the lines that there was
	// no room for.
	clients, suppressed atomic.Uint64
	// pending says that the tally is on the book's list.
	pending atomic.Bool
}

// count counts a refusal. It is on the way of every refused request: two atomic operations in the usual case.
func (t *tally) count(kind refusalKind) {
	t.counts[kind].Add(1)
	t.open()
}

// suppress counts a line that there was no room for.
func (t *tally) suppress() {
	suppressedLines.Add(1)
	t.suppressed.Add(1)
	t.open()
}

func (t *tally) open() {
	if !t.pending.Load() && t.pending.CompareAndSwap(false, true) {
		t.book.open(t)
	}
}

// sum is what tallies with the same name say together: before and after a reload there are two.
type sum struct {
	of                  *tally // the youngest
	counts              [refusalKinds]uint64
	clients, suppressed uint64
}

// take adds a tally, which begins again.
func (s *sum) take(t *tally) {
	t.pending.Store(false) // before its counts are read, or one could be missed
	s.of = t
	for kind := range t.counts {
		s.counts[kind] += t.counts[kind].Swap(0)
	}
	s.clients += t.clients.Swap(0)
	s.suppressed += t.suppressed.Swap(0)
}

// sums adds up tallies by what they are about, in the order of their names.
func sums(tallies []*tally) []*sum {
	var all []*sum
	for _, t := range tallies {
		same := func(s *sum) bool { return s.of.zone == t.zone && s.of.pool == t.pool && s.of.level == t.level }
		i := slices.IndexFunc(all, same)
		if i < 0 {
			i = len(all)
			all = append(all, new(sum))
		}
		all[i].take(t)
	}
	slices.SortFunc(all, func(a, b *sum) int {
		return cmp.Or(cmp.Compare(a.of.zone, b.of.zone), cmp.Compare(a.of.pool, b.of.pool), cmp.Compare(a.of.level, b.of.level))
	})
	return all
}

// write writes the line, unless what it is about was in the one before.
func (s *sum) write() {
	if s.counts == [refusalKinds]uint64{} && s.suppressed == 0 {
		return
	}
	line := currentLog(s.of.log).Check(s.of.level, "refusals")
	if line == nil {
		return
	}
	var fields []zap.Field
	for _, name := range []struct{ field, value string }{{"zone", s.of.zone}, {"pool", s.of.pool}} {
		if name.value != "" {
			fields = append(fields, zap.String(name.field, name.value))
		}
	}
	for kind, n := range s.counts {
		if n > 0 {
			fields = append(fields, zap.Uint64(refusalWords[kind], n))
		}
	}
	line.Write(append(fields, zap.Uint64("clients", s.clients), zap.Uint64("suppressed", s.suppressed))...)
}

// currentLog returns the logger of the configuration that runs: the one of a configuration that has ended may write to what is
// closed.
func currentLog(log *zap.Logger) *zap.Logger {
	if app := running.Load(); app != nil && app.requests.log != nil {
		return app.requests.log
	}
	return log
}
