package ratelimit

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// This file holds what a node remembers of blocks against what its store has lost, and what an operator has lifted.

// knower is a node that knows of a block, in front of a store whose records the test sets.
type knower struct {
	*remoteMemory
	t      *testing.T
	l      *Limiter
	charge Charge
	told   int64 // when the block was told of
}

// newKnower returns a node that has just been told of a block of ten minutes: for strikes, or by hand.
func newKnower(t *testing.T, byHand bool) *knower {
	s, l := newRemoteMemory()
	k := &knower{remoteMemory: s, t: t, l: l, charge: testCharge("api", 100)}
	k.charge.Penalty = &penaltyRules{after: 3, base: 60e6, max: 600e6, window: 3600e6}
	k.store(strikeRecord{strikes: 9, until: *s.now + 600e6, last: *s.now})
	if byHand {
		k.store(strikeRecord{hand: *s.now + 600e6})
	}
	if d := k.ask(); d.Reason != ReasonBlocked || d.ByHand != byHand {
		t.Fatalf("got %+v", d)
	}
	k.told = *s.now
	return k
}

// store makes a record what the store holds, whatever it held before.
func (k *knower) store(record strikeRecord) {
	k.memory.change(*k.now, k.charge.ID, k.charge.Penalty, 1000, func(int64, strikeRecord) strikeRecord { return record })
}

func (k *knower) ask() Decision { return k.l.Decide(context.Background(), []Charge{k.charge}) }

// recheck returns what the store answers when it is asked about the block again.
func (k *knower) recheck() Decision {
	k.t.Helper()
	*k.now += recheckEvery
	calls := k.calls
	d := k.ask()
	if k.calls != calls+1 {
		k.t.Fatalf("%d calls, want one", k.calls-calls)
	}
	return d
}

// A known block is set again where what is stored is older than the news of it, and only there.
func TestLostBlockIsNoLiftedOne(t *testing.T) {
	for _, byHand := range []bool{false, true} {
		for _, row := range []struct {
			why    string
			stored func(told int64) strikeRecord
			want   bool // still blocked
		}{
			{"nothing is stored", func(int64) strikeRecord { return strikeRecord{} }, true},
			{"only earlier strikes came over", func(told int64) strikeRecord { return strikeRecord{strikes: 3, last: told - 1} }, true},
			{"only an earlier lifting came over", func(told int64) strikeRecord { return strikeRecord{last: told - 1} }, true},
			{"only an earlier amnesty came over", func(told int64) strikeRecord { return strikeRecord{last: told - 1, hand: -told - 600e6} }, true},
			{"only an earlier block came over", func(told int64) strikeRecord { return strikeRecord{strikes: 4, until: told - 1, last: told - 120e6} }, true},
			{"only an earlier block by hand came over", func(told int64) strikeRecord { return strikeRecord{hand: told - 1} }, true},
			{"it was lifted", func(told int64) strikeRecord { return strikeRecord{last: told + 1} }, false},
			{"it was lifted, with an amnesty", func(told int64) strikeRecord { return strikeRecord{last: told + 1, hand: -told - 600e6} }, false},
			{"it was lifted, and there were strikes since", func(told int64) strikeRecord { return strikeRecord{strikes: 1, last: told + 2} }, false},
			{"max was lowered, and the block is over", func(told int64) strikeRecord { return strikeRecord{strikes: 9, until: told + 2, last: told} }, false},
			{"it was made shorter by hand, and is over", func(told int64) strikeRecord { return strikeRecord{strikes: 1, last: told - 1, hand: told + 2} }, false},
		} {
			t.Run(fmt.Sprintf("%s, by hand %v", row.why, byHand), func(t *testing.T) {
				k := newKnower(t, byHand)
				k.store(row.stored(k.told))
				d := k.recheck()
				if blocked := d.Reason == ReasonBlocked; blocked != row.want || blocked && d.ByHand != byHand {
					t.Fatalf("got %+v", d)
				}
				if rest := micro(k.told + 600e6 - *k.now); row.want && d.RetryAfter != rest {
					t.Errorf("blocked for %s more, want %s", d.RetryAfter, rest)
				}
			})
		}
	}
}

// A block that was lost is set again as what it was: one by hand adds no strikes.
func TestLostBlockByHandAddsNoStrikes(t *testing.T) {
	k := newKnower(t, true)
	k.store(strikeRecord{})
	k.recheck()
	k.store(strikeRecord{hand: k.told + 600e6})
	*k.now = k.told + 600e6
	k.charge.Limit.Burst = Token
	if n := admitted(k.l, 1, k.charge); n != 1 {
		t.Fatal("blocked after its end")
	}
	if d := k.ask(); d.Reason != ReasonLimited || d.Strikes != 1 {
		t.Errorf("the first refusal after it: %+v, want strike 1", d)
	}
}

// A node that has not heard of a block for longer than a lifted one is remembered does not set it again, though max was lowered
// since and the lifting is not stored any more.
func TestOldNewsIsNoBlock(t *testing.T) {
	k := newKnower(t, false)
	k.charge.Penalty.max = 90 * 24 * 3600e6
	k.store(strikeRecord{strikes: 20, until: *k.now + k.charge.Penalty.max, last: *k.now})
	k.recheck()
	k.store(strikeRecord{})
	*k.now += maxByHand
	k.charge.Penalty.max = 600e6
	if d := k.ask(); d.Reason == ReasonBlocked {
		t.Errorf("got %+v", d)
	}
}

// What was asked before an operator acted here is no news, whenever the answer comes.
func TestAnswerFromBeforeTheLifting(t *testing.T) {
	k := newKnower(t, false)
	sent := *k.now
	late := Decision{Reason: ReasonBlocked, Zone: "api", RetryAfter: 10 * time.Minute, Now: sent}
	*k.now += 1000
	k.store(strikeRecord{last: *k.now})
	k.l.known.set(*k.now, k.charge.ID, k.charge.Penalty.group, heardBlock{}, 1000)
	k.l.learn(sent, []Charge{k.charge}, &late)
	if d := k.ask(); d.Reason == ReasonBlocked {
		t.Errorf("after it was lifted here: %+v", d)
	}

	asked := k.charge
	asked.BlockedFor = 1
	*k.now += 1000
	k.l.known.set(*k.now, k.charge.ID, k.charge.Penalty.group, heardBlock{until: *k.now + 600e6, byHand: true, asked: *k.now}, 1000)
	k.l.learn(*k.now-1, []Charge{asked}, &Decision{Allowed: true, Now: *k.now - 1})
	if d := k.ask(); d.Reason != ReasonBlocked {
		t.Errorf("after it was blocked here: %+v", d)
	}
}

// Blocks that are remembered are bounded, and those go that end soonest; time drops them by itself.
func TestKnownBlocksAreBounded(t *testing.T) {
	k := newKnownBlocks()
	const most = 3200
	for i := range uint64(10_000) {
		k.set(0, testID(i), "g", heardBlock{until: int64(20e6 + i)}, most)
	}
	if n := k.count.Load(); n > most/2 || n < most/4 {
		t.Errorf("%d blocks known, want at most %d", n, most/2)
	}
	late := 0
	for i := range uint64(1000) {
		if k.find(0, testID(9000+i), "g").until > 0 {
			late++
		}
	}
	if late < 950 {
		t.Errorf("%d of the 1000 that end last are known", late)
	}
	for i := range uint64(10_000) {
		k.find(30e6, testID(i), "g")
	}
	if n := k.count.Load(); n != 0 {
		t.Errorf("%d blocks are known after their end", n)
	}
}

// A block by hand that the store could not be told of lets nobody go sooner, and does not make this node forget what it was told.
func TestBlockByHandThatIsNotTold(t *testing.T) {
	for _, row := range []struct {
		why            string
		byHand         bool // the known block, of ten minutes
		length         int64
		until          int64
		stillFromStore bool
	}{
		{"a shorter one beside one for strikes", false, 1e6, 600e6, true},
		{"a longer one", false, 3600e6, 3600e6, false},
		{"a shorter one in place of one by hand", true, 1e6, 1e6, false},
	} {
		k := newKnower(t, row.byHand)
		got := k.l.known.setUntold(*k.now, k.charge.ID, k.charge.Penalty.group, heardBlock{until: *k.now + row.length, byHand: true, asked: *k.now}, 1000)
		known := k.l.known.find(*k.now, k.charge.ID, k.charge.Penalty.group)
		if known.until != *k.now+row.until || known.byHand == row.stillFromStore || known != got {
			t.Errorf("%s: %+v is known, want one of %s", row.why, known, micro(row.until))
		}
		if known.told != k.told {
			t.Errorf("%s: the store told of it at %d, want %d", row.why, known.told, k.told)
		}
	}
	if b := newKnownBlocks().setUntold(0, ID{1}, "", heardBlock{until: 5, byHand: true}, 1000); b.told != 0 || b.until != 5 {
		t.Errorf("where none was known: %+v", b)
	}
}

// What was lifted, or has ended, is no known block; nobody has to come for it to be forgotten.
func TestEndedBlocksAreNotCounted(t *testing.T) {
	k := newKnownBlocks()
	for i := range uint64(3000) {
		k.set(0, testID(i), "g", heardBlock{}, 100_000)
	}
	k.set(0, testID(3000), "g", heardBlock{until: 600e6}, 100_000)
	k.set(0, testID(3001), "g", heardBlock{until: 1e6}, 100_000)
	for _, row := range []struct{ now, live, kept int64 }{{0, 2, 3002}, {2e6, 1, 3002}, {liftedLife, 1, 1}, {600e6, 0, 0}} {
		if live := k.live(row.now); live != row.live || k.count.Load() != row.kept {
			t.Errorf("at %d: %d blocks, %d kept, want %d and %d", row.now, live, k.count.Load(), row.live, row.kept)
		}
	}
}
