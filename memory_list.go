package ratelimit

// This file lists the blocks that the memory store knows. It is not for the way of a request, and hardly in it: a shard is locked
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
			at = s.eachRecord(at, func(key entryKey, record *strikeRecord) {
				b := knownBlock{id: key.id, group: groups[key.name], until: record.until}
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

// eachRecord looks at the records in a part of the slots, and returns where the next part begins, -1 if there is none. Nothing
// moves between slots, so that what is there all the time is seen once.
func (s *shard) eachRecord(from int32, look func(entryKey, *strikeRecord)) int32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	to := min(from+listChunk, s.records.slots.len)
	for i := from; i < to; i++ {
		if s.records.used(i) {
			entry := s.records.slots.at(i)
			look(entry.key, &entry.value)
		}
	}
	if to == s.records.slots.len {
		return -1
	}
	return to
}

// used says whether there is a value in slot i.
func (t *table[V]) used(i int32) bool {
	pos := t.slots.at(i).pos
	return pos >= 0 && pos < t.order.len && t.order.at(pos).slot == i
}
