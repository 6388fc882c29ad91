package ratelimit

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"go.uber.org/zap"
)

const (
	// dialTimeout bounds opening a connection, TLS included. It happens in the background.
	dialTimeout = 2 * time.Second
	// linger is how long a client outlives its last configuration and its last call.
	linger = time.Second
	// warmConns is how many connections are kept ready: a pipeline each for the quick and the patient, and one for whoever finds his
	// broken.
	warmConns = 3
	// complainEvery is how often the same kind of wrong answer is logged.
	complainEvery = 10 * time.Second
)

// go-redis writes to standard error, a line for each connection that it cannot open. It has one logger for the whole process; what it
// says is in our own lines, so it goes to DEBUG.
func init() { redis.SetLogger(redisLog{}) }

type redisLog struct{}

// Printf implements the logger of go-redis.
func (redisLog) Printf(_ context.Context, format string, v ...any) {
	if ce := caddy.Log().Named("go-redis").Check(zap.DebugLevel, fmt.Sprintf(format, v...)); ce != nil {
		ce.Write()
	}
}

// redisClients holds one client for each distinct connection configuration in the process, as long as a
// configuration uses it: reloads keep the connections, and what is known about the state of Redis.
var redisClients = caddy.NewUsagePool()

// redisClient is the connection to one Redis, one group of Sentinels or one Cluster, shared by all handlers with the same
// settings. It opens its connections in the background when it is first needed, and closes them a while after the last
// configuration has let go and the last call has ended: Caddy serves requests of an old configuration after its Stop and
// Cleanup, and of a new one before its Start.
type redisClient struct {
	settings redisSettings
	census   *census
	counts   *storeCounts

	mu         sync.Mutex
	wire       *wire // nil while closed
	calls      int   // that use the wire
	held       bool  // by a configuration
	complained time.Time
}

// wire is what is open of a client: the ways to its servers, and what is known about them.
type wire struct {
	ctx    context.Context // until the wire is cut
	cancel context.CancelFunc
	// announces says whether a goroutine of the wire counts the nodes. It needs the client's lock.
	announces bool
	// route returns the server that keeps a key. It needs no network.
	route func(key string) *endpoint
	// servers returns all of them that are known. It needs no network.
	servers func() []*endpoint
	// any returns a client for commands that are not decisions.
	any func() redis.UniversalClient
	// shut closes all connections. It takes long if Redis hangs.
	shut func()
}

// acquireRedis returns the client for the settings. releaseRedis MUST be called once for each.
func acquireRedis(s redisSettings) (*redisClient, error) {
	v, _, err := redisClients.LoadOrNew(s, func() (caddy.Destructor, error) {
		counts, err := acquireStoreCounts(s.String())
		if err != nil {
			return nil, err
		}
		return &redisClient{settings: s, census: newCensus(), counts: counts, held: true}, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*redisClient), nil
}

func releaseRedis(c *redisClient) {
	_, _ = redisClients.Delete(c.settings) // Destruct returns no error
}

// Destruct implements caddy.Destructor: no configuration uses the client any more.
func (c *redisClient) Destruct() error {
	c.mu.Lock()
	c.held = false
	c.mu.Unlock()
	releaseStoreCounts(c.settings.String())
	c.leave(0)
	return nil
}

// start opens the connections, so that they are warm before they are needed.
func (c *redisClient) start() {
	c.enter()
	c.leave(1)
}

// enter begins a call: until leave, the wire stays open.
func (c *redisClient) enter() *wire {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls++
	if c.wire == nil {
		c.wire = c.open()
	}
	return c.wire
}

// leave ends so many calls, and closes the wire later if nobody is left.
func (c *redisClient) leave(calls int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls -= calls
	if c.calls == 0 && !c.held && c.wire != nil {
		time.AfterFunc(linger, c.closeIfUnused)
	}
}

func (c *redisClient) closeIfUnused() {
	c.mu.Lock()
	w := c.wire
	if w == nil || c.calls > 0 || c.held {
		c.mu.Unlock()
		return
	}
	c.wire = nil
	c.mu.Unlock()
	w.cancel()
	w.shut()
}

// open makes the connections in the background and lets nobody through before one is seen to work.
func (c *redisClient) open() *wire {
	ctx, cancel := context.WithCancel(context.Background())
	w := c.openServer
	if c.settings.kind == redisCluster {
		w = c.openCluster
	}
	wire := w(ctx)
	wire.ctx, wire.cancel = ctx, cancel
	return wire
}

// openServer opens a wire to one server: a Redis, or whatever the Sentinels call the master.
func (c *redisClient) openServer(ctx context.Context) *wire {
	e := newEndpoint(ctx, c, c.settings.String())
	e.dial = c.dial
	e.probeKey = func() (string, bool) { return c.settings.prefix + ":{probe0}", true }
	e.connect()
	go e.probe(e.answers, 0)
	return &wire{
		route:   func(string) *endpoint { return e },
		servers: func() []*endpoint { return []*endpoint{e} },
		any:     func() redis.UniversalClient { return e.conn.Load().client },
		shut:    e.shut,
	}
}

// dial returns a client for the server of the settings. It connects by itself, and again whenever it has to.
func (c *redisClient) dial() *redis.Client {
	s := &c.settings
	if s.kind == redisSentinel {
		return redis.NewFailoverClient(&redis.FailoverOptions{
			MasterName: s.master, SentinelAddrs: s.addressList(),
			SentinelUsername: s.sentinelUsername, SentinelPassword: s.sentinelPassword,
			Username: s.username, Password: s.password, DB: s.db, TLSConfig: s.tlsConfig(), Dialer: s.tls.dialer(),
			Protocol: 2, DisableIdentity: true,
			MaxRetries: -1, DialerRetries: 1, DialTimeout: dialTimeout,
			ReadTimeout: s.timeout, WriteTimeout: s.timeout,
			PoolSize: s.poolSize, MaxActiveConns: s.poolSize, MinIdleConns: min(warmConns, s.poolSize),
			PipelinePoolSize: -1, // the main pool is the one that keeps idle connections ready
		})
	}
	return redis.NewClient(&redis.Options{
		Network: s.network, Addr: s.addresses, Username: s.username, Password: s.password, DB: s.db, TLSConfig: s.tlsConfig(), Dialer: s.tls.dialer(),
		Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, DialerRetries: 1, DialTimeout: dialTimeout,
		ReadTimeout: s.timeout, WriteTimeout: s.timeout,
		PoolSize: s.poolSize, MaxActiveConns: s.poolSize, MinIdleConns: min(warmConns, s.poolSize),
		PipelinePoolSize:         -1,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// take decides about charges of which all identities are kept on the server of the first. An error means that there was no
// answer; what was sent is never sent again.
func (c *redisClient) take(ctx context.Context, patient bool, charges []Charge) (outcome, error) {
	w := c.enter()
	defer c.leave(1)
	key := identityKey(c.settings.prefix, charges[0].ID)
	if !patient {
		return w.take(ctx, false, key, charges)
	}
	ctx, cancel := context.WithTimeout(ctx, w.route(key).patience())
	defer cancel()
	out, err := w.take(ctx, true, key, charges)
	if errors.Is(err, errDown) {
		// While it waited for its turn, the server was found to be down. Nothing was sent: it can wait on like who comes only now.
		out, err = w.take(ctx, true, key, charges)
	}
	return out, err
}

func (w *wire) take(ctx context.Context, patient bool, key string, charges []Charge) (outcome, error) {
	e, ok := w.reach(ctx, patient, key)
	if !ok {
		return outcome{}, errDown
	}
	return e.take(ctx, patient, charges)
}

// reach returns the server that keeps a key, once it is worth a try. While a Cluster changes that can be another one in the end
// than in the beginning.
func (w *wire) reach(ctx context.Context, patient bool, key string) (*endpoint, bool) {
	for e := w.route(key); e.ready(ctx, patient); {
		next := w.route(key)
		if next == e {
			return e, true
		}
		e = next
	}
	return nil, false
}

// complain logs what is our own mistake or somebody else's: loud, but not once a request.
func (c *redisClient) complain(what string, err error) {
	c.mu.Lock()
	due := time.Since(c.complained) > complainEvery
	if due {
		c.complained = time.Now()
	}
	c.mu.Unlock()
	if !due {
		return
	}
	level := zap.ErrorLevel
	if errors.Is(err, errHealed) {
		level = zap.WarnLevel
	}
	c.log().Log(level, what, zap.Stringer("redis", &c.settings), zap.Error(err))
}

// retryAfter returns how long until it is worth to try a key again, while its server is down.
func (c *redisClient) retryAfter(key string) time.Duration {
	w := c.enter()
	defer c.leave(1)
	return w.route(key).retryAfter()
}

// log returns the logger of the configuration that runs now; the client outlives configurations.
func (c *redisClient) log() *zap.Logger { return caddy.Log().Named("rate_limit.redis") }

// tlsConfig returns what TLS needs, nil without TLS. It was checked when the configuration was loaded.
func (s *redisSettings) tlsConfig() *tls.Config {
	config, err := s.tls.config()
	if err != nil {
		panic(err)
	}
	return config
}
