package ratelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(new(adminAPI))
}

// running is the app of the configuration that is served. Routes of the admin endpoint live longer and shorter than
// configurations, so they look here on every request.
var running atomic.Pointer[App]

// adminAPI is what operators see and change. docs/admin.md describes every route; admin_types.go is what they take and return.
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (*adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.rate_limit", New: func() caddy.Module { return new(adminAPI) }}
}

// adminAnswer answers a request to the admin endpoint with what becomes JSON.
type adminAnswer func(context.Context, *App, *http.Request) (any, error)

// adminRoutes holds the answers by path and method. What names a client by its key is a POST: paths are logged.
func adminRoutes() map[string]map[string]adminAnswer {
	return map[string]map[string]adminAnswer{
		"status":   {http.MethodGet: showStatus},
		"zones":    {http.MethodGet: listZones},
		"nodes":    {http.MethodGet: listNodes},
		"blocks":   {http.MethodGet: listBlocks},
		"block":    {http.MethodPost: blockClient},
		"unblock":  {http.MethodPost: unblockClient},
		"inspect":  {http.MethodPost: inspect},
		"explain":  {http.MethodPost: explain},
		"reset":    {http.MethodPost: resetBucket},
		"top":      {http.MethodGet: showTop},
		"override": {http.MethodGet: listOverrides, http.MethodPost: setOverride, http.MethodDelete: endOverride},
	}
}

// Provision implements caddy.Provisioner. When a configuration is rejected, Caddy's endpoint goes on with its registry, in which the
// app may never have come to register anything.
func (*adminAPI) Provision(ctx caddy.Context) error {
	registerMetrics(ctx, ctx.Logger())
	return nil
}

// Routes implements caddy.AdminRouter. They are routes like Caddy's own: its checks of hosts, origins and permissions come first.
func (*adminAPI) Routes() (routes []caddy.AdminRoute) {
	for path, methods := range adminRoutes() {
		routes = append(routes, caddy.AdminRoute{Pattern: "/rate_limit/" + path, Handler: adminHandler(methods)})
	}
	return routes
}

// Bounds of a request to the admin endpoint.
const (
	maxAdminBody = 64 << 10
	adminTimeout = 5 * time.Second
)

// adminHandler answers the methods of one path: it holds what is the same for all of them.
func adminHandler(methods map[string]adminAnswer) caddy.AdminHandlerFunc {
	allowed := strings.Join(sortedNames(methods), ", ")
	return func(w http.ResponseWriter, r *http.Request) error {
		answer, ok := methods[r.Method]
		if !ok {
			w.Header().Set("Allow", allowed)
			return adminError(http.StatusMethodNotAllowed, "use %s", allowed)
		}
		if err := checkContentType(r); err != nil {
			return err
		}
		app := running.Load()
		if app == nil {
			return adminError(http.StatusNotFound, "no rate_limit in the configuration that is served")
		}
		ctx, cancel := context.WithTimeout(r.Context(), adminTimeout)
		defer cancel()
		r.Body = http.MaxBytesReader(w, r.Body, maxAdminBody)
		result, err := answer(ctx, app, r)
		if err != nil {
			return err
		}
		w.Header().Set("Content-Type", "application/json")
		return json.NewEncoder(w).Encode(result)
	}
}

// checkContentType refuses what the page of another site could make a browser send without asking: a POST with a body of text.
// For JSON, and for the other methods that change something, browsers ask first, and Caddy says no.
func checkContentType(r *http.Request) error {
	if r.Method != http.MethodPost {
		return nil
	}
	given := r.Header.Get("Content-Type")
	if media, _, err := mime.ParseMediaType(given); err != nil || media != "application/json" {
		return adminError(http.StatusUnsupportedMediaType, "the Content-Type must be application/json, got %q", given)
	}
	return nil
}

// readRequest reads the body of a request: one JSON value, in which nothing is unknown. like shows what would be right.
func readRequest[T any](r *http.Request, like string) (request T, err error) {
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	err = decoder.Decode(&request)
	switch {
	case errors.Is(err, io.EOF):
		err = errors.New("there is no body")
	case err == nil:
		if _, more := decoder.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("there is more than one JSON value")
		}
	}
	if err != nil {
		return request, adminError(http.StatusBadRequest, "reading the request: %w; write %s", err, like)
	}
	return request, nil
}

// query returns the parameters of a request, of which there may be no others than these, each once.
func query(r *http.Request, names ...string) (map[string]string, error) {
	values, found := r.URL.Query(), map[string]string{}
	for _, name := range sortedNames(values) {
		if !slices.Contains(names, name) || len(values[name]) > 1 {
			return nil, adminError(http.StatusBadRequest, "the parameter %q is unknown or repeated (known: %s)", name, strings.Join(names, ", "))
		}
		found[name] = values[name][0]
	}
	return found, nil
}

func adminError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

// words is a list of texts; one alone need not be written as a list.
type words []string

// UnmarshalJSON implements json.Unmarshaler.
func (w *words) UnmarshalJSON(raw []byte) error {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		*w = words{one}
		return nil
	}
	return json.Unmarshal(raw, (*[]string)(w))
}

// zone returns the zone of a name, as the first definition of it has it.
func (a *App) zone(name string) (*Zone, error) {
	z, ok := a.zones[name]
	if !ok {
		return nil, adminError(http.StatusNotFound, "there is no zone %q (zones: %s)", name, strings.Join(sortedNames(a.zones), ", "))
	}
	return z, nil
}

// zoneInUse returns the zone of a name and the first handler that has it.
func (a *App) zoneInUse(name string) (*Handler, *Zone, error) {
	if _, err := a.zone(name); err != nil {
		return nil, nil, err
	}
	for _, h := range a.handlers {
		if z := h.zone(name); z != nil {
			return h, z, nil
		}
	}
	return nil, nil, adminError(http.StatusConflict, "no handler uses the zone %q: name it in a rate_limit block", name)
}

// identify finds the identity that an operator names: by id, or by a zone and the values of its key.
func (a *App) identify(w who) (ID, error) {
	switch {
	case w.ID != "" && w.Zone == "" && len(w.Key) == 0:
		return identityNamed(w.ID)
	case w.ID == "" && w.Zone != "" && len(w.Key) > 0:
		return a.identifyIn(w)
	}
	return ID{}, adminError(http.StatusBadRequest, "name either an id, or a zone and a key")
}

// identifyIn finds the identity in a zone that an operator names: by id, or by the values of its key.
func (a *App) identifyIn(w who) (ID, error) {
	z, err := a.zone(w.Zone)
	if err != nil {
		return ID{}, err
	}
	switch {
	case w.ID != "" && len(w.Key) == 0:
		return identityNamed(w.ID)
	case w.ID == "" && len(w.Key) > 0:
		id, err := z.key.identityOf(w.Key, a.hasher)
		if err != nil {
			return ID{}, unknownClient(fmt.Errorf("zone %q: %w", w.Zone, err))
		}
		return id, nil
	}
	return ID{}, adminError(http.StatusBadRequest, "name a zone, and either an id or a key")
}

func identityNamed(text string) (ID, error) {
	id, err := parseID(text)
	if err != nil {
		return ID{}, unknownClient(err)
	}
	return id, nil
}

// unknownClient is the answer to who names a client in a wrong way. What was found goes to him, and not to the log: it may be the
// key of a client, in the wrong place.
func unknownClient(err error) error {
	return caddy.APIError{
		HTTPStatus: http.StatusBadRequest, Message: err.Error(),
		Err: errors.New("the client of a rate_limit request is named in a wrong way"),
	}
}

// Interface guards.
var (
	_ caddy.Provisioner = (*adminAPI)(nil)
	_ caddy.AdminRouter = (*adminAPI)(nil)
)
