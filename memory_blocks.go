package ratelimit

// This file holds what the memory store does with strikes outside of a request: an operator sets blocks, sees and lifts them.

// knownBlock is a block that an operator sees or sets.
type knownBlock struct {
	id    ID
	group string
	until int64 // µs, by the clock of the store
	// plain is the key in the clear, if the configuration wants that to be kept.
	plain string
	// byHand says that an operator set it.
	byHand bool
	// doubt is not nil where it is not known yet whether there is a block: the penalty by which there would be one.
	doubt *penaltyRules
}

// change replaces what is stored of an identity's strikes by what a function makes of it, and returns that.
func (m *memoryStore) change(now int64, id ID, p *penaltyRules, maxKeys int, change func(now int64, record strikeRecord) strikeRecord) strikeRecord {
	r := request{charges: []Charge{{ID: id, Penalty: p}}, visits: make([]visit, 1), states: make([]state, 1)}
	set := m.locate(&r)
	r.now = m.lock(set, now)
	known := r.change(change)
	m.unlock(set)
	if known {
		return r.states[0].record
	}
	r.now = m.lock(everyShard, now) // to make room, as take does
	if !r.change(change) && m.makeRoom(r.now, r.states[0].record.useless(p), 1, maxKeys) {
		r.insertRecord(0)
	}
	m.unlock(everyShard)
	return r.states[0].record
}

// change replaces the strikes of the only charge, and stores them if there is a place for them.
func (r *request) change(change func(now int64, record strikeRecord) strikeRecord) (known bool) {
	r.readRecord(0)
	settled, _ := r.states[0].record.settled(r.charges[0].Penalty, r.now)
	r.states[0].record = change(r.now, settled)
	if r.visits[0].record < 0 {
		return false
	}
	r.updateRecord(0)
	return true
}

// block blocks an identity in a group for so many microseconds, in place of what an operator set before, and returns when the
// latest block of the two kinds ends.
func (m *memoryStore) block(now int64, id ID, p *penaltyRules, length int64, maxKeys int) (ends int64) {
	record := m.change(now, id, p, maxKeys, func(now int64, record strikeRecord) strikeRecord {
		record.hand = now + length
		return record
	})
	return record.ends()
}

// pardon forgets the strikes of an identity in a group, every block included, and grants an amnesty of so many microseconds. It
// says whether there was something to forget, and until when the amnesty is.
func (m *memoryStore) pardon(now int64, id ID, p *penaltyRules, amnesty int64, maxKeys int) (had bool, until int64) {
	record := m.change(now, id, p, maxKeys, func(now int64, record strikeRecord) strikeRecord {
		had = record.strikes > 0 || record.hand > 0
		return strikeRecord{last: now, hand: -now - amnesty}
	})
	return had, -record.hand
}

// unblock forgets the strikes of an identity in a group, every block included, and says whether there were any.
func (m *memoryStore) unblock(now int64, id ID, p *penaltyRules) (had bool) {
	s := m.shardOf(id)
	key := entryKey{id, m.names.number(p.group)}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.records.find(key)
	if at < 0 {
		return false
	}
	record, _ := s.records.value(at).settled(p, now)
	s.records.remove(at)
	m.total.Add(-1)
	m.records.Add(-1)
	return record.strikes > 0 || record.hand > 0
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
