package redistest

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

const slots = 16384

// ClusterOptions say what StartCluster does otherwise than usual.
type ClusterOptions struct {
	// Args are added to the command line of each node, "--cluster-require-full-coverage", "no" for example. The password
	// of "--requirepass" is also the one of replication.
	Args []string

	// Proxies puts a Proxy in front of each node, see Server.Proxy, and the cluster sends clients there. Replicas come
	// through them too, but the nodes find out who is down by ports of their own: what a proxy does is no reason to fail
	// over.
	Proxies bool
}

// Cluster is a Redis Cluster of three masters with a replica each. A master that is down is replaced after two to three
// seconds.
type Cluster struct {
	// Masters and Replicas are what they were at the start: Replicas[0] is the one of Masters[0]. These two stay
	// together, but may swap.
	Masters, Replicas []*Server

	t testing.TB
}

// StartCluster starts a Cluster, its slots divided evenly, and waits until every node knows all others and every replica
// has what its master has.
func StartCluster(t testing.TB, options ClusterOptions) *Cluster {
	t.Helper()
	c := &Cluster{t: t}
	for range 3 {
		c.Masters = append(c.Masters, startNode(t, options))
		c.Replicas = append(c.Replicas, startNode(t, options))
	}
	for i, master := range c.Masters {
		master.Do("cluster", "addslotsrange", i*slots/3, (i+1)*slots/3-1)
	}
	c.introduce()
	for i, replica := range c.Replicas {
		replica.Do("cluster", "replicate", nodeID(c.Masters[i]))
	}
	proc.Eventually(t, "the replicas are in sync", func() bool { return all(c.Replicas, inSync) })
	proc.Eventually(t, "the cluster is complete", func() bool { return all(c.nodes(), c.seesAll) })
	return c
}

func startNode(t testing.TB, options ClusterOptions) *Server {
	t.Helper()
	// A cluster does not show a replica before its master has sent it something, which may be the ping of every 10 s.
	s := newServer(t, append([]string{
		"--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--cluster-allow-replica-migration", "no",
		"--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
	}, options.Args...)...)
	if options.Proxies {
		s.proxy = NewProxy(t, s.Addr())
	}
	host, port := splitAddr(s.announced())
	bus := strconv.Itoa(proc.Port(t))
	s.args = append(s.args, "--cluster-port", bus, "--cluster-announce-bus-port", bus,
		"--cluster-announce-ip", host, "--cluster-announce-port", port)
	if s.password != "" {
		s.args = append(s.args, "--masterauth", s.password)
	}
	s.run()
	return s
}

// introduce makes every node know all others. Gossip would do that too, if only one of them knew the others, but takes
// seconds.
func (c *Cluster) introduce() {
	c.t.Helper()
	nodes := c.nodes()
	for i, node := range nodes {
		node.Do("cluster", "set-config-epoch", i+1)
		for _, other := range nodes[:i] {
			host, port := splitAddr(other.announced())
			node.Do("cluster", "meet", host, port, argument(other.args, "--cluster-port"))
		}
	}
	proc.Eventually(c.t, "the nodes know each other", func() bool { return all(nodes, c.knowsAll) })
}

// knowsAll says whether a node knows the others, and no one else: during the handshakes some appear twice.
func (c *Cluster) knowsAll(node *Server) bool {
	node.t.Helper()
	table, _ := node.Do("cluster", "nodes").(string)
	return strings.Count(table, "\n") == len(c.nodes()) && !strings.Contains(table, "handshake") &&
		all(c.nodes(), func(other *Server) bool { return strings.Contains(table, other.announced()+"@") })
}

// seesAll says whether a node takes requests and sees each slot served by a master that has its replica.
func (c *Cluster) seesAll(node *Server) bool {
	node.t.Helper()
	parts := slotTable(node)
	for _, part := range parts {
		if len(part.nodes) != 2 {
			return false
		}
	}
	return len(parts) == len(c.Masters) && stateOK(node)
}

// nodes returns all nodes, masters and replicas.
func (c *Cluster) nodes() []*Server { return slices.Concat(c.Masters, c.Replicas) }

// Addrs returns host and port of each node, as clients are told.
func (c *Cluster) Addrs() []string { return announcedAddrs(c.nodes()) }

// Slot returns the slot of a key.
func (c *Cluster) Slot(key string) int {
	c.t.Helper()
	slot, _ := c.asked()[0].Do("cluster", "keyslot", key).(int64)
	return int(slot)
}

// MasterOf returns the node that serves a key's slot. It waits until all nodes that were not killed or stopped agree.
func (c *Cluster) MasterOf(key string) *Server {
	c.t.Helper()
	slot := c.Slot(key)
	var master *Server
	proc.Eventually(c.t, "the nodes agree on a master", func() bool {
		master = c.masterOf(slot)
		return master != nil
	})
	return master
}

// masterOf returns the node that serves a slot, nil while the nodes do not agree or it does not answer.
func (c *Cluster) masterOf(slot int) *Server {
	c.t.Helper()
	var master *Server
	for _, node := range c.asked() {
		seen := c.masterSeenBy(node, slot)
		if seen == nil || master != nil && seen != master {
			return nil
		}
		master = seen
	}
	if !master.answering() {
		return nil
	}
	return master
}

func (c *Cluster) masterSeenBy(node *Server, slot int) *Server {
	c.t.Helper()
	for _, part := range slotTable(node) {
		if part.first <= slot && slot <= part.last {
			return announcedAs(c.nodes(), part.nodes[0])
		}
	}
	return nil
}

// AwaitFailover waits until a master that was killed, stopped or told to hand over is replaced by its replica, and all
// other slots are served too, in the eyes of all nodes that answer. It returns the new master.
func (c *Cluster) AwaitFailover(old *Server) *Server {
	c.t.Helper()
	master := c.partner(old)
	proc.Eventually(c.t, "the replica serves the slots", func() bool {
		return all(c.asked(), func(node *Server) bool { return c.seesReplaced(node, old, master) })
	})
	return master
}

// seesReplaced says whether, in the eyes of a node, each slot is served, by others than old, and some by its successor.
func (c *Cluster) seesReplaced(node, old, successor *Server) bool {
	node.t.Helper()
	served, succeeded := 0, false
	for _, part := range slotTable(node) {
		master := announcedAs(c.nodes(), part.nodes[0])
		if master == old || master == nil || !master.answering() {
			return false
		}
		served += part.last - part.first + 1
		succeeded = succeeded || master == successor
	}
	return served == slots && succeeded && stateOK(node)
}

// partner returns the replica of a master or the master of a replica.
func (c *Cluster) partner(s *Server) *Server {
	c.t.Helper()
	if i := slices.Index(c.Masters, s); i >= 0 {
		return c.Replicas[i]
	}
	if i := slices.Index(c.Replicas, s); i >= 0 {
		return c.Masters[i]
	}
	c.t.Fatalf("the server on %s is no node of the cluster", s.Addr())
	return nil
}

// asked returns the nodes that answer.
func (c *Cluster) asked() []*Server {
	c.t.Helper()
	asked := answeringOf(c.nodes())
	if len(asked) == 0 {
		c.t.Fatal("all nodes were killed or stopped")
	}
	return asked
}

// slotRange is a part of the slots and who serves it, the master first: addresses as announcedAs takes them.
type slotRange struct {
	first, last int
	nodes       [][]any
}

// slotTable returns the ranges that have a master in the eyes of a node.
func slotTable(node *Server) []slotRange {
	node.t.Helper()
	reply, _ := node.Do("cluster", "slots").([]any)
	table := make([]slotRange, 0, len(reply))
	for _, entry := range reply {
		fields, _ := entry.([]any)
		if len(fields) < 3 {
			node.t.Fatalf("cluster slots: got %v", reply)
		}
		first, _ := fields[0].(int64)
		last, _ := fields[1].(int64)
		part := slotRange{first: int(first), last: int(last)}
		for _, server := range fields[2:] {
			address, _ := server.([]any)
			part.nodes = append(part.nodes, address)
		}
		table = append(table, part)
	}
	return table
}

func stateOK(node *Server) bool {
	node.t.Helper()
	info, _ := node.Do("cluster", "info").(string)
	return strings.Contains(info, "cluster_state:ok\r\n")
}

func nodeID(node *Server) string {
	node.t.Helper()
	id, _ := node.Do("cluster", "myid").(string)
	return id
}
