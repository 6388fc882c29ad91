// Package ratelimit is a Caddy HTTP handler that limits requests, exactly and across many nodes.
//
// The files, in the order of a request's way through them:
//
//	module.go     the handler's configuration and life
//	app.go        what the handlers of one configuration share
//	caddyfile.go  the directive and the global option
//	handler.go    a request's way
//	zone.go       one limit: which requests, which key, which cost
//	key.go        a key expression: template, grouping of addresses, hash
//	store.go      the contract between limits and the places where buckets live
//	take.go       the decision about all charges of a request; bucket.lua does the same in Redis
//	bucket.go     the arithmetic of a token bucket
//	penalty.go    strikes and blocks
//	memory.go     the store in this process
//	redis.go      the store in Redis
//	fallback.go   which store decides, and what holds while Redis does not answer
//	breaker.go    whether Redis is worth a try
//	shed.go       slots for requests in flight
//	headers.go    the answers
//	errorflow.go  whether error routes answer instead
package ratelimit

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
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
	Nodes int `json:"nodes,omitempty"`

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

	// Whether everything is evaluated and nothing refused, in all zones and pools of this handler.
	DryRun bool `json:"dry_run,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit", New: func() caddy.Module { return new(Handler) }}
}
