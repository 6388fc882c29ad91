package ratelimit

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// This file says that a pool has begun to shed and that it has stopped, however often in between.

// shedCalm is how long a pool must have had room until shedding has ended, in microseconds.
const shedCalm = int64(10_000_000)

// shedding is whether a pool sheds. It belongs to the pool, so that it goes on over reloads.
type shedding struct {
	on    atomic.Bool
	count atomic.Int64
	// last is when a request was shed, by the clock of the book.
	last atomic.Int64

	// What follows is written by who turns it on, before the book knows of it.
	began int64
	pool  string
	log   *zap.Logger
}

// note counts a request that was shed, and says whether that is the first for a while: then begun must be called.
func (s *shedding) note(now int64) (first bool) {
	s.count.Add(1)
	s.last.Store(now)
	return !s.on.Load() && s.on.CompareAndSwap(false, true)
}

// isOver says whether there was room for long enough.
func (s *shedding) isOver(now int64) bool { return now-s.last.Load() >= shedCalm }

// ended says so.
func (s *shedding) ended() {
	length := micro(s.last.Load() - s.began).Round(time.Millisecond)
	currentLog(s.log).Info("shedding ended", zap.String("pool", s.pool), zap.Int64("shed", s.count.Swap(0)), zap.Duration("duration", length))
	s.on.Store(false) // last: from now on it may begin again
}
