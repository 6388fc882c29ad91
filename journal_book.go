package ratelimit

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// This file holds the part of the journal that is one for the process: how many lines there may be, what waits to be summed up, and
// when that is written.

// suppressedLines counts the log lines of this process that were left out because there were too many.
var suppressedLines atomic.Uint64

// processBook is the book of this process. It keeps nothing of a configuration for longer than a summary is due.
var processBook = newLogbook(processMicros, func(d time.Duration, turn func()) { time.AfterFunc(d, turn) })

// logbook bounds what is written about refusals, and sums up the rest. It has no goroutine: the first refusal sets a timer, which
// is set again for as long as there was something to write.
type logbook struct {
	now   func() int64
	later func(time.Duration, func())

	recent recentClients
	// refusals and blocks are how many lines there may be of each kind.
	refusals, blocks lineBudget

	mu      sync.Mutex
	armed   bool
	tallies []*tally    // with something to sum up
	alarms  []*shedding // that are on

	lostEvents atomic.Int64
}

func newLogbook(now func() int64, later func(time.Duration, func())) *logbook {
	return &logbook{
		now: now, later: later,
		recent:   recentClients{seed: maphash.MakeSeed()},
		refusals: lineBudget{every: 100_000, burst: 20},
		blocks:   lineBudget{every: 20_000, burst: 200},
	}
}

// lineBudget allows a line every so many microseconds, and so many at once.
type lineBudget struct {
	every, burst int64
	// paid is until when the lines that were written use up the budget.
	paid atomic.Int64
}

func (b *lineBudget) take(now int64) bool {
	for {
		paid := b.paid.Load()
		next := max(paid, now) + b.every
		if next-now > b.every*b.burst {
			return false
		}
		if b.paid.CompareAndSwap(paid, next) {
			return true
		}
	}
}

// open puts a tally into the next summary.
func (b *logbook) open(t *tally) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tallies = append(b.tallies, t)
	b.armLocked()
}

// watch looks after an alarm until it is over.
func (b *logbook) watch(s *shedding) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.alarms = append(b.alarms, s)
	b.armLocked()
}

// lostEvent counts an event for which the queue had no room.
func (b *logbook) lostEvent() {
	if b.lostEvents.Add(1) > 1 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.armLocked()
}

// armLocked sets the timer for the end of the period, unless it is set.
func (b *logbook) armLocked() {
	if b.armed {
		return
	}
	b.armed = true
	b.later(micro(journalPeriod-b.now()%journalPeriod), b.turn)
}

// turn writes what is due, and sets the timer again if that was something.
func (b *logbook) turn() {
	b.mu.Lock()
	b.armed = false
	b.mu.Unlock()
	b.write()
}

// write writes the summary of what happened since the last one.
func (b *logbook) write() {
	b.mu.Lock()
	tallies := b.tallies
	b.tallies = nil
	alarms, over := b.alarms[:0:0], b.alarms[:0:0]
	for _, s := range b.alarms {
		if s.isOver(b.now()) {
			over = append(over, s)
		} else {
			alarms = append(alarms, s)
		}
	}
	b.alarms = alarms
	if len(alarms) > 0 {
		b.armLocked()
	}
	b.mu.Unlock()
	for _, line := range sums(tallies) {
		line.write()
	}
	for _, s := range over {
		s.ended()
	}
	if lost := b.lostEvents.Swap(0); lost > 0 {
		currentLog(caddy.Log()).Warn("events lost: their handlers are too slow", zap.Int64("events", lost))
	}
}
