package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
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
	// maxQueued bounds the commands that wait for a connection, so that a stall costs no memory.
	maxQueued = 16384
	// Connections: at most, and kept ready.
	poolSize, warmConns = 8, 3
	// complainEvery is how often the same kind of wrong answer is logged.
	complainEvery = 10 * time.Second
)

var (
	// errDown says that nothing was sent, because Redis is known not to answer.
	errDown = errors.New("redis is down")
	// errTimeout says that there was no answer in time. The command may still be executed, once.
	errTimeout = errors.New("redis did not answer in time")
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

// redisClient is a connection to one Redis, shared by all handlers with the same settings, and the knowledge
// whether it is up. It opens its connections in the background when it is first needed, and closes them a while
// after the last configuration has let go and the last call has ended: Caddy serves requests of an old
// configuration after its Stop and Cleanup, and of a new one before its Start.
type redisClient struct {
	settings redisSettings
	breaker  breaker

	mu    sync.Mutex
	wire  *wire         // nil while closed
	calls int           // that use the wire
	held  bool          // by a configuration
	up    chan struct{} // closed when Redis is up
	// connecting until the first connection, or the first failure to get one
	connecting bool
	nextProbe  time.Time
	cameUpAt   time.Time
	flaps      int // outages in a row that began within steady
	complained time.Time
}

// wire is a set of open connections.
type wire struct {
	client         *redis.Client
	quick, patient *redis.AutoPipeliner
	ctx            context.Context // ends when the wire is closed
	cancel         context.CancelFunc
}

// acquireRedis returns the client for the settings. releaseRedis MUST be called once for each.
func acquireRedis(s redisSettings) (*redisClient, error) {
	v, _, err := redisClients.LoadOrNew(s, func() (caddy.Destructor, error) {
		return &redisClient{settings: s, held: true}, nil
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
		c.wire = c.openLocked()
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
	_ = w.client.Close() // also closes the pipelines; takes long if Redis hangs, but this goroutine is ours
}

// openLocked makes the connections in the background and lets nobody through before one is seen to work.
func (c *redisClient) openLocked() *wire {
	s := &c.settings
	client := redis.NewClient(&redis.Options{
		Network: s.network, Addr: s.addresses, Username: s.username, Password: s.password, DB: s.db,
		Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, DialerRetries: 1, DialTimeout: dialTimeout,
		ReadTimeout: s.timeout, WriteTimeout: s.timeout,
		PoolSize: poolSize, MaxActiveConns: poolSize, MinIdleConns: warmConns,
		PipelinePoolSize:         -1, // the main pool is the one that keeps idle connections ready
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	w := &wire{client: client}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	w.quick = pipeline(client)
	w.patient = pipeline(client.WithTimeout(s.patience))
	c.up, c.connecting = make(chan struct{}), true
	c.breaker.trip(processMicros())
	go c.probe(w, 0)
	return w
}

func pipeline(client *redis.Client) *redis.AutoPipeliner {
	ap, err := client.AsyncAutoPipelineWithOptions(&redis.AutoPipelineOptions{
		MaxBatchSize: 200, MaxConcurrentBatches: 1, MaxQueuedCommands: maxQueued,
	})
	if err != nil {
		panic(err) // the options are constants
	}
	return ap
}

// run executes the script within the budget. An error means that there was no answer; what was sent is never
// sent again.
func (c *redisClient) run(ctx context.Context, patient bool, keys []string, args []any) (any, error) {
	w := c.enter()
	defer c.leave(1)
	if !c.ready(ctx, patient) {
		return nil, errDown
	}
	pipe, budget := w.quick, c.settings.timeout
	if patient {
		pipe, budget = w.patient, c.settings.patience
	}
	started := processMicros()
	if !c.breaker.start(started) {
		return nil, errDown
	}
	reply, err := eval(ctx, pipe, budget, keys, args)
	now := processMicros()
	if isFailure(err) {
		if c.breaker.failed(started, now, budget.Microseconds()) {
			c.wentDown(w, err)
		}
		return nil, err
	}
	c.breaker.answered(now)
	if err != nil {
		c.complain(err)
	}
	return reply, err
}

// complain logs an answer that is our own mistake or a wrong Redis: loud, but not once a request.
func (c *redisClient) complain(err error) {
	c.mu.Lock()
	due := time.Since(c.complained) > complainEvery
	if due {
		c.complained = time.Now()
	}
	c.mu.Unlock()
	if due {
		c.log().Error("redis refused the script, deciding without it", zap.Stringer("redis", &c.settings), zap.Error(err))
	}
}

// onceCmd is a command that is never sent twice: after a lost reply, nobody knows whether it was executed.
type onceCmd struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (onceCmd) NoRetry() bool { return true }

var bucketSHA = redis.NewScript(bucketScript).Hash()

// eval runs the script by its hash, and once by its text where Redis has forgotten it.
func eval(ctx context.Context, pipe *redis.AutoPipeliner, budget time.Duration, keys []string, args []any) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	reply, err := submit(ctx, pipe, "evalsha", bucketSHA, keys, args)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = submit(ctx, pipe, "eval", bucketScript, keys, args)
	}
	return reply, err
}

func submit(ctx context.Context, pipe *redis.AutoPipeliner, verb, script string, keys []string, args []any) (any, error) {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, verb, script, len(keys))
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := onceCmd{redis.NewCmd(ctx, append(all, args...)...)}
	if err := pipe.Submit(ctx, cmd).WaitContext(ctx); err != nil {
		if ctx.Err() != nil {
			return nil, errTimeout
		}
		return nil, err
	}
	return cmd.Val(), nil
}

// isFailure says whether an error is one of Redis, rather than of what we asked: an error inside the script is loud, but no
// reason to stop asking, since other requests may have an answer. A Redis that refuses everybody (LOADING, READONLY, OOM, no
// permission, too many clients) is as good as down.
func isFailure(err error) bool {
	var reply redis.Error
	if err == nil || !errors.As(err, &reply) {
		return err != nil
	}
	code, text, _ := strings.Cut(reply.Error(), " ")
	switch code {
	case "CROSSSLOT", "WRONGTYPE":
		return false
	case "ERR":
		inScript := strings.Contains(text, "user_script") || strings.Contains(text, "Error running script")
		return !inScript || slices.ContainsFunc(refusals, func(r string) bool { return strings.Contains(text, r) })
	}
	return true
}

// refusals are what a command in the script can be refused for, whoever asks. Before Redis 7 they stand inside of an error of the
// script.
var refusals = []string{"-READONLY ", "-OOM ", "-MISCONF ", "-NOREPLICAS ", "can't run this command"}

// log returns the logger of the configuration that runs now; the client outlives configurations.
func (c *redisClient) log() *zap.Logger { return caddy.Log().Named("rate_limit.redis") }
