package ratelimit

import "sync"

// This file lists the blocks that this process knows. It is not for the way of a request, and hardly in it: a shard is locked
// for a small part of its records at a time.

// listChunk is how many records are looked at under one lock.
const listChunk = 1024

// blocksAfter lists up to so many of those who are blocked now: the first in the order of the list that come after a place.
func (m *memoryStore) blocksAfter(now int64, after blockPlace, most int) []knownBlock {
	groups := m.names.names()
	var list []knownBlock
	for i := range m.shards {
		s := &m.shards[i]
		for at := int32(0); at >= 0; {
			at = eachValue(&s.mu, &s.records, at, func(key entryKey, record *strikeRecord) {
				for _, b := range []knownBlock{{until: record.until}, {until: record.hand, byHand: true}} {
					b.id, b.group = key.id, groups[key.name]
					if b.until > now && b.isAfter(after) {
						list = append(list, b)
					}
				}
			})
			if len(list) >= 2*most+listChunk {
				list = sortBlocks(list, most)
			}
		}
	}
	return sortBlocks(list, most)
}

// blocksAfter lists up to so many of the blocks that a Redis told of, in the same order.
func (k *knownBlocks) blocksAfter(now int64, after blockPlace, most int) []knownBlock {
	groups := k.groups.names()
	var list []knownBlock
	for i := range k.shards {
		s := &k.shards[i]
		for at := int32(0); at >= 0; {
			at = eachValue(&s.mu, &s.blocks, at, func(key entryKey, heard *heardBlock) {
				b := knownBlock{id: key.id, group: groups[key.name], until: heard.until, byHand: heard.byHand}
				if b.until > now && b.isAfter(after) {
					list = append(list, b)
				}
			})
			if len(list) >= 2*most+listChunk {
				list = sortBlocks(list, most)
			}
		}
	}
	return sortBlocks(list, most)
}

// eachValue looks at the values in a part of the slots of a table, and returns where the next part begins, -1 if there is none.
// Nothing moves between slots, so that what is there all the time is seen once.
func eachValue[V any](mu *sync.Mutex, t *table[V], from int32, look func(entryKey, *V)) int32 {
	mu.Lock()
	defer mu.Unlock()
	to := min(from+listChunk, t.slots.len)
	for i := from; i < to; i++ {
		if t.used(i) {
			entry := t.slots.at(i)
			look(entry.key, &entry.value)
		}
	}
	if to == t.slots.len {
		return -1
	}
	return to
}

// used says whether there is a value in slot i.
func (t *table[V]) used(i int32) bool {
	pos := t.slots.at(i).pos
	return pos >= 0 && pos < t.order.len && t.order.at(pos).slot == i
}
