package ratelimit

// This file holds what the memory store does with strikes outside of a request: it is told of blocks, lists them and lifts
// them.

// knownBlock is a block that somebody asks for.
type knownBlock struct {
	id    ID
	group string
	until int64 // µs, by the clock of the store
	// plain is the key in the clear, if the configuration wants that to be kept.
	plain string
}

// setRecord stores strikes that another store told of, in place of what was there.
func (m *memoryStore) setRecord(now int64, id ID, p *penaltyRules, record strikeRecord, maxKeys int) {
	r := request{charges: []Charge{{ID: id, Penalty: p}}, visits: make([]visit, 1), states: make([]state, 1)}
	set := m.locate(&r)
	r.now = m.lock(set, now)
	known := r.setRecord(record)
	m.unlock(set)
	if known {
		return
	}
	r.now = m.lock(everyShard, now) // to make room, as take does
	if !r.setRecord(record) && m.makeRoom(r.now, record.forgotten(p), 1, maxKeys) {
		r.insertRecord(0)
	}
	m.unlock(everyShard)
}

// setRecord replaces the strikes of the only charge, if there are any.
func (r *request) setRecord(record strikeRecord) (known bool) {
	r.readRecord(0)
	r.states[0].record = record
	if r.visits[0].record < 0 {
		return false
	}
	r.updateRecord(0)
	return true
}

// lockRecord locks the shard of an identity and returns where its strikes in a group are, -1 if there are none. The caller
// unlocks the shard.
func (m *memoryStore) lockRecord(id ID, group string) (*shard, int32) {
	s := m.shardOf(id)
	key := entryKey{id, m.names.number(group)}
	s.mu.Lock()
	return s, s.records.find(key)
}

// blocked returns until when the strikes of an identity in a group block it, 0 if they do not, and when the last of them was.
func (m *memoryStore) blocked(now int64, id ID, group string) (until, last int64) {
	s, at := m.lockRecord(id, group)
	defer s.mu.Unlock()
	if at < 0 {
		return 0, 0
	}
	record := s.records.value(at)
	if record.until <= now {
		return 0, 0
	}
	return record.until, record.last
}

// recheck makes now the last strike of an identity in a group, if that was so many microseconds ago, and says whether it was.
func (m *memoryStore) recheck(now int64, id ID, group string, ago int64) bool {
	s, at := m.lockRecord(id, group)
	defer s.mu.Unlock()
	if at < 0 || now-s.records.value(at).last < ago {
		return false
	}
	s.records.value(at).last = now
	return true
}

// setAsked makes a time the last strike of an identity in a group, if it has any.
func (m *memoryStore) setAsked(last int64, id ID, group string) {
	s, at := m.lockRecord(id, group)
	defer s.mu.Unlock()
	if at >= 0 {
		s.records.value(at).last = last
	}
}

// unblock forgets the strikes of an identity in a group, a block included, and says whether there were any.
func (m *memoryStore) unblock(id ID, group string) bool {
	s, at := m.lockRecord(id, group)
	defer s.mu.Unlock()
	if at < 0 {
		return false
	}
	s.records.remove(at)
	m.total.Add(-1)
	m.records.Add(-1)
	return true
}

// names returns the names by their numbers.
func (n *nameTable) names() map[uint32]string {
	names := map[uint32]string{}
	if numbers := n.numbers.Load(); numbers != nil {
		for name, i := range *numbers {
			names[i] = name
		}
	}
	return names
}
