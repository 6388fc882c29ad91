package ratelimit

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// serverState is a state in which a Redis can be: how it gets there and back, and what requests see of it. TRYAGAIN, which a
// Cluster answers while some keys of a command have moved and others have not, and CROSSSLOT are not among them: on a Cluster
// a call has one key.
type serverState struct {
	name  string
	start func(t *testing.T, groups *redisGroups) *stand // a stand that Redis has answered, unless cold
	enter func(s *stand)
	// ask makes requests in the state; by default six in each zone.
	ask func(s *stand)
	// leave ends the state. Without it, the state has no end.
	leave func(s *stand)

	cold    bool // no request was made before the state
	forgets bool // what was taken before is gone

	normal, sensitive string // each answer; several are written "200 or 200 share"
	// late is how many debits are executed after the caller gave up, -1: at most one for each who did.
	late int
	// lines is what the log says, "down, up again" for example; several possibilities are written with "or".
	lines string
	// within is how soon after the end of the state Redis decides again; 0: that is only shown.
	within time.Duration
}

// Every state is a row of the table that this test prints in the end.
func TestServerStates(t *testing.T) {
	groups := &redisGroups{t: t}
	table := []string{
		"| State | Normal route | Sensitive route | Debits | after the caller gave up | Log | Back after |",
		"|---|---|---|---|---|---|---|",
	}
	for _, state := range slices.Concat(plainStates, refusingStates, absentStates, strangeStates, slowStates, dataStates, sentinelStates, clusterStates) {
		t.Run(state.name, func(t *testing.T) {
			table = append(table, state.run(t, groups))
		})
	}
	t.Log("\n" + strings.Join(table, "\n"))
}

// run brings a Redis into the state and back, holds what was seen against what is wanted, and returns a row of the table.
func (state *serverState) run(t *testing.T, groups *redisGroups) (row string) {
	s := state.start(t, groups)
	if !state.cold {
		s.awaitRedis()
		ups := 0
		proc.Eventually(t, "the log says that all servers are up", func() bool {
			ups += len(s.log())
			return ups == s.ups
		})
	}
	before, _ := s.taken()
	if state.forgets {
		before = 0
	}
	s.forget()
	if state.enter != nil {
		state.enter(s)
	}
	if state.ask != nil {
		state.ask(s)
	} else {
		s.ask(6)
	}
	during := s.noted()
	state.want(t, during)
	lines, back := s.log(), "–"
	if state.leave != nil {
		begun := time.Now()
		state.leave(s)
		s.awaitRedis()
		took := time.Since(begun)
		if back = took.Round(time.Millisecond).String(); state.within > 0 && took > state.within {
			t.Errorf("back after %s, want at most %s", back, state.within)
		}
		s.ask(3)
	}
	lines = state.wantLines(t, s, lines)
	debits, late := state.wantDebits(t, s, before)
	return fmt.Sprintf("| %s | %s | %s | %d | %d | %s | %s |", state.name,
		counted(during[normalZone]), counted(during[sensitiveZone]), debits, late, strings.Join(lines, ", "), back)
}

// want holds the answers in the state against what is wanted.
func (state *serverState) want(t *testing.T, answers map[string]map[string]int) {
	t.Helper()
	for zone, want := range map[string]string{normalZone: state.normal, sensitiveZone: state.sensitive} {
		for answer, n := range answers[zone] {
			if !slices.Contains(strings.Split(want, " or "), answer) {
				t.Errorf("%s: %d answers %s, want %s", zone, n, answer, want)
			}
		}
		if len(answers[zone]) == 0 {
			t.Errorf("%s: no answer", zone)
		}
	}
}

// wantLines returns what was logged, with what is still to come: who is told of an outage is told of its end.
func (state *serverState) wantLines(t *testing.T, s *stand, lines []string) []string {
	t.Helper()
	matches := func() bool { return slices.Contains(strings.Split(state.lines, " or "), strings.Join(lines, ", ")) }
	for deadline := time.Now().Add(3 * time.Second); !matches() && time.Now().Before(deadline); {
		proc.Eventually(t, "something more is logged", func() bool {
			more := s.log()
			lines = append(lines, more...)
			return len(more) > 0 || time.Now().After(deadline)
		})
	}
	if lines = append(lines, s.log()...); !matches() {
		t.Errorf("the log says %q, want %q", lines, state.lines)
	}
	return lines
}

// wantDebits holds the buckets against the answers: one debit for each of Redis, before, in and after the state, and at most one
// for each that it did not answer in time.
func (state *serverState) wantDebits(t *testing.T, s *stand, before int) (debits, late int) {
	t.Helper()
	answered, given := s.taken()
	if s.keeper == nil {
		if answered > 0 {
			t.Errorf("%d answers of a Redis that there is not", answered)
		}
		return 0, 0
	}
	debits = s.debits()
	late = debits - before - answered
	switch {
	case late < 0 || late > given:
		t.Errorf("%d debits for %d answers by Redis and %d without it", debits, before+answered, given)
	case state.late >= 0 && late != state.late:
		t.Errorf("%d debits after the caller gave up, want %d", late, state.late)
	}
	if ttl := s.keeper().TTLs()[s.key()]; debits > 0 && ttl <= 0 {
		t.Errorf("the key has a TTL of %s", ttl)
	}
	return debits, late
}

func aloneLong(t *testing.T, _ *redisGroups) *stand { t.Helper(); return alone(t, longBudgets) }

func proxiedShort(t *testing.T, _ *redisGroups) *stand { t.Helper(); return proxied(t, shortBudgets) }

// aloneWith starts a server with more arguments.
func aloneWith(args ...string) func(*testing.T, *redisGroups) *stand {
	return func(t *testing.T, _ *redisGroups) *stand { t.Helper(); return alone(t, longBudgets, args...) }
}

// set returns a step that sets options of the server.
func set(options ...any) func(*stand) {
	return func(s *stand) { s.t.Helper(); s.config(options...) }
}

// do returns a step that sends a command to the server.
func do(command ...any) func(*stand) {
	return func(s *stand) { s.t.Helper(); s.server.Do(command...) }
}

// steps returns a step that is several.
func steps(all ...func(*stand)) func(*stand) {
	return func(s *stand) {
		s.t.Helper()
		for _, step := range all {
			step(s)
		}
	}
}

func killClients(s *stand) { s.t.Helper(); s.killClients() }

// In plainStates nothing is wrong.
var plainStates = []serverState{
	{name: "healthy", start: aloneLong, normal: byRedis, sensitive: byRedis},
	{name: "NOSCRIPT after SCRIPT FLUSH", start: aloneLong, ask: askAfterFlush, normal: byRedis, sensitive: byRedis},
	{
		name: "the client disconnects", start: aloneLong, normal: byRedis, sensitive: byRedis,
		ask: func(s *stand) {
			gone, cancel := context.WithCancel(context.Background())
			cancel()
			for range 6 {
				s.decide(gone, normalZone)
				s.decide(gone, sensitiveZone)
			}
		},
	},
	{name: "CLIENT KILL between requests", start: aloneLong, enter: killClients, normal: byRedis, sensitive: byRedis},
	{
		name: "password changed, old connections", start: aloneWith("--requirepass", ""),
		enter: set("requirepass", "new"), leave: set("requirepass", ""), normal: byRedis, sensitive: byRedis,
	},
	{
		name: "TLS with a client certificate", normal: byRedis, sensitive: byRedis,
		start: encryptedWith(func(s *tlsSettings, server *redistest.TLSServer) {
			s.cert, s.key = server.ClientCert.Text, server.ClientKey.Text
		}, "--tls-auth-clients", "yes"),
	},
}

// askAfterFlush holds that the script is sent once more, and only once.
func askAfterFlush(s *stand) {
	s.t.Helper()
	s.server.Do("script", "flush")
	evalsha, eval := s.server.Calls("evalsha"), s.server.Calls("eval")
	s.ask(6)
	if n, more := s.server.Calls("evalsha")-evalsha, s.server.Calls("eval")-eval; n != 12 || more != 1 {
		s.t.Errorf("%d EVALSHA and %d EVAL for 12 decisions, want 12 and 1", n, more)
	}
}

const (
	shared      = "200 share"
	closed      = "503"
	downAndUp   = "is down, is up again"
	unreachable = "cannot be reached"
)

// In refusingStates Redis answers, but not with a decision.
var refusingStates = []serverState{
	{
		name: "LOADING", start: aloneWith("--enable-debug-command", "yes", "--loading-process-events-interval-bytes", "1024"),
		enter: startLoading, leave: set("key-load-delay", "0"), normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "BUSY", start: aloneWith("--busy-reply-threshold", "1"),
		enter: startBusyScript, leave: do("script", "kill"), normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "READONLY, new master behind the address", start: withReplica,
		enter: promoteReplica, leave: func(s *stand) { s.proxy.SetTarget(s.server.Addr()) }, within: 5 * time.Second,
		normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "OOM with noeviction", start: aloneLong,
		enter: set("maxmemory", "1"), leave: set("maxmemory", "0"), normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "MISCONF, BGSAVE fails", start: aloneLong,
		enter: failToSave, leave: set("save", ""), normal: shared, sensitive: closed, lines: downAndUp,
	},
	{
		name: "NOREPLICAS", start: aloneLong, normal: shared, sensitive: closed, lines: downAndUp,
		enter: set("min-replicas-to-write", "1"), leave: set("min-replicas-to-write", "0"),
	},
	{
		name: "NOAUTH", start: aloneLong, normal: shared, sensitive: closed, lines: downAndUp,
		enter: steps(set("requirepass", "new"), killClients), leave: set("requirepass", ""),
	},
	{
		name: "WRONGPASS", start: withPassword, normal: shared, sensitive: closed, lines: downAndUp,
		enter: steps(set("requirepass", "new"), killClients), leave: set("requirepass", "old"),
	},
	{
		name: "NOPERM, -evalsha", start: aloneLong, normal: shared, sensitive: closed, lines: downAndUp,
		enter: do("acl", "setuser", "default", "-evalsha"), leave: do("acl", "setuser", "default", "+evalsha"),
	},
	{
		name: "NOPERM, -hset in the script", start: aloneLong, normal: shared, sensitive: closed, lines: downAndUp,
		enter: do("acl", "setuser", "default", "-hset"), leave: do("acl", "setuser", "default", "+hset"),
	},
	{
		name: "max number of clients reached", start: aloneLong, normal: shared, sensitive: closed, lines: downAndUp,
		enter: steps(set("maxclients", "1"), killClients), leave: set("maxclients", "100"),
	},
}

// aside sends a command that takes long, on a connection of its own, until the test ends.
func (s *stand) aside(command ...any) {
	client := redis.NewClient(&redis.Options{Addr: s.server.Addr(), Protocol: 2, ReadTimeout: -1, DisableIdentity: true})
	var sent sync.WaitGroup
	sent.Go(func() { client.Do(context.Background(), command...) })
	s.t.Cleanup(func() {
		_ = client.Close()
		sent.Wait()
	})
}

// awaitRefusal waits until the server refuses what it does otherwise.
func (s *stand) awaitRefusal(code string) {
	s.t.Helper()
	client := redis.NewClient(&redis.Options{Addr: s.server.Addr(), Protocol: 2, DisableIdentity: true})
	defer client.Close()
	proc.Eventually(s.t, "the server answers "+code, func() bool {
		return redis.HasErrorPrefix(client.Get(context.Background(), "x").Err(), code)
	})
}

// startLoading makes the server read its data set, so slowly that it takes as long as the test wants.
func startLoading(s *stand) {
	s.t.Helper()
	s.server.Do("debug", "populate", 20_000)
	s.config("key-load-delay", "1000")
	s.aside("debug", "reload")
	s.awaitRefusal("LOADING")
}

func startBusyScript(s *stand) {
	s.t.Helper()
	s.aside("eval", "while true do end", 0)
	s.awaitRefusal("BUSY")
}

// failToSave makes a snapshot fail: where its file should be is a folder.
func failToSave(s *stand) {
	s.t.Helper()
	dir, _ := s.server.Do("config", "get", "dir").([]any)
	path, _ := dir[1].(string)
	if err := os.Mkdir(filepath.Join(path, "dump.rdb"), 0o700); err != nil {
		s.t.Fatal(err)
	}
	s.config("save", "3600 1")
	s.server.Do("bgsave")
	proc.Eventually(s.t, "the snapshot has failed", func() bool { return s.server.Info("persistence", "rdb_last_bgsave_status") == "err" })
}

func withPassword(t *testing.T, _ *redisGroups) *stand {
	t.Helper()
	settings := longBudgets
	settings.password = "old"
	return alone(t, settings, "--requirepass", "old")
}

// withReplica starts a second server that has what the first has.
func withReplica(t *testing.T, _ *redisGroups) *stand {
	t.Helper()
	s := proxied(t, longBudgets)
	s.replica = redistest.Start(t)
	host, port, _ := strings.Cut(s.server.Addr(), ":")
	s.server.Do("config", "set", "repl-diskless-sync-delay", "0")
	s.replica.Do("replicaof", host, port)
	proc.Eventually(t, "the replica is in sync", func() bool { return s.replica.Info("replication", "master_link_status") == "up" })
	return s
}

// awaitReplica waits until a replica has all that the server has executed.
func (s *stand) awaitReplica(replica *redistest.Server) {
	s.t.Helper()
	proc.Eventually(s.t, "the replica has everything", func() bool {
		return s.server.Info("replication", "master_repl_offset") == replica.Info("replication", "master_repl_offset")
	})
}

// promoteReplica exchanges the roles of the two servers. Connections to the old master stay.
func promoteReplica(s *stand) {
	s.t.Helper()
	s.awaitReplica(s.replica)
	s.replica.Do("replicaof", "no", "one")
	host, port, _ := strings.Cut(s.replica.Addr(), ":")
	s.server.Do("replicaof", host, port)
	s.server, s.replica = s.replica, s.server
}

// In absentStates there is nobody who answers.
var absentStates = []serverState{
	{
		name: "connection refused, killed and restarted empty", start: aloneLong, forgets: true, normal: shared, sensitive: closed, lines: downAndUp,
		enter: func(s *stand) { s.server.Kill() }, leave: func(s *stand) { s.server.Restart() },
	},
	{
		name: "a name that does not resolve", start: nowhere("redis.invalid:6379"), cold: true,
		normal: shared, sensitive: closed, lines: unreachable,
	},
	{
		name: "a server that is no Redis", start: anotherServer, cold: true,
		normal: shared, sensitive: closed, lines: unreachable,
	},
}

// In strangeStates one side does not trust the other.
var strangeStates = []serverState{
	{
		name: "TLS: certificate of a foreign CA", cold: true, normal: shared, sensitive: closed, lines: unreachable,
		start: encryptedWith(func(s *tlsSettings, server *redistest.TLSServer) { s.ca = server.ForeignCA.Text }),
	},
	{
		name: "TLS: certificate of another name", cold: true, normal: shared, sensitive: closed, lines: unreachable,
		start: encryptedWith(func(s *tlsSettings, _ *redistest.TLSServer) { s.serverName = "redis.example.com" }),
	},
	{
		name: "TLS: no client certificate", cold: true, normal: shared, sensitive: closed, lines: unreachable,
		start: encryptedWith(trusted, "--tls-auth-clients", "yes"),
	},
}

// encrypted starts a server that speaks TLS and a stand in front of it, whose settings trust it until change says otherwise.
func encrypted(t *testing.T, settings redisSettings, change func(*tlsSettings, *redistest.TLSServer), args ...string) *stand {
	t.Helper()
	server := redistest.StartTLS(t, args...)
	proxy := redistest.NewProxy(t, server.TLSAddr())
	settings.tls = tlsSettings{enabled: true, ca: server.CA.Text}
	change(&settings.tls, server)
	s := inFrontOf(t, settings, server.Server, proxy.Addr())
	s.proxy = proxy
	return s
}

func encryptedWith(change func(*tlsSettings, *redistest.TLSServer), args ...string) func(*testing.T, *redisGroups) *stand {
	return func(t *testing.T, _ *redisGroups) *stand {
		t.Helper()
		return encrypted(t, longBudgets, change, args...)
	}
}

func trusted(*tlsSettings, *redistest.TLSServer) {}

// nowhere is a stand in front of nothing.
func nowhere(addr string) func(*testing.T, *redisGroups) *stand {
	return func(t *testing.T, _ *redisGroups) *stand {
		t.Helper()
		settings := shortBudgets
		settings.addresses = addr
		return newStand(t, settings)
	}
}

func anotherServer(t *testing.T, groups *redisGroups) *stand {
	t.Helper()
	server := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(server.Close)
	return nowhere(server.Listener.Addr().String())(t, groups)
}

// In slowStates answers come late or never.
var slowStates = []serverState{
	{
		name: "the reply is lost", start: proxiedShort, normal: shared, sensitive: closed, late: 2,
		enter: func(s *stand) { s.proxy.DropRepliesTo("evalsha") },
		ask:   func(s *stand) { s.ask(1) },
		leave: func(s *stand) { s.proxy.DropRepliesTo("") },
	},
	{
		name: "EOF in place of the reply", start: func(t *testing.T, _ *redisGroups) *stand { t.Helper(); return proxied(t, longBudgets) },
		ask: askAndCut, leave: func(*stand) {}, normal: shared, sensitive: closed, late: 2,
	},
	{
		name: "the reply takes 200 ms, longer than timeout", start: proxiedShort, normal: shared, sensitive: byRedis, late: 1,
		enter: func(s *stand) { s.proxy.SetDelay(100 * time.Millisecond) },
		ask:   func(s *stand) { askOnce(s, normalZone, sensitiveZone, sensitiveZone) },
		leave: func(s *stand) { s.proxy.SetDelay(0) },
	},
	{
		name: "connecting takes 300 ms, then it is fast", cold: true, normal: "200 or 200 share", sensitive: byRedis, late: -1, lines: "is up",
		start: func(t *testing.T, _ *redisGroups) *stand {
			t.Helper()
			s := proxied(t, shortBudgets)
			s.proxy.SetConnectDelay(300 * time.Millisecond)
			return s
		},
	},
	{
		name: "TLS: connecting takes 300 ms, then it is fast", cold: true, normal: "200 or 200 share", sensitive: byRedis, late: -1, lines: "is up",
		start: func(t *testing.T, _ *redisGroups) *stand {
			t.Helper()
			s := encrypted(t, shortBudgets, trusted)
			s.proxy.SetConnectDelay(300 * time.Millisecond)
			return s
		},
	},
	{
		name: "one pause of 200 ms", start: func(t *testing.T, _ *redisGroups) *stand { t.Helper(); return alone(t, shortBudgets) },
		ask: askInPause, leave: func(*stand) {}, normal: "200 or 200 share", sensitive: byRedis, late: -1, lines: " or " + downAndUp,
	},
	{
		name: "it hangs", start: func(t *testing.T, _ *redisGroups) *stand { t.Helper(); return alone(t, shortBudgets) },
		enter: func(s *stand) { s.server.Stop() }, leave: func(s *stand) { s.server.Cont() },
		normal: shared, sensitive: closed, late: -1, lines: downAndUp,
	},
}

func askOnce(s *stand, zones ...string) {
	for _, zone := range zones {
		s.decide(context.Background(), zone)
	}
}

// askAndCut breaks the connection after the server has executed the request and before the reply comes.
func askAndCut(s *stand) {
	s.t.Helper()
	for _, zone := range []string{normalZone, sensitiveZone} {
		executed := s.server.Calls("evalsha")
		s.proxy.DropRepliesTo("evalsha") // what opens a connection is answered
		var decided sync.WaitGroup
		decided.Go(func() { s.decide(context.Background(), zone) })
		proc.Eventually(s.t, "the server has executed it", func() bool { return s.server.Calls("evalsha") > executed })
		s.proxy.DropRepliesTo("")
		s.proxy.Cut()
		decided.Wait()
	}
}

// askInPause makes requests without a break while Redis stops once for 200 ms.
func askInPause(s *stand) {
	s.t.Helper()
	var after atomic.Bool
	var clients sync.WaitGroup
	for _, zone := range []string{normalZone, normalZone, sensitiveZone, sensitiveZone} {
		clients.Go(func() {
			for last := false; !last; time.Sleep(time.Millisecond) {
				last = after.Load()
				s.decide(context.Background(), zone)
			}
		})
	}
	s.server.Stop()
	time.Sleep(200 * time.Millisecond) // the pause itself
	s.server.Cont()
	proc.Eventually(s.t, "Redis is up", func() bool { return !s.store.down() })
	after.Store(true)
	clients.Wait()
}

// In dataStates Redis does not have what was put there.
var dataStates = []serverState{
	{
		name: "a key of the wrong type", start: aloneLong, forgets: true, normal: byRedis, sensitive: byRedis,
		lines: "deleted a key that is not ours",
		enter: func(s *stand) { s.server.Do("set", s.key(), "somebody else's") },
	},
	{
		name: "a key without TTL", start: aloneLong, normal: byRedis, sensitive: byRedis,
		enter: func(s *stand) { s.server.Do("persist", s.key()) },
	},
	{
		name: "FLUSHALL", start: aloneLong, forgets: true, normal: byRedis, sensitive: byRedis, enter: do("flushall"),
	},
	{
		name: "evicted by volatile-ttl", start: aloneWith("--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"),
		enter: evict, forgets: true, normal: byRedis, sensitive: byRedis,
	},
}

// evict fills the server until there is no room for the test's key, and then makes some.
func evict(s *stand) {
	s.t.Helper()
	used, err := strconv.Atoi(s.server.Info("memory", "used_memory"))
	if err != nil {
		s.t.Fatal(err)
	}
	s.config("maxmemory", used+1<<20)
	n := 0
	proc.Eventually(s.t, "the key is evicted", func() bool {
		n++
		s.server.Do("set", fmt.Sprint("other", n), strings.Repeat("x", 32<<10), "ex", 10_000_000)
		return s.server.Do("exists", s.key()) == int64(0)
	})
	s.config("maxmemory", used+4<<20)
}
