package ratelimit

import "math"

// This file holds the table that a shard of the memory store keeps its buckets in, and another for its strike
// records: found by key, and ordered by the time at which they may be forgotten.
//
// The order is an exact heap that knows where each value is, not a lazy one: a debit moves its value at once, a
// few nanoseconds on average since it seldom passes others by much. So nothing is ever corrected later, on a
// request that has to make room, and what goes at the bound is really what is forgotten soonest, however many
// others were debited meanwhile.
//
// Nothing in a table is a pointer but its blocks, so that the garbage collector does not walk a million entries,
// and nothing is copied when it grows but pointers to blocks; Go's map grows in steps of at most 1024 slots by
// itself. Memory stays at the most that was ever in use.

// entryKey is who (the hashed identity) in what (the number of a zone or of a penalty group).
type entryKey struct {
	id   ID
	name uint32
}

// table holds values of type V, each with the time in microseconds from which on it may be forgotten.
type table[V any] struct {
	index map[entryKey]int32
	slots blocks[slot[V]]
	// order is a heap with four children a node: half the depth of a binary one, for siblings that share a
	// cache line.
	order blocks[due]
	// free is the first slot without a value, a list linked by pos. -1 if there is none.
	free int32
}

// slot is where one value stands. For a bucket it is 64 bytes, one cache line.
type slot[V any] struct {
	value V
	key   entryKey
	pos   int32 // in the order
}

// due says when the value in a slot may be forgotten.
type due struct {
	gone int64
	slot int32
}

func newTable[V any]() table[V] {
	return table[V]{index: make(map[entryKey]int32), free: -1}
}

// find returns the slot of a key, or -1.
func (t *table[V]) find(k entryKey) int32 {
	if i, ok := t.index[k]; ok {
		return i
	}
	return -1
}

func (t *table[V]) value(i int32) *V { return &t.slots.at(i).value }

// gone returns the time from which on the value in slot i may be forgotten.
func (t *table[V]) gone(i int32) int64 { return t.order.at(t.slots.at(i).pos).gone }

// soonest returns the earliest time at which a value may be forgotten, or the end of time in an empty table.
func (t *table[V]) soonest() int64 {
	if t.order.len == 0 {
		return math.MaxInt64
	}
	return t.order.at(0).gone
}

// insert adds a value for a key that has none.
func (t *table[V]) insert(k entryKey, v V, gone int64) {
	i := t.free
	if i >= 0 {
		t.free = t.slots.at(i).pos
	} else {
		i = t.slots.push()
	}
	*t.slots.at(i) = slot[V]{value: v, key: k}
	t.index[k] = i
	t.sift(t.order.push(), due{gone, i})
}

// set changes the value in slot i.
func (t *table[V]) set(i int32, v V, gone int64) {
	s := t.slots.at(i)
	s.value = v
	if t.order.at(s.pos).gone != gone {
		t.sift(s.pos, due{gone, i})
	}
}

// removeSoonest removes the value that may be forgotten first, and returns when.
func (t *table[V]) removeSoonest() int64 {
	first := *t.order.at(0)
	t.remove(first.slot)
	return first.gone
}

// remove empties slot i.
func (t *table[V]) remove(i int32) {
	s := t.slots.at(i)
	delete(t.index, s.key)
	t.order.len--
	if last := *t.order.at(t.order.len); last.slot != i {
		t.sift(s.pos, last)
	}
	s.pos, t.free = t.free, i
}

// sift puts d into the order: at position p, whose content is void, or above or below it.
func (t *table[V]) sift(p int32, d due) {
	for p > 0 {
		parent := (p - 1) / 4
		above := *t.order.at(parent)
		if above.gone <= d.gone {
			break
		}
		t.place(p, above)
		p = parent
	}
	for {
		child, below := t.soonestChild(p)
		if child < 0 || below.gone >= d.gone {
			break
		}
		t.place(p, below)
		p = child
	}
	t.place(p, d)
}

func (t *table[V]) soonestChild(p int32) (int32, due) {
	soonest, least := int32(-1), due{}
	for c := 4*p + 1; c <= 4*p+4 && c < t.order.len; c++ {
		if d := *t.order.at(c); soonest < 0 || d.gone < least.gone {
			soonest, least = c, d
		}
	}
	return soonest, least
}

func (t *table[V]) place(p int32, d due) {
	*t.order.at(p) = d
	t.slots.at(d.slot).pos = p
}

// blocks is a list that never moves what it holds.
type blocks[T any] struct {
	list []*[blockLen]T
	len  int32
}

const blockLen = 64

func (b *blocks[T]) at(i int32) *T { return &b.list[uint32(i)/blockLen][uint32(i)%blockLen] }

// push adds an element with any content and returns its index.
func (b *blocks[T]) push() int32 {
	if int(b.len) == len(b.list)*blockLen {
		b.list = append(b.list, new([blockLen]T))
	}
	b.len++
	return b.len - 1
}
