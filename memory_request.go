package ratelimit

import (
	"maps"
	"sync"
	"sync/atomic"
)

// This file holds one request's stay in the memory store, while it has its shards locked: read, decide, write.

// usualCharges is how many charges a request has without being unusual. More of them cost an allocation.
const usualCharges = 4

// request is what the store knows of one request.
type request struct {
	now     int64
	charges []Charge
	visits  []visit
	states  []state
	// buckets and records count what the decision writes that was not stored.
	buckets, records int64
}

// visit says where in the store the state of one charge is.
type visit struct {
	shard       *shard
	zone, group uint32
	// bucket and record are slots in the shard's tables, -1 for what is not stored.
	bucket, record int32
}

// decide reads what is stored and takes, in the states of the request only.
func (r *request) decide(tokens []int64) outcome {
	for i := range r.charges {
		r.readBucket(i)
		r.readRecord(i)
	}
	out := take(r.now, r.charges, r.states, tokens)
	r.buckets, r.records = 0, 0
	for i := range r.charges {
		v, s := &r.visits[i], &r.states[i]
		if v.bucket < 0 && s.wroteBucket {
			r.buckets++
		}
		if v.record < 0 && s.wroteRecord {
			r.records++
		}
	}
	return out
}

// readBucket finds a charge's bucket. One that is full may still be there, and can be written to, but is not
// looked at: whether it was dropped yet must make no difference.
func (r *request) readBucket(i int) {
	v := &r.visits[i]
	r.states[i] = state{}
	v.bucket = v.shard.buckets.find(r.bucketKey(i))
	if v.bucket >= 0 && v.shard.buckets.gone(v.bucket) > r.now {
		r.states[i].bucket = v.shard.buckets.value(v.bucket).Bucket
	}
}

// readRecord finds a charge's strikes, with the first of the charges that share them.
func (r *request) readRecord(i int) {
	v := &r.visits[i]
	v.record = -1
	if r.charges[i].Penalty == nil || recordOf(r.charges, i) != i {
		return
	}
	v.record = v.shard.records.find(r.recordKey(i))
	if v.record >= 0 && v.shard.records.gone(v.record) > r.now {
		r.states[i].record = *v.shard.records.value(v.record)
	}
}

// update writes what was stored before. It comes before anything is inserted or dropped, while the slots that
// were found are still the same.
func (r *request) update() {
	for i := range r.visits {
		if r.visits[i].bucket >= 0 {
			r.updateBucket(i)
		}
		if r.visits[i].record >= 0 && r.states[i].record != (strikeRecord{}) {
			r.updateRecord(i)
		}
	}
}

// updateBucket writes a bucket. If only the burst is larger than any before, it is full later than it was.
func (r *request) updateBucket(i int) {
	v, s, burst := &r.visits[i], &r.states[i], r.charges[i].Limit.Burst
	stored := *v.shard.buckets.value(v.bucket)
	if v.shard.buckets.gone(v.bucket) <= r.now {
		stored = storedBucket{}
	}
	switch {
	case s.wroteBucket:
		stored.Bucket = s.bucket
	case stored.burst == 0 || stored.burst >= burst:
		return
	}
	stored.burst = max(stored.burst, burst)
	v.shard.buckets.set(v.bucket, stored, stored.fullAt())
}

// updateRecord writes a record, and when it is forgotten by the rules of today, even if it is unchanged.
func (r *request) updateRecord(i int) {
	v, s := &r.visits[i], &r.states[i]
	v.shard.records.set(v.record, s.record, s.record.useless(r.charges[i].Penalty))
}

func (r *request) insertBucket(i int) {
	b := storedBucket{r.states[i].bucket, r.charges[i].Limit.Burst}
	r.visits[i].shard.buckets.insert(r.bucketKey(i), b, b.fullAt())
}

func (r *request) insertRecord(i int) {
	record := r.states[i].record
	r.visits[i].shard.records.insert(r.recordKey(i), record, record.useless(r.charges[i].Penalty))
}

// giveBack returns to each bucket its charge. A bucket that is not there is full.
func (r *request) giveBack() {
	for i := range r.charges {
		c, v := &r.charges[i], &r.visits[i]
		at := v.shard.buckets.find(r.bucketKey(i))
		if c.DryRun || at < 0 || v.shard.buckets.gone(at) <= r.now {
			continue
		}
		stored := *v.shard.buckets.value(at)
		stored.Bucket, _ = stored.settled(c.Limit, r.now)
		stored.Tokens = min(stored.Tokens+c.Cost, c.Limit.Burst)
		stored.burst = max(stored.burst, c.Limit.Burst)
		v.shard.buckets.set(at, stored, stored.fullAt())
	}
}

func (r *request) bucketKey(i int) entryKey { return entryKey{r.charges[i].ID, r.visits[i].zone} }

func (r *request) recordKey(i int) entryKey { return entryKey{r.charges[i].ID, r.visits[i].group} }

// sized returns a slice of length n, in the buffer if that is long enough.
func sized[T any](buffer []T, n int) []T {
	if n <= len(buffer) {
		return buffer[:n]
	}
	return make([]T, n)
}

// nameTable numbers the names of zones and penalty groups, so that a key is of fixed size and holds no pointer. A
// number is never given up: names come from configurations, not from clients. It is read without a lock.
type nameTable struct {
	mu      sync.Mutex
	numbers atomic.Pointer[map[string]uint32]
}

func (n *nameTable) number(name string) uint32 {
	if numbers := n.numbers.Load(); numbers != nil {
		if i, ok := (*numbers)[name]; ok {
			return i
		}
	}
	return n.add(name)
}

func (n *nameTable) add(name string) uint32 {
	n.mu.Lock()
	defer n.mu.Unlock()
	numbers := map[string]uint32{}
	if old := n.numbers.Load(); old != nil {
		numbers = maps.Clone(*old)
	}
	if i, ok := numbers[name]; ok {
		return i
	}
	i := uint32(len(numbers))
	numbers[name] = i
	n.numbers.Store(&numbers)
	return i
}
