package ratelimit

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

// This file holds what one Redis told this process: the blocks here, the rest in files of its own.
//
// Blocks are bounded: where there are too many, those go that end soonest. Requests of their clients then cost a call each, and such
// a block is lost if the store loses it.

// hearsay is what one Redis told this process. It is that Redis's own: the same penalty group can be in use on two.
type hearsay struct {
	blocks   *knownBlocks
	refusals *refusalCache
	leases   *leaseTable
}

// Destruct implements caddy.Destructor.
func (*hearsay) Destruct() error { return nil }

// heardBlock is what is known of a block. Times are in microseconds by the clock of this process, but told.
type heardBlock struct {
	until  int64 // when it ends; 0 if an operator has just lifted it here
	byHand bool
	told   int64 // when the store said so, by its clock; 0: it was not reached
	asked  int64 // when the store was asked last
	since  int64 // what was asked before that is no news
}

// liftedLife is how long it is remembered that a block was lifted here: longer than a call that was under way can take.
const liftedLife = 2 * recheckEvery

// knownBlocks holds the blocks by identity and group. All methods may be called at the same time.
type knownBlocks struct {
	seed   maphash.Seed
	groups nameTable
	shards [shardCount]knownShard
	count  atomic.Int64
}

type knownShard struct {
	mu     sync.Mutex
	blocks table[heardBlock]
}

func newKnownBlocks() *knownBlocks {
	k := &knownBlocks{seed: maphash.MakeSeed()}
	for i := range k.shards {
		k.shards[i].blocks = newTable[heardBlock]()
	}
	return k
}

// lock locks the shard of an identity and returns where its block in a group is, -1 if none is known. The caller unlocks the
// shard.
func (k *knownBlocks) lock(id ID, group string) (s *knownShard, key entryKey, at int32) {
	s, key = &k.shards[maphash.Bytes(k.seed, id[:])%shardCount], entryKey{id, k.groups.number(group)}
	s.mu.Lock()
	return s, key, s.blocks.find(key)
}

// find returns what is known of a block that has not ended; until is 0 if there is none. It drops one whose time is over, so that
// nobody is looked up any more when the last is.
func (k *knownBlocks) find(now int64, id ID, group string) (b heardBlock) {
	s, _, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at >= 0 && s.blocks.value(at).until > now {
		b = *s.blocks.value(at)
	}
	if s.blocks.soonest() <= now {
		k.drop(s)
	}
	return b
}

// recheck notes that the store is asked now, if that was so many microseconds ago, and says whether it was.
func (k *knownBlocks) recheck(now int64, id ID, group string, ago int64) bool {
	s, _, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at < 0 || now-s.blocks.value(at).asked < ago {
		return false
	}
	s.blocks.value(at).asked = now
	return true
}

// setAsked changes when the store was asked about a block, if one is known.
func (k *knownBlocks) setAsked(asked int64, id ID, group string) {
	s, _, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at >= 0 {
		s.blocks.value(at).asked = asked
	}
}

// hear keeps what the store answered to a call that was sent at a time, unless something newer is known.
func (k *knownBlocks) hear(sent, now int64, id ID, group string, b heardBlock, maxKeys int) {
	s, key, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at >= 0 && s.blocks.value(at).since > sent {
		return
	}
	b.since = sent
	k.put(s, key, at, now, b, maxKeys)
}

// set keeps what an operator did here at this time: a block, or that there is none.
func (k *knownBlocks) set(now int64, id ID, group string, b heardBlock, maxKeys int) {
	s, key, at := k.lock(id, group)
	defer s.mu.Unlock()
	b.since = now
	k.put(s, key, at, now, b, maxKeys)
}

// setUntold keeps a block that an operator set here while the store could not be told, and returns what is known then. One for
// strikes that ends later goes on: he blocks, he does not let go. Of what the store has told, the news stay: what it loses meanwhile is
// set again.
func (k *knownBlocks) setUntold(now int64, id ID, group string, b heardBlock, maxKeys int) heardBlock {
	s, key, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at >= 0 {
		old := *s.blocks.value(at)
		if b.told = old.told; old.until > b.until && !old.byHand {
			b = old
		}
	}
	b.since = now
	k.put(s, key, at, now, b, maxKeys)
	return b
}

// put stores a block in a locked shard.
func (k *knownBlocks) put(s *knownShard, key entryKey, at int32, now int64, b heardBlock, maxKeys int) {
	gone := max(b.until, b.since+liftedLife)
	if at >= 0 {
		s.blocks.set(at, b, gone)
		return
	}
	for range 2 {
		if s.blocks.soonest() <= now {
			k.drop(s)
		}
	}
	if int(s.blocks.order.len) >= max(maxKeys/2/shardCount, 1) {
		if s.blocks.soonest() >= gone {
			return
		}
		k.drop(s)
	}
	s.blocks.insert(key, b, gone)
	k.count.Add(1)
}

// drop removes the block of a locked shard that ends soonest.
func (k *knownBlocks) drop(s *knownShard) {
	s.blocks.removeSoonest()
	k.count.Add(-1)
}

// forget drops a block of which the store knows nothing, as it answered to a call that was sent at a time.
func (k *knownBlocks) forget(sent int64, id ID, group string) {
	s, _, at := k.lock(id, group)
	defer s.mu.Unlock()
	if at >= 0 && s.blocks.value(at).since <= sent {
		s.blocks.remove(at)
		k.count.Add(-1)
	}
}

// live counts the blocks that have not ended, and drops what need not be remembered, which on an idle node nobody else does.
func (k *knownBlocks) live(now int64) (n int64) {
	for i := range k.shards {
		s := &k.shards[i]
		for k.tidy(s, now) {
		}
		for at := int32(0); at >= 0; {
			at = eachValue(&s.mu, &s.blocks, at, func(_ entryKey, b *heardBlock) {
				if b.until > now {
					n++
				}
			})
		}
	}
	return n
}

// tidy drops a part of what need not be remembered, and says whether there is more.
func (k *knownBlocks) tidy(s *knownShard, now int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range listChunk {
		if s.blocks.soonest() > now {
			return false
		}
		k.drop(s)
	}
	return true
}

// knownBlocks counts the blocks that this process remembers of its Redis.
func (a *App) knownBlocks() (n int64) {
	counted := map[*hearsay]bool{}
	for _, s := range a.remotes {
		if !counted[s.told] {
			n += s.told.blocks.live(processMicros())
		}
		counted[s.told] = true
	}
	return n
}
