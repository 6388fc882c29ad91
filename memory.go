package ratelimit

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
)

// This file holds the store in this process: where buckets and strikes live, how many there may be, and what
// goes when there are too many.
//
// A bucket that is full again is forgotten, and so are strikes whose time is over: nobody sees them any more,
// and requests with new keys drop them little by little. If more than maxKeys remain, the bucket goes that is
// full soonest. Whoever floods the store with fresh identities, of which each owes next to nothing, so
// displaces his own, and not the debt of a client that has drained its bucket. Strikes take at most half of
// the room; there the record goes that is forgotten soonest, so live blocks go last. What is lost is
// counted, and a new identity is limited like any other.
//
// State is spread over shards, each with a lock of its own. A request locks the shards of its identities, in
// their order, so that it is one step to everybody. One that needs room locks all of them: then what goes is
// the soonest of the whole store, not of a shard, and the bound is exact however small it is. That takes
// a microsecond more, and only while fresh keys come faster than the buckets of earlier ones refill.

// shardCount keeps requests apart that come at the same time. More than these would only make it slower to make
// room: a request holds its shard for a small part of the time that it spends in Caddy.
const shardCount = 16

// everyShard is the set of all of them, a bit each.
const everyShard = 1<<shardCount - 1

// overtaking is how far, in microseconds, time can seem to go back because a request was held up between reading the
// clock and locking its shards. A longer way back is a clock that was set back, and believed.
const overtaking = 10_000_000

// memoryStore keeps buckets and strikes of one process. It knows no limits: those come with each charge.
type memoryStore struct {
	seed   maphash.Seed // nobody outside can tell which identities share a shard
	names  nameTable
	shards [shardCount]shard
	// total counts what is stored, records the strikes among it; an entry is counted before it is there.
	total, records atomic.Int64
	lost           atomic.Uint64
	turn           uint // where evict begins; needs every shard's lock
}

type shard struct {
	mu      sync.Mutex
	latest  int64 // time of the last request
	buckets table[storedBucket]
	records table[strikeRecord]
	_       [64]byte // keeps the next one's lock out of this cache line
}

// storedBucket is a bucket with the largest burst of all limits under which it was asked since it was full.
// Only when it is full under that one it may be forgotten: what is forgotten is a full bucket to
// whichever limit asks next, so a small burst in turn with a large one would create tokens.
type storedBucket struct {
	Bucket
	burst int64
}

// fullAt returns the time from which on the bucket is full.
func (b storedBucket) fullAt() int64 {
	l := Limit{Num: b.Num, Den: b.Den, Burst: b.burst}
	// The burst of one limit at the rate of another can take longer than numbers go.
	if (b.burst-b.Tokens)/l.Num >= maxExact/l.Den {
		return maxExact
	}
	return b.At + b.full(l)
}

func newMemoryStore() *memoryStore {
	m := &memoryStore{seed: maphash.MakeSeed()}
	for i := range m.shards {
		m.shards[i].buckets = newTable[storedBucket]()
		m.shards[i].records = newTable[strikeRecord]()
	}
	return m
}

// take decides at time now, in microseconds of a monotonic clock, about all charges of one request. It keeps
// at most maxKeys buckets and strike records; a number that was lowered is reached gradually, each new entry
// then displaces two. The outcome keeps tokens, which has room for each charge.
func (m *memoryStore) take(now int64, charges []Charge, tokens []int64, maxKeys int) outcome {
	var visits [usualCharges]visit
	var states [usualCharges]state
	r := request{charges: charges, visits: sized(visits[:], len(charges)), states: sized(states[:], len(charges))}
	set := m.locate(&r)
	out, done := m.decide(&r, now, tokens, set, maxKeys)
	if !done {
		out, _ = m.decide(&r, now, tokens, everyShard, maxKeys) // from the start: others may come before it has all locks
	}
	return out
}

// decide takes under the locks of a set of shards. It does nothing if that needs room and other shards too.
func (m *memoryStore) decide(r *request, now int64, tokens []int64, set uint32, maxKeys int) (out outcome, done bool) {
	r.now = m.lock(set, now)
	defer m.unlock(set)
	out = r.decide(tokens)
	counted := m.count(r.buckets, r.records, maxKeys)
	if !counted && set != everyShard {
		return out, false
	}
	r.update()
	m.insert(r, maxKeys, counted)
	return out, true
}

// giveBack returns what a take took, because another store refused the request: at most up to the burst. A
// charge in a dry run stays paid: whether it was is not known.
func (m *memoryStore) giveBack(now int64, charges []Charge) {
	var visits [usualCharges]visit
	r := request{charges: charges, visits: sized(visits[:], len(charges))}
	set := m.locate(&r)
	r.now = m.lock(set, now)
	defer m.unlock(set)
	r.giveBack()
}

// len returns how many buckets and strike records are stored, those among them that are due to be dropped.
func (m *memoryStore) len() (buckets, records int) {
	strikes := m.records.Load()
	return int(max(m.total.Load()-strikes, 0)), int(strikes) // the two are not read at once
}

// evicted returns how many buckets and strike records were dropped while they still mattered.
func (m *memoryStore) evicted() uint64 { return m.lost.Load() }

// shardIndex returns which shard holds the state of an identity.
func (m *memoryStore) shardIndex(id ID) uint64 { return maphash.Bytes(m.seed, id[:]) % shardCount }

func (m *memoryStore) shardOf(id ID) *shard { return &m.shards[m.shardIndex(id)] }

// locate says for each charge where its state is, and returns the set of shards that hold it.
func (m *memoryStore) locate(r *request) (set uint32) {
	for i := range r.charges {
		c, v := &r.charges[i], &r.visits[i]
		s := m.shardIndex(c.ID)
		v.shard, v.zone = &m.shards[s], m.names.number(c.Zone)
		if c.Penalty != nil {
			v.group = m.names.number(c.Penalty.group)
		}
		set |= 1 << s
	}
	return set
}

// lock locks a set of shards and returns the time of the decision: now, or the time of a request that overtook
// this one. Without that, time between the two would count twice in the buckets of both, and create tokens.
func (m *memoryStore) lock(set uint32, now int64) int64 {
	latest := now
	for rest := set; rest != 0; rest &= rest - 1 {
		s := &m.shards[bits.TrailingZeros32(rest)]
		s.mu.Lock()
		latest = max(latest, s.latest)
	}
	if latest-now > overtaking {
		latest = now
	}
	for rest := set; rest != 0; rest &= rest - 1 {
		m.shards[bits.TrailingZeros32(rest)].latest = latest
	}
	return latest
}

func (m *memoryStore) unlock(set uint32) {
	for ; set != 0; set &= set - 1 {
		m.shards[bits.TrailingZeros32(set)].mu.Unlock()
	}
}

// count counts so many new buckets and records, unless there may not be that many.
func (m *memoryStore) count(buckets, records int64, maxKeys int) bool {
	if !addUpTo(&m.total, buckets+records, int64(maxKeys)) {
		return false
	}
	if !addUpTo(&m.records, records, int64(maxKeys)/2) {
		m.total.Add(-buckets - records)
		return false
	}
	return true
}

// addUpTo adds n to a counter if it is then at most most. Nothing can always be added.
func addUpTo(counter *atomic.Int64, n, most int64) bool {
	for n > 0 {
		old := counter.Load()
		if old+n > most {
			return false
		}
		if counter.CompareAndSwap(old, old+n) {
			break
		}
	}
	return true
}

// insert stores what is new. What is not counted yet needs room, and every shard locked.
func (m *memoryStore) insert(r *request, maxKeys int, counted bool) {
	for i := range r.visits {
		v, s := &r.visits[i], &r.states[i]
		if v.bucket < 0 && s.wroteBucket {
			if counted || m.makeRoom(r.now, math.MaxInt64, 0, maxKeys) {
				r.insertBucket(i)
			}
			m.forget(v.shard, r.now)
		}
		if v.record < 0 && s.wroteRecord {
			if counted || m.makeRoom(r.now, s.record.useless(r.charges[i].Penalty), 1, maxKeys) {
				r.insertRecord(i)
			}
			m.forget(v.shard, r.now)
		}
	}
}

// forget drops up to two buckets and two records whose time is over.
func (m *memoryStore) forget(s *shard, now int64) {
	for range 2 {
		if s.buckets.soonest() <= now {
			m.dropBucket(s, now)
		}
		if s.records.soonest() <= now {
			m.dropRecord(s, now)
		}
	}
}

// makeRoom drops up to two entries until there is room for one more, and counts that: a bucket or, with records
// = 1, a record that is forgotten at gone. Every shard MUST be locked. It fails where half of maxKeys is no
// record at all, and for strikes while live blocks fill the half: of these the new one is forgotten soonest.
func (m *memoryStore) makeRoom(now, gone, records int64, maxKeys int) bool {
	for range 2 {
		tooManyRecords := m.records.Load()+records > int64(maxKeys)/2
		if !tooManyRecords && m.total.Load() < int64(maxKeys) {
			break
		}
		if !m.evict(now, gone, tooManyRecords) {
			m.lost.Add(1)
			return false
		}
	}
	m.total.Add(1)
	m.records.Add(records)
	return true
}

// evict drops the bucket that is full soonest. It drops the record that is forgotten soonest if it has to be a
// record, if the time of that one is over, or if there is no bucket; but none that lasts longer than gone.
func (m *memoryStore) evict(now, gone int64, record bool) bool {
	// From another shard each time, or among equals it were always the first that is emptied.
	m.turn++
	b, r := &m.shards[m.turn%shardCount], &m.shards[m.turn%shardCount]
	for i := range uint(shardCount) {
		s := &m.shards[(m.turn+i)%shardCount]
		if s.buckets.soonest() < b.buckets.soonest() {
			b = s
		}
		if s.records.soonest() < r.records.soonest() {
			r = s
		}
	}
	full, forgotten := b.buckets.soonest(), r.records.soonest()
	switch {
	case !record && forgotten > now && full < math.MaxInt64:
		m.dropBucket(b, now)
	case forgotten < gone:
		m.dropRecord(r, now)
	default:
		return false
	}
	return true
}

// dropBucket drops the bucket of a shard that is full soonest.
func (m *memoryStore) dropBucket(s *shard, now int64) {
	if s.buckets.removeSoonest() > now {
		m.lost.Add(1)
	}
	m.total.Add(-1)
}

// dropRecord drops the record of a shard that is forgotten soonest.
func (m *memoryStore) dropRecord(s *shard, now int64) {
	if s.records.removeSoonest() > now {
		m.lost.Add(1)
	}
	m.total.Add(-1)
	m.records.Add(-1)
}
