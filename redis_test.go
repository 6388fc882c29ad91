package ratelimit

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// dialRedis returns a store on a server, with a client of its own.
func dialRedis(t *testing.T, addr string, timeout, patience time.Duration) *redisStore {
	t.Helper()
	client, err := acquireRedis(redisSettings{network: "tcp", addresses: addr, poolSize: 8, prefix: "tollgate", timeout: timeout, patience: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { releaseRedis(client) })
	return &redisStore{client: client, prefix: "tollgate"}
}

// down says whether the server that keeps the test's identity is down.
func (s *redisStore) down() bool {
	w := s.client.enter()
	defer s.client.leave(1)
	down, _ := w.route(s.key(ID{1})).breaker.state()
	return down
}

// While Redis hangs, no decision waits for longer than its budget, and once that is known, none waits and none is sent.
func TestHangingRedisIsLeftAlone(t *testing.T) {
	const budget = 100 * time.Millisecond
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	store := dialRedis(t, proxy.Addr(), budget, 2*budget)
	l, _ := newTestLimiter(store, 1)
	if d := l.Decide(context.Background(), []Charge{testCharge("api", 1000)}); d.Source != SourceRedis {
		t.Fatalf("got %+v", d)
	}
	server.Stop()
	var took []time.Duration
	var mu sync.Mutex
	decide := func(n int) {
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for range n {
					begun := time.Now()
					l.Decide(context.Background(), []Charge{testCharge("api", 1000)})
					mu.Lock()
					took = append(took, time.Since(begun))
					mu.Unlock()
				}
			})
		}
		wg.Wait()
	}
	for down := false; !down; down = store.down() {
		decide(1)
	}
	sent, begun := proxy.Requests(), time.Now()
	decide(2000)
	elapsed := time.Since(begun)
	// A probe is sent at most every probeFirst, and soon only every probeMax.
	if more := proxy.Requests() - sent; more > 10+int(elapsed/(probeMax/2)) {
		t.Errorf("%d requests were sent in %s for 32000 decisions while Redis was known to hang", more, elapsed)
	}
	server.Cont()
	proc.Eventually(t, "Redis decides again", func() bool {
		return l.Decide(context.Background(), []Charge{testCharge("api", 1000)}).Source == SourceRedis
	})
	slices.Sort(took)
	t.Logf("%d decisions while Redis hung: p50 %s, p99.9 %s, max %s; budget %s", len(took), took[len(took)/2], took[len(took)*999/1000], took[len(took)-1], budget)
	if longest := took[len(took)-1]; longest > 20*budget { // a bound for a machine under load; the log has the numbers
		t.Errorf("a decision took %s of a budget of %s", longest, budget)
	}
}

// A Redis that answers as long as nothing is written must not go down and up for every three requests: each change is a
// line in the log.
func TestRedisThatCannotWriteDoesNotFlap(t *testing.T) {
	for name, spoil := range map[string]func(*redistest.Server){
		"out of memory": func(s *redistest.Server) { s.Do("config", "set", "maxmemory", "1") },
		"a replica":     func(s *redistest.Server) { s.Do("replicaof", "127.0.0.1", "1") },
		"replicas lost": func(s *redistest.Server) { s.Do("config", "set", "min-replicas-to-write", "1") },
		"no permission": func(s *redistest.Server) { s.Do("acl", "setuser", "default", "-evalsha", "-eval") },
	} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			store := dialRedis(t, server.Addr(), time.Second, time.Second)
			changes := store.flapping(t, func() { spoil(server) })
			if down := store.down(); !down || changes > 1 {
				t.Errorf("down is %v after %d changes, want one change, to down", down, changes)
			}
			server.Do("acl", "setuser", "default", "+@all")
			server.Do("replicaof", "no", "one")
			server.Do("config", "set", "maxmemory", "0", "min-replicas-to-write", "0")
			proc.Eventually(t, "Redis is up", func() bool { down := store.down(); return !down })
			for key, ttl := range server.TTLs() {
				if ttl <= 0 {
					t.Errorf("key %q has a TTL of %s", key, ttl)
				}
			}
		})
	}
}

// One node of a cluster, taken for a Redis of its own, answers probes and not requests. So may others, for any reason.
func TestFlappingRedisIsLeftAloneForLonger(t *testing.T) {
	server := redistest.Start(t, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(redistest.Port(t)), "--cluster-require-full-coverage", "no")
	server.Do("cluster", "addslots", server.Do("cluster", "keyslot", "tollgate:{probe0}"))
	proc.Eventually(t, "the node serves its slot", func() bool {
		info, _ := server.Do("cluster", "info").(string)
		return strings.Contains(info, "cluster_state:ok")
	})
	store := dialRedis(t, server.Addr(), time.Second, time.Second)
	if changes := store.flapping(t, func() {}); changes > 16 {
		t.Errorf("%d changes", changes)
	}
}

// What Redis refuses for everybody is an outage, whatever it calls it: otherwise each request would wait for the refusal, and
// write keys that get no TTL.
func TestRefusalOfEverythingIsAnOutage(t *testing.T) {
	for name, command := range map[string]string{"no right to write": "-hset", "no right to set a TTL": "-pexpire"} {
		t.Run(name, func(t *testing.T) {
			server := redistest.Start(t)
			store := dialRedis(t, server.Addr(), time.Second, time.Second)
			if changes := store.flapping(t, func() { server.Do("acl", "setuser", "default", command) }); changes != 1 {
				t.Errorf("%d changes, want one, to down", changes)
			}
		})
	}
}

// flapping returns how often Redis went down or came up again in two seconds of steady requests, once it is spoilt.
func (s *redisStore) flapping(t *testing.T, spoil func()) (changes int) {
	t.Helper()
	s.client.start()
	isUp := func() bool { down := s.down(); return !down }
	proc.Eventually(t, "Redis is up", isUp)
	spoil()
	for begun, was := time.Now(), false; time.Since(begun) < 2*time.Second; {
		if _, err := s.Take(context.Background(), []Charge{testCharge("api", 1e6)}); err == nil {
			t.Fatal("a decision by a Redis that cannot write")
		}
		if down := s.down(); down != was {
			changes, was = changes+1, down
		}
	}
	return changes
}

// An answer that was on its way when the connections were replaced says nothing about the new ones, or one failover would be two
// outages.
func TestLateAnswerOfAReplica(t *testing.T) {
	server := redistest.Start(t)
	store := dialRedis(t, server.Addr(), 5*time.Second, 5*time.Second)
	l, _ := newTestLimiter(store, 1)
	proc.Eventually(t, "Redis decides", func() bool {
		return l.Decide(context.Background(), []Charge{testCharge("api", 1e6)}).Source == SourceRedis
	})
	w := store.client.enter()
	defer store.client.leave(1)
	e := w.route("")
	old := e.conn.Load()
	e.connect()
	readOnly := replyError("READONLY You can't write against a read only replica.")
	end := func(lane *lane, err error) (down bool) {
		e.breaker.start(processMicros())
		e.ended(lane, processMicros(), err)
		return store.down()
	}
	if end(old.quick, readOnly) || end(old.patient, readOnly) {
		t.Error("a connection that was replaced takes the new one down")
	}
	end(e.conn.Load().quick, nil)
	if !end(e.conn.Load().quick, readOnly) {
		t.Error("a replica is taken for a master")
	}
}

// A client that goes away is neither a failure of Redis nor a free request.
func TestClientGoneIsCharged(t *testing.T) {
	server := redistest.Start(t)
	l, _ := newTestLimiter(dialRedis(t, server.Addr(), 5*time.Second, 5*time.Second), 1)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for left := int64(9); left >= 0; left-- {
		if d := l.Decide(gone, []Charge{testCharge("api", 10)}); d.Source != SourceRedis || d.Remaining != left {
			t.Fatalf("got %+v, want %d left", d, left)
		}
	}
	if d := l.Decide(gone, []Charge{testCharge("api", 10)}); d.Source != SourceRedis || d.Allowed {
		t.Errorf("got %+v", d)
	}
}

// On a sensitive route a hiccup is waited for, also by requests that come after Redis was found to be silent.
func TestSensitiveRouteWaitsForAHiccup(t *testing.T) {
	server := redistest.Start(t)
	store := dialRedis(t, server.Addr(), 50*time.Millisecond, 10*time.Second)
	l, _ := newTestLimiter(store, 1)
	quick, patient := testCharge("api", 1e6), testCharge("login", 1e6)
	patient.Patient, patient.OnStoreError = true, PolicyDeny
	proc.Eventually(t, "Redis decides", func() bool { return l.Decide(context.Background(), []Charge{quick}).Source == SourceRedis })
	server.Stop()
	for down := false; !down; down = store.down() {
		l.Decide(context.Background(), []Charge{quick})
	}
	var decided atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if d := l.Decide(context.Background(), []Charge{patient}); !d.Allowed || d.Source != SourceRedis {
				t.Errorf("got %+v", d)
			}
			decided.Add(1)
		})
	}
	server.Cont()
	wg.Wait()
	if decided.Load() != 8 {
		t.Errorf("%d decisions", decided.Load())
	}
}

// Clients come and go with configurations: equal settings share one, and nothing of the last is left.
func TestClientsLeaveNothing(t *testing.T) {
	server := redistest.Start(t)
	ignore := goleak.IgnoreCurrent()
	settings := redisSettings{network: "tcp", addresses: server.Addr(), poolSize: 8, prefix: "tollgate", timeout: time.Second, patience: time.Second}
	var late *redisClient
	for i := range 50 {
		settings.timeout = time.Second + time.Duration(i%5)
		client, err := acquireRedis(settings)
		if err != nil {
			t.Fatal(err)
		}
		again, _ := acquireRedis(settings)
		if again != client {
			t.Fatal("equal settings have two clients")
		}
		client.start()
		releaseRedis(again)
		releaseRedis(client)
		late = client
	}
	// A request of a configuration that is gone still finds its way.
	if d, err := (&redisStore{client: late, prefix: "tollgate"}).Take(context.Background(), []Charge{testCharge("api", 10)}); err != nil || !d.Allowed {
		t.Errorf("got %+v, %v", d, err)
	}
	proc.Eventually(t, "all connections are closed", func() bool { return server.Info("clients", "connected_clients") == "1" })
	proc.Eventually(t, "nothing runs any more", func() bool { return goleak.Find(ignore) == nil })
}
