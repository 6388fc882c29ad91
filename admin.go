package ratelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

func init() {
	caddy.RegisterModule(new(adminAPI))
}

// running is the app of the configuration that is served. Routes of the admin endpoint live longer and shorter than
// configurations, so they look here on every request.
var running atomic.Pointer[App]

// adminAPI lets operators see and lift blocks, and see the nodes:
//
//	GET  /rate_limit/blocks    who is blocked, until when
//	GET  /rate_limit/nodes     which processes share the limits, and how many this one reckons with
//	POST /rate_limit/unblock   {"id": "…"} as listed, or {"zone": "login", "key": "203.0.113.7"}: forgets the strikes
type adminAPI struct{}

// CaddyModule returns the Caddy module information.
func (*adminAPI) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "admin.api.rate_limit", New: func() caddy.Module { return new(adminAPI) }}
}

// Routes implements caddy.AdminRouter.
func (*adminAPI) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: "/rate_limit/blocks", Handler: adminRoute(http.MethodGet, listBlocks)},
		{Pattern: "/rate_limit/nodes", Handler: adminRoute(http.MethodGet, listNodes)},
		{Pattern: "/rate_limit/unblock", Handler: adminRoute(http.MethodPost, unblock)},
	}
}

// Bounds of a request to the admin endpoint.
const (
	maxAdminBody = 64 << 10
	adminTimeout = 5 * time.Second
)

// adminRoute answers one method with what the function returns, as JSON.
func adminRoute(method string, answer func(context.Context, *App, *http.Request) (any, error)) caddy.AdminHandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) error {
		if r.Method != method {
			w.Header().Set("Allow", method)
			return adminError(http.StatusMethodNotAllowed, "use %s", method)
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

func adminError(status int, format string, args ...any) error {
	return caddy.APIError{HTTPStatus: status, Err: fmt.Errorf(format, args...)}
}

func listBlocks(ctx context.Context, a *App, _ *http.Request) (any, error) {
	list := []blockInfo{}
	add := func(store string, blocks []knownBlock) {
		for _, b := range blocks {
			list = append(list, blockInfo{
				ID: b.id.String(), Group: b.group, Key: b.plain, Until: wall(b.until), Store: store,
			})
		}
	}
	add("memory", a.stores.local.blocks(processMicros()))
	for _, s := range a.remotes {
		blocks, err := s.blocks(ctx)
		if err != nil {
			return nil, adminError(http.StatusServiceUnavailable, "%w", err)
		}
		add("redis", blocks)
	}
	slices.SortFunc(list, func(x, y blockInfo) int { return x.Until.Compare(y.Until) })
	return list, nil
}

// nodesInfo is what one Redis tells about the nodes, for a configuration with `nodes auto`.
type nodesInfo struct {
	// Redis and Prefix say where the nodes announce themselves.
	Redis  string `json:"redis"`
	Prefix string `json:"prefix"`
	// Count is how many nodes this one believes there are; 0 until Redis has told. Handlers with a larger `nodes` use that.
	Count int64 `json:"count"`
	// Reachable says whether Redis has just answered; Nodes is empty if not.
	Reachable bool       `json:"reachable"`
	Nodes     []nodeInfo `json:"nodes"`
}

func listNodes(ctx context.Context, a *App, _ *http.Request) (any, error) {
	list := []nodesInfo{}
	for _, s := range a.remotes {
		if !s.counted {
			continue
		}
		info := nodesInfo{Redis: s.client.settings.String(), Prefix: s.prefix, Nodes: []nodeInfo{}}
		// That Redis does not answer is what somebody may want to know who asks.
		if nodes, err := s.nodes(ctx); err == nil {
			info.Nodes, info.Reachable = nodes, true
		}
		info.Count = s.client.census.believed.Load()
		slices.SortFunc(info.Nodes, func(x, y nodeInfo) int { return strings.Compare(x.ID, y.ID) })
		list = append(list, info)
	}
	return list, nil
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

func unblock(ctx context.Context, a *App, r *http.Request) (any, error) {
	var request unblockRequest
	decoder := json.NewDecoder(r.Body)
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&request); err != nil {
		return nil, adminError(http.StatusBadRequest, `reading the request: %w; write {"id": "…"} or {"zone": "…", "key": "…"}`, err)
	}
	id, err := a.identify(request)
	if err != nil {
		return nil, adminError(http.StatusBadRequest, "%w", err)
	}
	forgotten, err := a.unblock(ctx, id, request.Group)
	if err != nil {
		return nil, adminError(http.StatusServiceUnavailable, "%w", err)
	}
	result := unblockResult{ID: id.String(), Forgotten: forgotten}
	a.logger.Info("unblocked", zap.Stringer("id", id), zap.Int("forgotten", forgotten))
	return result, nil
}

func (a *App) identify(request unblockRequest) (ID, error) {
	switch {
	case request.ID != "" && request.Zone == "" && len(request.Key) == 0:
		return parseID(request.ID)
	case request.ID == "" && request.Zone != "" && len(request.Key) > 0:
		z, ok := a.zones[request.Zone]
		if !ok {
			return ID{}, fmt.Errorf("there is no zone %q (zones: %s)", request.Zone, strings.Join(sortedNames(a.zones), ", "))
		}
		return z.key.identityOf(request.Key, a.hasher)
	}
	return ID{}, errors.New("name either an id, or a zone and a key")
}

// unblock forgets the strikes of an identity in one group or in all, in every store, and what this node remembers of them.
func (a *App) unblock(ctx context.Context, id ID, group *string) (forgotten int, err error) {
	for name := range a.penalties {
		if group != nil && *group != name {
			continue
		}
		rules := &a.penalties[name].rules
		name = rules.group
		if a.stores.local.unblock(processMicros(), id, rules) {
			forgotten++
		}
		for _, s := range a.remotes {
			done, err := s.unblock(ctx, id, name, 0)
			if err != nil {
				return forgotten, err
			}
			if done.had {
				forgotten++
			}
			s.told.blocks.set(processMicros(), id, name, heardBlock{}, int(a.MaxKeys))
		}
	}
	return forgotten, nil
}

// Interface guards.
var _ caddy.AdminRouter = (*adminAPI)(nil)
