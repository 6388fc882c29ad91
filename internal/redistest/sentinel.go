package redistest

import (
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// MasterName is what the Sentinels of StartSentinels call their master.
const MasterName = "mymaster"

// SentinelOptions say what StartSentinels does otherwise than usual.
type SentinelOptions struct {
	// Args are added to the command lines of master and replica. The password of "--requirepass" is also the one that
	// the replica and the Sentinels use.
	Args []string

	// SentinelArgs are added to the command lines of the Sentinels, "--requirepass" with a password among them.
	SentinelArgs []string

	// Proxies puts a Proxy in front of master and replica, see Server.Proxy. The Sentinels name the proxies' addresses
	// to clients, and they and the replica come through them too: what a proxy does to all for a second makes them fail
	// over. DropRepliesTo does not.
	Proxies bool
}

// SentinelGroup is a master with one replica, and three Sentinels of which two must agree that it is down. They notice
// after a second and fail over a second later, or six if they voted for different ones among them.
type SentinelGroup struct {
	// Master and Replica are what they were at the start. Restart makes them that again, until the Sentinels correct it.
	Master, Replica *Server
	Sentinels       []*Server

	t testing.TB
}

// StartSentinels starts a SentinelGroup and waits until all know each other and the replica has what the master has.
func StartSentinels(t testing.TB, options SentinelOptions) *SentinelGroup {
	t.Helper()
	g := &SentinelGroup{t: t}
	g.Master = newDataNode(t, options)
	g.Master.run()
	g.Replica = newDataNode(t, options)
	host, port := splitAddr(g.Master.announced())
	g.Replica.args = append(g.Replica.args, "--replicaof", host, port)
	g.Replica.run()
	for range 3 {
		sentinel := Start(t, append([]string{"--sentinel"}, options.SentinelArgs...)...)
		g.Sentinels = append(g.Sentinels, sentinel)
		hasten(sentinel)
		watch(sentinel, g.Master)
	}
	talk(g.Sentinels, talkative)
	proc.Eventually(t, "the replica is in sync", func() bool { return inSync(g.Replica) })
	proc.Eventually(t, "the Sentinels know each other", func() bool { return all(g.Sentinels, knowsTheOthers) })
	talk(g.Sentinels, usual)
	return g
}

// newDataNode returns a master or replica to be. Either may become the other, so both have what a replica needs.
func newDataNode(t testing.TB, options SentinelOptions) *Server {
	t.Helper()
	s := newServer(t, append([]string{"--repl-diskless-sync-delay", "0"}, options.Args...)...)
	if options.Proxies {
		s.proxy = NewProxy(t, s.Addr())
	}
	host, port := splitAddr(s.announced())
	s.args = append(s.args, "--replica-announce-ip", host, "--replica-announce-port", port)
	if s.password != "" {
		s.args = append(s.args, "--masterauth", s.password)
	}
	return s
}

// hasten makes a Sentinel look more often than every few seconds, and keeps it from doing nothing for 30 seconds (TILT)
// because a busy machine did not let it run for two. It forgets that when it is restarted.
func hasten(sentinel *Server) {
	sentinel.t.Helper()
	sentinel.Do("sentinel", "debug", "info-period", 200, "ping-period", 200, "ask-period", 200,
		"min-link-reconnect-period", 1000, "tilt-trigger", 20_000, "tilt-period", 1000)
}

// How often Sentinels tell the others of themselves. One that sees a replica become master for four times that long and
// was not told why makes it a replica again. So a short time helps them to find each other, and to make a replica of an
// old master, but would spoil the failover itself.
const (
	talkative = 200 * time.Millisecond
	usual     = 2 * time.Second
)

func talk(sentinels []*Server, every time.Duration) {
	for _, sentinel := range sentinels {
		sentinel.t.Helper()
		sentinel.Do("sentinel", "debug", "publish-period", every.Milliseconds())
	}
}

func watch(sentinel, master *Server) {
	sentinel.t.Helper()
	host, port := splitAddr(master.announced())
	sentinel.Do("sentinel", "monitor", MasterName, host, port, 2)
	sentinel.Do("sentinel", "set", MasterName, "down-after-milliseconds", 1000, "failover-timeout", 3000)
	if master.password != "" {
		sentinel.Do("sentinel", "set", MasterName, "auth-pass", master.password)
	}
}

// knowsTheOthers says whether a Sentinel is connected to the master, the replica and the other two.
func knowsTheOthers(sentinel *Server) bool {
	sentinel.t.Helper()
	others, _ := sentinel.Do("sentinel", "sentinels", MasterName).([]any)
	for _, other := range others {
		if other, _ := other.([]any); field(other, "flags") != "sentinel" { // flags grow by disconnected, s_down, …
			return false
		}
	}
	return len(others) == 2 && seesAReplica(sentinel)
}

// seesAReplica says whether a Sentinel is connected to the master and to a replica that could replace it.
func seesAReplica(sentinel *Server) bool {
	sentinel.t.Helper()
	master, _ := sentinel.Do("sentinel", "master", MasterName).([]any)
	replicas, _ := sentinel.Do("sentinel", "replicas", MasterName).([]any)
	if len(replicas) != 1 {
		return false
	}
	replica, _ := replicas[0].([]any)
	return field(master, "flags") == "master" && field(replica, "flags") == "slave" &&
		field(replica, "role-reported") == "slave" && field(replica, "master-link-status") == "ok"
}

// field returns a value of a list of names and values.
func field(list []any, name string) string {
	for i := 0; i+1 < len(list); i += 2 {
		if list[i] == name {
			value, _ := list[i+1].(string)
			return value
		}
	}
	return ""
}

// Addrs returns host and port of each Sentinel.
func (g *SentinelGroup) Addrs() []string {
	return announcedAddrs(g.Sentinels)
}

// Failover makes the Sentinels replace the master that they name, though nothing is wrong with it, and waits until it
// has become the replica of the new one, which is returned. Both have to answer.
func (g *SentinelGroup) Failover() *Server {
	g.t.Helper()
	// One whose replica has not become one yet, after the last failover, begins and gives up.
	proc.Eventually(g.t, "the Sentinels see a replica", func() bool { return all(g.asked(), seesAReplica) })
	var old *Server
	proc.Eventually(g.t, "a Sentinel begins a failover", func() bool {
		if old = g.named(); old == nil {
			return false
		}
		_, err := g.asked()[0].try("sentinel", "failover", MasterName)
		return err == nil
	})
	master := g.AwaitFailover(old)
	talk(g.asked(), talkative)
	defer talk(g.asked(), usual)
	proc.Eventually(g.t, "the old master is a replica", func() bool { return inSync(old) })
	return master
}

// AwaitFailover waits until every Sentinel that was not killed or stopped names another master than old, and that one
// knows of it. It returns the new master.
func (g *SentinelGroup) AwaitFailover(old *Server) *Server {
	g.t.Helper()
	var master *Server
	proc.Eventually(g.t, "the Sentinels name another master", func() bool {
		master = g.named()
		return master != nil && master != old && isMaster(master)
	})
	return master
}

// asked returns the Sentinels that answer.
func (g *SentinelGroup) asked() []*Server {
	g.t.Helper()
	asked := answeringOf(g.Sentinels)
	if len(asked) == 0 {
		g.t.Fatal("all Sentinels were killed or stopped")
	}
	return asked
}

// named returns the master that the Sentinels name, nil while they do not agree.
func (g *SentinelGroup) named() *Server {
	g.t.Helper()
	var named *Server
	for _, sentinel := range g.asked() {
		address, _ := sentinel.Do("sentinel", "get-master-addr-by-name", MasterName).([]any)
		master := announcedAs([]*Server{g.Master, g.Replica}, address)
		if master == nil || named != nil && master != named {
			return nil
		}
		named = master
	}
	return named
}
