package ratelimit

// This file knows what a name means elsewhere in a Caddyfile: zones, penalty groups and pools are one thing wherever they
// are named, so two definitions must agree. Named routes have a state of their own, and JSON has none: what differs there
// shows at Provision.

import (
	"runtime"
	"strings"
	"sync"
	"weak"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// definition is the first definition of a name.
type definition[T any] struct {
	it    T
	place string
}

// define notes a definition of what b is about. One that is not as the first is an error that names both places.
func define[T interface{ differs(T) []string }](b blockReader, it T, remedy string) error {
	first, defined := firstDefinition[T](b)
	if !defined {
		b.State[stateKey(b)] = definition[T]{it, b.place()}
		return nil
	}
	if fields := it.differs(first.it); len(fields) > 0 {
		return b.errorf("differs in %s from the definition at %s: %s", strings.Join(fields, ", "), first.place, remedy)
	}
	return nil
}

func firstDefinition[T any](b blockReader) (definition[T], bool) {
	if b.shared != nil {
		if first, defined := b.shared.state[stateKey(b)].(definition[T]); defined {
			return first, true
		}
	}
	first, defined := b.State[stateKey(b)].(definition[T])
	return first, defined
}

func stateKey(b blockReader) string { return "rate_limit: " + b.subject }

// globalOption is what the global option held, and its definitions with their places.
type globalOption struct {
	app   *App
	state map[string]any
}

// globalOptions leads from the JSON of a global option back to what it was made of. httpcaddyfile hands nothing but the JSON
// on to the directives, and JSON has no places. An entry goes with its JSON, after the adaptation.
var globalOptions sync.Map // weak.Pointer[byte] → *globalOption

func rememberGlobalOption(value []byte, option *globalOption) {
	id := weak.Make(&value[0])
	globalOptions.Store(id, option)
	runtime.AddCleanup(&value[0], func(id weak.Pointer[byte]) { globalOptions.Delete(id) }, id)
}

// globalOptionOf returns the global option of the Caddyfile that is read, or nil.
func globalOptionOf(h httpcaddyfile.Helper) *globalOption {
	app, ok := h.Option("rate_limit").(httpcaddyfile.App)
	if !ok {
		return nil
	}
	option, _ := globalOptions.Load(weak.Make(&app.Value[0]))
	found, _ := option.(*globalOption)
	return found
}
