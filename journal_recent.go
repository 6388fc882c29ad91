package ratelimit

import (
	"hash/maphash"
	"sync/atomic"
)

// This file answers whether a client was refused a moment ago, for any number of clients in a fixed piece of memory, without a
// lock and without an allocation.

const (
	// journalPeriod is how often summaries are written, in microseconds. Periods begin at full tens of seconds.
	journalPeriod = int64(10_000_000)
	// recentPeriods is how many periods without a refusal make a client a new one: ten minutes.
	recentPeriods = 60
	// recentSlots bounds the clients that are remembered; what is lost beyond is that a client was seen.
	recentSlots = 1 << 14
	// recentWays is how many places there are for a client, of which the one that was not used for longest is taken.
	recentWays = 4
	// periodMask is the part of a slot that says when its client was last refused, and owedBit says that its line is still to be
	// written. The rest is a fingerprint of the client.
	periodMask = 1<<24 - 1
	owedBit    = 1 << 24
	printMask  = ^uint64(periodMask | owedBit)
)

// recentClients remembers who was refused by which zone. The fingerprints are made under a seed of this process, so that nobody can
// look for a client that is taken for another one.
type recentClients struct {
	seed  maphash.Seed
	slots [recentSlots]atomic.Uint64
}

// refusedClient is what is known about a client that is refused now.
type refusedClient struct {
	// first says that it was not refused in the last minutes.
	first bool
	// counted says that it was refused in this period before.
	counted bool
	// owed says that there was no room for its line when it was first refused.
	owed bool

	slot *atomic.Uint64
	held uint64
}

// owe notes that the client's line is still to be written.
func (s *refusedClient) owe() { s.slot.CompareAndSwap(s.held, s.held|owedBit) }

// settle notes that it is written now, and is false for all but one of those who do at the same time.
func (s *refusedClient) settle() bool { return s.slot.CompareAndSwap(s.held, s.held&^owedBit) }

// of returns what stands for a zone in fingerprints.
func (c *recentClients) of(zone string) uint64 { return maphash.String(c.seed, zone) }

// see notes a refusal of a client by a zone. Of several at the same time, one is the first.
func (c *recentClients) see(now int64, zone uint64, id *ID) refusedClient {
	print, period := maphash.Bytes(c.seed, id[:])^zone, uint64(now/journalPeriod)&periodMask
	slot, known := placeOf(c.slots[print%(recentSlots/recentWays)*recentWays:][:recentWays], print, period)
	old := slot.Load()
	last := age(old, period)
	seen := refusedClient{slot: slot, held: old, counted: true, owed: known && old&owedBit != 0}
	if known && last == 0 {
		return seen
	}
	held := print&printMask | period
	if seen.owed {
		held |= owedBit
	}
	if !slot.CompareAndSwap(old, held) {
		return seen // somebody notes the same client right now, or one that takes its place
	}
	seen.held, seen.counted, seen.first = held, false, !known || last > recentPeriods
	return seen
}

// placeOf returns the slot of a client, or else the one that was not used for longest.
func placeOf(ways []atomic.Uint64, print, period uint64) (slot *atomic.Uint64, known bool) {
	var oldest uint64
	for i := range ways {
		held := ways[i].Load()
		unused := age(held, period)
		switch {
		case held == 0:
			unused = periodMask
		case held&printMask == print&printMask:
			return &ways[i], true
		}
		if slot == nil || unused > oldest {
			slot, oldest = &ways[i], unused
		}
	}
	return slot, false
}

// age returns how many periods ago the client of a slot was refused: none too if somebody whose clock was read later has seen it.
func age(held, period uint64) uint64 {
	if passed := (period - held) & periodMask; passed <= periodMask/2 {
		return passed
	}
	return 0
}
