package ratelimit

import (
	"context"
	"maps"
	"net/http"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file answers one question: if this error were returned to Caddy now, would an error route answer it?
//
// A route answers if it matches and has a handler that is no subroute, whatever that handler then does. Routes are
// followed as Caddy does it: the first of a group, nothing behind a terminal one. A matcher that fails ends the search
// with no, since Caddy would then send an empty answer. Two things cannot be seen from here: the body of the request,
// which matchers find empty, and that this handler stands in a named route which a subroute with error routes invokes.

// errorFlow is where an error of this handler goes.
type errorFlow struct {
	routes caddyhttp.RouteList
	server *caddyhttp.Server
	// nested says that the routes are those of a subroute. It takes every error, and where none of its error routes
	// matches, the request goes on to the handlers behind the subroute: a refused request would get through.
	nested bool
}

// errorFlow returns where an error goes that is returned now.
func (a *answerer) errorFlow(r *http.Request) errorFlow {
	server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	switch {
	case a.nested != nil:
		return errorFlow{routes: a.nested.Routes, server: server, nested: true}
	case server != nil && server.Errors != nil:
		return errorFlow{routes: server.Errors.Routes, server: server}
	}
	return errorFlow{}
}

// passes says whether the error would meet no error route, as far as that can be told without a closer look: most
// requests need none, since their server has no error routes, or only those of other sites.
func (f errorFlow) passes(r *http.Request) bool {
	for i := range f.routes {
		if !isForOthers(f.routes[i].MatcherSets, r) {
			return false
		}
	}
	return true
}

// isForOthers says whether each of the matcher sets is for another host.
func isForOthers(sets caddyhttp.MatcherSets, r *http.Request) bool {
	for _, set := range sets {
		isOther := func(matcher any) bool {
			host, ok := matcher.(*caddyhttp.MatchHost)
			if !ok {
				return false
			}
			matched, err := host.MatchWithError(r)
			return err == nil && !matched
		}
		if !slices.ContainsFunc(set, isOther) {
			return false
		}
	}
	return len(sets) > 0
}

// enclosingErrors returns the error routes of the innermost subroute that has some around the module that ctx
// provisions. A Caddyfile makes no such subroutes.
func enclosingErrors(ctx caddy.Context) *caddyhttp.HTTPErrorConfig {
	for _, module := range slices.Backward(ctx.Modules()) {
		if sub, ok := module.(*caddyhttp.Subroute); ok && sub.Errors != nil {
			return sub.Errors
		}
	}
	return nil
}

// view returns the request as error routes would see it. Nothing that matchers do to it reaches the request itself,
// which may yet be answered without an error: it has its own placeholders, on top of the real ones, and its own
// variables.
func (f errorFlow) view(w http.ResponseWriter, r *http.Request, err error, placeholders caddy.ReplacerFunc) *http.Request {
	ctx := r.Context()
	v := r.WithContext(ctx)
	original := ctx.Value(caddyhttp.OriginalRequestCtxKey)
	if o, ok := original.(http.Request); ok && !f.nested {
		// The server undoes rewrites before its error routes; a subroute does not.
		v.Method, v.RemoteAddr, v.RequestURI, v.URL = o.Method, o.RemoteAddr, o.RequestURI, o.URL
	}
	url := *v.URL
	v.URL = &url
	v.Body = http.NoBody // reading the real one would use it up, and cost memory for each refusal

	repl := caddy.NewEmptyReplacer()
	v = caddyhttp.PrepareRequest(v, repl, w, f.server)
	repl.Map(placeholders)
	if live, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(live.Get)
	}
	copyMap[any](v.Context(), ctx, caddyhttp.VarsCtxKey)
	copyMap[struct{}](v.Context(), ctx, routeGroups)
	// Placeholders hold on to v, so it gets its context in place.
	*v = *v.WithContext(context.WithValue(v.Context(), caddyhttp.OriginalRequestCtxKey, original))
	return new(caddyhttp.HTTPErrorConfig).WithError(v, err)
}

// routeGroups is where Caddy notes the groups of which a request has passed a route.
const routeGroups = caddy.CtxKey("route_group")

// copyMap fills the map that one context holds with what is in that of another.
func copyMap[V any](to, from context.Context, key caddy.CtxKey) {
	dst, ok := to.Value(key).(map[string]V)
	src, there := from.Value(key).(map[string]V)
	if ok && there {
		maps.Copy(dst, src)
	}
}

// answers says whether an error route answers the request of a view.
func (f errorFlow) answers(view *http.Request) bool {
	groups, ok := view.Context().Value(routeGroups).(map[string]struct{})
	if !ok {
		groups = map[string]struct{}{}
	}
	return follow(f.routes, view, groups, answersAlways) == endAnswered
}

// answersAlways takes every handler for one that answers.
func answersAlways(caddyhttp.MiddlewareHandler) end { return endAnswered }

// end is how a way through routes ends.
type end uint8

const (
	// endOpen goes on to what comes behind the routes.
	endOpen end = iota
	// endAnswered reaches a handler.
	endAnswered
	// endDead reaches nothing: a terminal route without a handler, or a matcher that fails.
	endDead
)

// follow goes the way of a request through routes. visit says what becomes of it at a handler that is no subroute.
func follow(routes caddyhttp.RouteList, r *http.Request, groups map[string]struct{}, visit func(caddyhttp.MiddlewareHandler) end) end {
	for i := range routes {
		route := &routes[i]
		if _, passed := groups[route.Group]; passed {
			continue
		}
		matched, err := route.MatcherSets.AnyMatchWithError(r)
		if err != nil {
			return endDead
		}
		if !matched {
			continue
		}
		if route.Group != "" {
			groups[route.Group] = struct{}{}
		}
		for _, handler := range route.Handlers {
			var e end
			if sub, ok := handler.(*caddyhttp.Subroute); ok {
				e = follow(sub.Routes, r, groups, visit)
			} else {
				e = visit(handler)
			}
			if e != endOpen {
				return e
			}
		}
		if route.Terminal {
			return endDead
		}
	}
	return endOpen
}
