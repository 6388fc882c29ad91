package ratelimit

import (
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file loads matchers of requests, and asks them.

// loadMatchers loads the matcher sets in a field of a struct. Without any set the result is empty, which Caddy's own
// matching takes for a match of everything: ask it by matchesAny.
func loadMatchers(ctx caddy.Context, owner any, field string, raw caddyhttp.RawMatcherSets) (caddyhttp.MatcherSets, error) {
	if len(raw) == 0 {
		return nil, nil
	}
	loaded, err := ctx.LoadModule(owner, field)
	if err != nil {
		return nil, err
	}
	var sets caddyhttp.MatcherSets
	err = sets.FromInterface(loaded)
	return sets, err
}

// matchesAny says whether one of the sets matches; without sets, nothing does.
func matchesAny(sets caddyhttp.MatcherSets, r *http.Request) (bool, error) {
	if len(sets) == 0 {
		return false, nil
	}
	return sets.AnyMatchWithError(r)
}
