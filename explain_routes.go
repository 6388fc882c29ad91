package ratelimit

import (
	"context"
	"net/http"
	"reflect"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file goes the way of a made-up request along the routes of a server. Of the handlers there, those run that do nothing but
// change the request; those that answer end the way; of the others nobody here can know.

// explanation is a request on its way.
type explanation struct {
	ctx     context.Context // of who asks
	server  *caddyhttp.Server
	request *http.Request
	groups  map[string]struct{}
	// passed is what the request has been through: zones that charge it, and pools of which it has a slot.
	passed progress
	// doubts are handlers of which is not known whether they let the request pass, since the last limit.
	doubts []string
	info   explainInfo
	err    error
}

func newExplanation(ctx context.Context, name string, server *caddyhttp.Server, r *http.Request) *explanation {
	e := &explanation{ctx: ctx, server: server, groups: map[string]struct{}{}}
	e.info = explainInfo{Server: name, Handlers: []explainedHandler{}}
	for header := range r.Header {
		// Caddy drops such names, unless it is told not to.
		if slices.ContainsFunc([]byte(header), func(b byte) bool { return b == '_' || b == '.' }) {
			delete(r.Header, header)
			e.info.Unsure = append(e.info.Unsure, "header "+header+", which Caddy drops unless it is expected")
		}
	}
	e.request = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), unread{}, server)
	return e
}

// unread is where the answer to a made-up request goes.
type unread struct{}

// Header implements http.ResponseWriter.
func (unread) Header() http.Header { return http.Header{} }

// Write implements http.ResponseWriter.
func (unread) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements http.ResponseWriter.
func (unread) WriteHeader(int) {}

func (e *explanation) follow(routes caddyhttp.RouteList) end {
	return follow(routes, e.request, e.groups, e.visit)
}

// role says what a handler does to a request.
type role uint8

const (
	// roleUnknown may do anything.
	roleUnknown role = iota
	// rolePure changes the request, its placeholders and variables, and nothing else: it runs.
	rolePure
	// roleBystander lets every request pass as it is.
	roleBystander
	// roleAnswers lets none pass.
	roleAnswers
)

// roles are those of Caddy's own handlers.
var roles = map[caddy.ModuleID]role{
	"http.handlers.vars":                  rolePure,
	"http.handlers.map":                   rolePure,
	"http.handlers.rewrite":               rolePure,
	"http.handlers.headers":               rolePure,
	"http.handlers.copy_response_headers": roleBystander,
	"http.handlers.encode":                roleBystander,
	"http.handlers.intercept":             roleBystander,
	"http.handlers.log_append":            roleBystander,
	"http.handlers.push":                  roleBystander,
	"http.handlers.request_body":          roleBystander,
	"http.handlers.templates":             roleBystander,
	"http.handlers.timeouts":              roleBystander,
	"http.handlers.tracing":               roleBystander,
	"http.handlers.copy_response":         roleAnswers,
	"http.handlers.error":                 roleAnswers,
	"http.handlers.file_server":           roleAnswers,
	"http.handlers.metrics":               roleAnswers,
	"http.handlers.reverse_proxy":         roleAnswers,
	"http.handlers.static_response":       roleAnswers,
}

// letsPass names the field by which a handler that answers lets requests pass after all: files that are not there, and whom
// forward_auth accepts.
var letsPass = map[caddy.ModuleID]string{
	"http.handlers.file_server":   "PassThru",
	"http.handlers.reverse_proxy": "HandleResponse",
}

func roleOf(id caddy.ModuleID, handler any) role {
	if field, ok := letsPass[id]; ok {
		if value := reflect.Indirect(reflect.ValueOf(handler)).FieldByName(field); !value.IsValid() || !value.IsZero() {
			return roleUnknown
		}
	}
	return roles[id]
}

// visit says what becomes of the request at a handler.
func (e *explanation) visit(handler caddyhttp.MiddlewareHandler) end {
	switch h := handler.(type) {
	case *Handler:
		return e.meet(h)
	case *caddyhttp.Invoke:
		if route, ok := e.server.NamedRoutes[h.Name]; ok {
			return e.follow(caddyhttp.RouteList{*route})
		}
		return endDead
	}
	id := moduleID(handler)
	switch roleOf(id, handler) {
	case roleBystander:
		return endOpen
	case rolePure:
		return e.run(handler)
	case roleAnswers:
		e.info.AnsweredBy = id.Name()
		return endAnswered
	case roleUnknown:
	}
	e.doubts = append(e.doubts, id.Name())
	return endOpen
}

// run lets a handler change the request, which it does in place.
func (e *explanation) run(handler caddyhttp.MiddlewareHandler) end {
	at := endDead
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
		at = endOpen
		return nil
	})
	if err := handler.ServeHTTP(unread{}, e.request, next); err != nil {
		return endDead
	}
	return at
}

// meet asks a limit.
func (e *explanation) meet(h *Handler) end {
	e.info.Unsure = append(e.info.Unsure, e.doubts...)
	e.doubts = nil
	found, err := h.explain(e.ctx, e.request, &e.passed)
	if err != nil {
		e.err = err
		return endDead
	}
	e.info.Handlers = append(e.info.Handlers, found)
	if !found.passes() {
		return endAnswered
	}
	return endOpen
}

// moduleID returns the ID of a handler, empty if it has none.
func moduleID(handler any) caddy.ModuleID {
	if module, ok := handler.(caddy.Module); ok {
		return module.CaddyModule().ID
	}
	return ""
}
