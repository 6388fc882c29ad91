package ratelimit

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// This file holds what the tests of Redis's states stand on: clients of some Redis, what they were answered, what it cost them
// there, and what was logged about it.

const (
	standBurst = 1_000_000 // tokens; nobody is refused for want of them
	// normalZone is open while Redis is down, sensitiveZone is closed.
	normalZone, sensitiveZone = "api", "login"
)

// stand is a client of some Redis and the requests of one identity.
type stand struct {
	t        *testing.T
	server   *redistest.Server // that keeps the bucket, where that is always the same
	keeper   func() *redistest.Server
	replica  *redistest.Server // of the server, where that is started by the stand
	proxy    *redistest.Proxy  // on the way to the server, nil if there is none
	group    *redistest.SentinelGroup
	cluster  *redistest.Cluster
	move     *redistest.SlotMove // of the bucket's slot
	lost     int                 // a slot that nobody serves
	ups      int                 // servers that are said to be up in the beginning
	store    *redisStore
	limiter  *Limiter
	id       ID
	settings redisSettings
	// log returns what was logged since it was asked last.
	log func() []string

	mu      sync.Mutex
	answers map[string]map[string]int // by zone and what the answer was
}

// Budgets of a decision. The long ones are for what does not depend on time: a busy machine must not look like a slow Redis. The
// short ones are what users have by default.
var (
	longBudgets  = redisSettings{timeout: time.Second, patience: time.Second}
	shortBudgets = redisSettings{timeout: defaultTimeout, patience: defaultSensitiveTimeout}
)

// newStand returns a stand in front of what the settings say; the rest of them is filled in. Nothing was sent yet.
func newStand(t *testing.T, settings redisSettings) *stand {
	t.Helper()
	settings.network, settings.prefix, settings.poolSize = "tcp", "tollgate", 8
	if settings.timeout == 0 {
		settings.timeout, settings.patience = longBudgets.timeout, longBudgets.patience
	}
	client, err := acquireRedis(settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { releaseRedis(client) })
	s := &stand{t: t, id: ID{1}, settings: settings, ups: 1, log: watchLog(t)}
	s.store = &redisStore{client: client, prefix: settings.prefix}
	s.limiter, _ = newTestLimiter(s.store, 1)
	s.forget()
	return s
}

// alone starts a server with the arguments and a stand in front of it.
func alone(t *testing.T, settings redisSettings, args ...string) *stand {
	t.Helper()
	server := redistest.Start(t, args...)
	return inFrontOf(t, settings, server, server.Addr())
}

// proxied does what alone does, with a proxy between the two.
func proxied(t *testing.T, settings redisSettings) *stand {
	t.Helper()
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	s := inFrontOf(t, settings, server, proxy.Addr())
	s.proxy = proxy
	return s
}

func inFrontOf(t *testing.T, settings redisSettings, server *redistest.Server, addr string) *stand {
	t.Helper()
	settings.addresses = addr
	s := newStand(t, settings)
	s.server = server
	s.keeper = func() *redistest.Server { return s.server }
	return s
}

// watchLog takes over what is logged until the test ends, and returns a function that tells what was logged since it was called
// last.
func watchLog(t *testing.T) func() []string {
	_, original, buffer := caddy.BufferedLog()
	t.Cleanup(func() { caddy.UnbufferDefaultLogger(original) })
	core, logs := observer.New(zap.InfoLevel)
	return func() []string {
		buffer.FlushTo(zap.New(core))
		var said []string
		for _, entry := range logs.TakeAll() {
			line, _, _ := strings.Cut(strings.TrimPrefix(entry.Message, "redis "), ",")
			said = append(said, line)
		}
		return said
	}
}

func (s *stand) charge(zone string) Charge {
	c := testCharge(zone, standBurst)
	c.ID = s.id
	if zone == sensitiveZone {
		c.Patient, c.OnStoreError = true, PolicyDeny
	}
	return c
}

// decide makes one request and notes the answer.
func (s *stand) decide(ctx context.Context, zone string) Decision {
	d := s.limiter.Decide(ctx, []Charge{s.charge(zone)})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[zone][answerOf(&d)]++
	return d
}

// answerOf names an answer by its status and by who gave it.
func answerOf(d *Decision) string {
	status := http.StatusOK
	if !d.Allowed {
		status = kindOf(d.Reason).status
	}
	switch d.Source {
	case SourceRedis:
		return fmt.Sprint(status)
	case SourceShare:
		return fmt.Sprint(status, " share")
	default:
		return fmt.Sprint(status)
	}
}

// byRedis is the answer of a request that Redis has admitted.
const byRedis = "200"

// ask makes so many requests of both zones, in turn.
func (s *stand) ask(n int) {
	for range n {
		s.decide(context.Background(), normalZone)
		s.decide(context.Background(), sensitiveZone)
	}
}

// forget drops what was answered so far.
func (s *stand) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers = map[string]map[string]int{normalZone: {}, sensitiveZone: {}}
}

// taken returns what was answered so far: how many by Redis, in both zones, and how many not.
func (s *stand) taken() (byRedisItself, given int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, answers := range s.answers {
		for answer, n := range answers {
			if answer == byRedis {
				byRedisItself += n
			} else {
				given += n
			}
		}
	}
	return byRedisItself, given
}

// noted returns a copy of the answers so far.
func (s *stand) noted() map[string]map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	noted := map[string]map[string]int{}
	for zone, answers := range s.answers {
		noted[zone] = maps.Clone(answers)
	}
	return noted
}

// awaitRedis makes requests until Redis decides about those of both zones.
func (s *stand) awaitRedis() {
	s.t.Helper()
	for _, zone := range []string{normalZone, sensitiveZone} {
		proc.Eventually(s.t, "Redis decides about "+zone, func() bool {
			return s.decide(context.Background(), zone).Source == SourceRedis
		})
	}
}

func (s *stand) key() string { return s.store.key(s.id) }

// debits returns how many tokens are missing in the buckets, as Redis has them now. Less than one has flowed in since.
func (s *stand) debits() (tokens int) {
	s.t.Helper()
	for _, zone := range []string{normalZone, sensitiveZone} {
		tokens += missingTokens(s.keeper(), s.key(), zone, standBurst)
	}
	return tokens
}

// missingTokens returns how many tokens of so many are missing in the bucket of a zone. Less than one has flowed in since.
func missingTokens(server *redistest.Server, key, zone string, burst int64) int {
	packed, _ := server.Do("hget", key, "z"+zone).(string)
	if packed == "" {
		return 0
	}
	left := binary.BigEndian.Uint64([]byte(packed[:8])) &^ (0xff << 56) // the first byte is the version
	return int((burst*Token - int64(left) + Token - 1) / Token)
}

// killClients closes the connections of all clients but of the assertions.
func (s *stand) killClients() { s.server.Do("client", "kill", "type", "normal", "skipme", "yes") }

// config sets options of the server.
func (s *stand) config(options ...any) {
	s.t.Helper()
	s.server.Do(append([]any{"config", "set"}, options...)...)
}

// counted writes counts like 3 × 200, 1 × 503.
func counted(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%d × %s", counts[name], name))
	}
	return strings.Join(parts, ", ")
}

// awaitListed waits until so many blocks are listed.
func (s *stand) awaitListed(n int64) {
	s.t.Helper()
	proc.Eventually(s.t, fmt.Sprintf("%d blocks are listed", n), func() bool { return s.server.Do("zcard", s.store.listKey()) == n })
}
