package redistest

import (
	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// MoveSlot moves a slot with its keys to another master.
func (c *Cluster) MoveSlot(slot int, to *Server) {
	c.t.Helper()
	c.BeginMove(slot, to).Finish()
}

// SlotMove is a slot on its way from one master to another. The old one still serves it, but sends clients on with ASK
// for keys that it does not have, new ones among them.
type SlotMove struct {
	cluster  *Cluster
	slot     int
	from, to *Server
}

// BeginMove begins to move a slot to another master. No key has moved yet.
func (c *Cluster) BeginMove(slot int, to *Server) *SlotMove {
	c.t.Helper()
	var from *Server
	proc.Eventually(c.t, "the nodes agree on a master", func() bool {
		from = c.masterOf(slot)
		return from != nil
	})
	if from == to {
		c.t.Fatalf("slot %d is on %s already", slot, to.Addr())
	}
	to.Do("cluster", "setslot", slot, "importing", nodeID(from))
	from.Do("cluster", "setslot", slot, "migrating", nodeID(to))
	return &SlotMove{cluster: c, slot: slot, from: from, to: to}
}

// MoveKeys moves the keys that the slot has now. Requests that need one are answered with ASK from then on.
func (m *SlotMove) MoveKeys() {
	m.cluster.t.Helper()
	for {
		keys, _ := m.from.Do("cluster", "getkeysinslot", m.slot, 100).([]any)
		if len(keys) == 0 {
			return
		}
		m.migrate(keys)
	}
}

func (m *SlotMove) migrate(keys []any) {
	m.cluster.t.Helper()
	host, port := splitAddr(m.to.Addr())
	command := []any{"migrate", host, port, "", 0, 5000}
	if m.to.password != "" {
		command = append(command, "auth", m.to.password)
	}
	m.from.Do(append(append(command, "keys"), keys...)...)
}

// Finish moves the keys that are left, makes the slot the new master's, and waits until all nodes know.
func (m *SlotMove) Finish() {
	m.cluster.t.Helper()
	m.MoveKeys()
	// The new master first: were it the old one, a request that came between would be sent to and fro.
	owner := nodeID(m.to)
	m.to.Do("cluster", "setslot", m.slot, "node", owner)
	m.from.Do("cluster", "setslot", m.slot, "node", owner)
	proc.Eventually(m.cluster.t, "the nodes know the slot's new master", func() bool {
		return m.cluster.masterOf(m.slot) == m.to
	})
}
