// Package ratelimit is a Caddy HTTP handler that limits requests, exactly and across many nodes.
//
// The files, in the order of a request's way through them:
//
//	module.go       the handler's configuration and life; provision.go makes its parts, warnings.go says what it is usually wrong about
//	app.go          what the handlers of one configuration share; claims.go holds that a name means the same to all of them
//	caddyfile.go    the directive and the global option; caddyfile_*.go are what they are read with
//	handler.go      a request's way
//	zone.go, rate.go  one limit; zone_claim.go says what it charges a request for, zone_missing.go watches for keys that never come
//	matchers.go     which requests something is for
//	key.go          a key expression: template, hash, what it says about the client
//	key_value.go    the value of one placeholder; grouping of addresses
//	key_given.go    the identity of somebody whom an operator names
//	placeholder.go  which placeholders a key may hold; placeholder_list.go lists them
//	store.go        the contract between limits and the places where buckets live
//	take.go         the decision about all charges of a request; bucket.lua does the same in Redis
//	bucket.go       the arithmetic of a token bucket
//	penalty.go      strikes and blocks
//	memory.go       the store in this process; memory_*.go are parts of it
//	redis.go        the store in Redis; hand.lua is what operators do to a client in it, redis_blocks.go keeps its list of blocks, and redis_list.go reads it
//	redis_config.go which Redis, resolved from the configuration; redis_options.go, redis_address.go and redis_tls.go are parts of it, setting.go its values
//	redis_client.go the connection to it, shared by handlers and configurations; redis_cluster.go finds the servers of a Cluster
//	redis_endpoint.go  one server: whether it is up, how it is probed; breaker.go says whether it is worth a try
//	redis_lane.go   batches of decisions on their way to a server and back; redis_script.go is how the script is spoken to
//	redis_errors.go what the end of a call means
//	redis_nodes.go  how many nodes there are: nodes.lua counts them in Redis
//	fallback.go     which store decides, and what holds while Redis does not answer; fallback_blocks.go remembers blocks,
//	                which known_blocks.go holds, and refusals.go refusals; lease.go is the arithmetic of tokens taken ahead, and lease_table.go holds them
//	shed.go         slots for requests in flight
//	headers.go      the answers; errorflow.go says whether error routes answer instead
//	watch.go        what operators are told of each decision
//	metrics.go      the metrics; metrics_zone.go counts what becomes of requests, and metrics_store.go calls to Redis
//	top.go          who asks for most; GET /rate_limit/top shows it
//	journal.go      what the log says about requests; journal_*.go bound and sum up what is said of refusals
//	access_log.go   what the access log says about a request
//	events.go       what Caddy's events app is told
//	dry_run_header.go  what a backend is told about a dry run
//	admin.go        what operators see and change; admin_types.go is what it takes and returns, admin_*.go are its answers
//	peek.go         the state of a client as his next request finds it; redis_state.go reads it in Redis, by peek.lua
//	reset.go        a full bucket for a client, in Redis by reset.lua; override.go holds what operators say about zones whose store is down
//	command.go      the commands that ask it, command_*.go what each of them takes and prints
//	explain.go      what would become of a request; explain_routes.go goes its way, explain_limits.go asks the limits there
//	clock.go, count.go, spelling.go  the process's clock, numbers in JSON that are at least 1, and words that were almost right
package ratelimit

import (
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

func init() {
	caddy.RegisterModule(new(Handler))
	caddy.RegisterModule(new(App))
}

// Handler limits requests. Every zone is one limit; all zones that match a request must allow it, and they
// are charged together or not at all. A request that is refused gets an answer of status 429 or 503; the
// others go on, with headers that say what is left.
//
// While error routes handle a refusal these placeholders are set: `{http.rate_limit.zone}`,
// `{http.rate_limit.limit}`, `{http.rate_limit.remaining}`, `{http.rate_limit.reset}`,
// `{http.rate_limit.retry_after}` (seconds), `{http.rate_limit.reason}` (`limited`, `blocked`, `unavailable`,
// `overloaded`) and `{http.rate_limit.exceeded.name}` (the zone again).
type Handler struct {
	// The limits, by name. A zone without any field stands for the shared zone of that name in the
	// `rate_limit` app.
	Zones map[string]*Zone `json:"rate_limits,omitempty"`

	// Where buckets live. Default: what the `rate_limit` app says, or this process.
	Redis *Redis `json:"redis,omitempty"`

	// How many nodes share the limits in Redis: while it does not answer, each of them admits one part in so
	// many. Default: what the `rate_limit` app says, or 1 with a warning.
	Nodes Count `json:"nodes,omitempty"`

	// Whether the nodes are counted in Redis while it answers. Then `nodes` is what holds until it has told, and the least
	// that is believed. Only beside `nodes`.
	NodesAuto bool `json:"nodes_auto,omitempty"`

	// Requests to which nothing of this handler applies: they are neither limited nor shed, and they never
	// wait for Redis. For health checks.
	ExemptRaw caddyhttp.RawMatcherSets `json:"exempt,omitempty" caddy:"namespace=http.matchers"`

	// Blocks for clients that keep running into limits. Default: what the `rate_limit` app says, or none.
	Penalty *Penalty `json:"penalty,omitempty"`

	// The most requests in flight. Default: no bound.
	Shed *Shed `json:"shed,omitempty"`

	// Whether answers carry `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`: `on` (default) or
	// `off`. `Retry-After` does not depend on it.
	Headers string `json:"headers,omitempty"`

	// What `X-RateLimit-Reset` holds: `epoch` (default), the second since 1970 at which the bucket is full, or
	// `delta`, the seconds until then.
	Reset string `json:"reset,omitempty"`

	// How a refusal is answered: `error` returns an error to Caddy, for `handle_errors`; `json` writes our own body;
	// `auto` (default) does the first if an error route matches the request and the second if not.
	// Overload is written directly unless this is `error`. Error routes are those of the server, or of the innermost
	// subroute with `errors` around this handler; if none of a subroute's matches, our own body is written in any case,
	// since the request would go on to the handlers behind the subroute.
	Answer string `json:"answer,omitempty"`

	// Adds up to this part to every Retry-After, never less than the truth: 0.1 adds 0 to 10 %. Between 0 and 1.
	// Default 0.
	Jitter float64 `json:"jitter,omitempty"`

	// Whether logs may hold keys in the clear. Default off: only their hashes.
	LogKey bool `json:"log_key,omitempty"`

	// At which level the log tells of refusals: `off`, `debug`, `info` (default), `warn` or `error`. A client has a line when it is
	// refused for the first time in ten minutes, at most ten clients a second have one, and every ten seconds a line for each zone
	// sums up. Blocks and shedding are told of in any case.
	LogRefusals string `json:"log_refusals,omitempty"`

	// Whether everything is evaluated and nothing refused, in all zones and pools of this handler.
	DryRun bool `json:"dry_run,omitempty"`

	// A request header that tells the backend what a dry run would have refused: a list like `limited;zone="api", overloaded`, absent
	// if it would have refused nothing. What clients write there is removed from every request that meets this handler. Default: none.
	DryRunHeader string `json:"dry_run_header,omitempty"`

	logger    *zap.Logger
	app       *App
	exempt    caddyhttp.MatcherSets
	zones     []*Zone // in the order of their names
	penalty   *Penalty
	pool      *slotPool
	remote    *redisStore // nil without Redis
	limiter   *Limiter
	answers   answerer
	watch     watcher
	journal   *journal
	accessLog bool
	marks     string // the header for marks, empty if there is none
	// release gives back what Provision acquired. What it is about stays usable: requests are served after Cleanup.
	release []func()
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit", New: func() caddy.Module { return new(Handler) }}
}

// Provision implements caddy.Provisioner. It is cheap and needs no network: it also runs when a configuration is only
// validated. What it acquires from the process is state without parameters, so that it changes nothing for the
// configuration that runs.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger, h.watch = ctx.Logger(), watcher{h}
	app, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	h.app = app.(*App)
	if err := h.provisionMarks(); err != nil {
		return err
	}
	if h.exempt, err = loadMatchers(ctx, h, "ExemptRaw", h.ExemptRaw); err != nil {
		return fmt.Errorf("loading matchers of exempt: %w", err)
	}
	if h.answers, err = newAnswerer(h.Answer, h.Headers, h.Reset, h.Jitter); err != nil {
		return err
	}
	h.answers.nested = enclosingErrors(ctx)
	for _, provision := range []func(caddy.Context) error{h.provisionLimiter, h.provisionZones, h.provisionPenalty, h.provisionShed} {
		if err := provision(ctx); err != nil {
			return err
		}
	}
	h.app.handlers = append(h.app.handlers, h)
	if h.journal, err = newJournal(h, processBook); err != nil {
		return err
	}
	h.app.requests, h.accessLog = emitter{ctx, h.logger}, hasAccessLog(ctx)
	h.warn(ctx)
	return nil
}

// Cleanup implements caddy.CleanerUpper. It gives back exactly what Provision acquired, which may be half of it.
func (h *Handler) Cleanup() error {
	for _, release := range h.release {
		release()
	}
	h.release = nil
	return nil
}

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Interface guards.
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
