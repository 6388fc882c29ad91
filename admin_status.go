package ratelimit

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file shows what this node does, for GET /rate_limit/status and /rate_limit/zones. It asks nobody: what it shows is there.

func showStatus(_ context.Context, a *App, _ *http.Request) (any, error) {
	info := statusInfo{
		Version: moduleVersion(), Stores: []storeInfo{}, Memory: a.memoryInfo(), Pools: a.poolsInfo(),
		Overrides: overridesShown(), Zones: a.zonesInfo(),
	}
	for _, s := range a.remotes {
		if s.counted {
			info.Node = processID
		}
		info.Stores = append(info.Stores, a.storeInfo(s))
	}
	return info, nil
}

func listZones(_ context.Context, a *App, _ *http.Request) (any, error) {
	return zonesInfo{Zones: a.zonesInfo()}, nil
}

// storeInfo says what is known of a Redis.
func (a *App) storeInfo(s *redisStore) storeInfo {
	info := storeInfo{Redis: s.client.settings.String(), Prefix: s.prefix, Up: true, Counted: s.counted, Nodes: 1}
	for _, h := range a.handlers {
		if h.remote == s {
			info.Nodes = max(info.Nodes, h.limiter.nodes())
		}
	}
	info.Share = 1 / float64(info.Nodes)
	for _, server := range s.client.servers() {
		info.Up = info.Up && server.State == serverUp
		info.Servers = append(info.Servers, server)
	}
	return info
}

// What a server can be.
const (
	serverUp         = "up"
	serverDown       = "down"
	serverConnecting = "connecting"
)

// servers says what is known of each server.
func (c *redisClient) servers() []serverInfo {
	w := c.enter()
	defer c.leave(1)
	list := []serverInfo{}
	for _, e := range w.servers() {
		list = append(list, e.info())
	}
	slices.SortFunc(list, func(x, y serverInfo) int { return strings.Compare(x.Server, y.Server) })
	return list
}

func (e *endpoint) info() serverInfo {
	down, since := e.breaker.state()
	e.mu.Lock()
	connecting, next := e.connecting, e.nextProbe
	e.mu.Unlock()
	info := serverInfo{Server: e.name, State: serverUp}
	switch {
	case connecting:
		info.State = serverConnecting
	case down:
		at := wall(since)
		info.State, info.Since = serverDown, &at
	}
	if down && next.After(time.Now()) {
		next = next.UTC()
		info.NextProbe = &next
	}
	return info
}

// memoryInfo counts what this process keeps: for itself, and in place of a store that is down.
func (a *App) memoryInfo() memoryInfo {
	info := memoryInfo{MaxKeys: int64(a.MaxKeys), KnownBlocks: a.knownBlocks()}
	for _, m := range []*memoryStore{a.stores.local, a.stores.shares} {
		buckets, records := m.len()
		info.Buckets, info.Strikes, info.Evicted = info.Buckets+buckets, info.Strikes+records, info.Evicted+m.evicted()
	}
	return info
}

func (a *App) poolsInfo() []poolInfo {
	list := []poolInfo{}
	for _, name := range sortedNames(a.pools) {
		for _, h := range a.handlers {
			if h.pool != nil && h.Shed.Pool == name {
				list = append(list, poolInfo{Pool: name, InFlight: h.pool.inFlight(), MaxInFlight: int64(h.Shed.MaxInFlight)})
				break
			}
		}
	}
	return list
}

func (a *App) zonesInfo() []zoneInfo {
	list, held := []zoneInfo{}, map[string]string{}
	for _, o := range overridesShown() {
		held[o.Zone] = o.Action
	}
	for _, name := range sortedNames(a.zones) {
		info := a.zoneInfo(name)
		info.Override = held[name]
		list = append(list, info)
	}
	return list
}

// zoneInfo says what holds for a zone on this node: what its handlers agree about, by the first of them.
func (a *App) zoneInfo(name string) zoneInfo {
	z := a.zones[name]
	info := zoneInfo{Zone: name, Key: z.shownKey(), Rate: z.Rate.String(), Burst: z.burst()}
	info.Requests, info.Refused, info.WouldDeny = a.zoneCounts(name)
	for _, h := range a.handlers {
		if z := h.zone(name); z != nil {
			h.describe(z, &info)
		}
	}
	return info
}

// describe adds what a handler knows about one of its zones.
func (h *Handler) describe(z *Zone, info *zoneInfo) {
	info.DryRun = info.DryRun || h.DryRun || z.DryRun
	if h.penalty != nil && z.punishes() {
		info.Penalty = &h.penalty.Group
	}
	if h.isLocal(z) {
		info.Store = SourceMemory.String()
		return
	}
	switch {
	case len(z.sensitive) > 0:
		info.OnStoreError = "sensitive"
	case info.OnStoreError == "":
		info.OnStoreError = z.charge.OnStoreError.String()
	}
	if info.Store == "" {
		info.Store = SourceRedis.String()
		nodes := h.limiter.nodes()
		info.ShareRate = z.Rate.shared(nodes)
		info.ShareBurst = z.charge.Limit.share(nodes, z.charge.Floor).Burst / Token
	}
}

// shownKey returns the key as it is written in a Caddyfile.
func (z *Zone) shownKey() string { return strings.ReplaceAll(z.fullKey(), clientIPKey, "{client_ip}") }

// shared returns one of so many parts of a rate as people write it.
func (r Rate) shared(nodes int64) string {
	_, unit, _ := strings.Cut(r.text, "/")
	return shortNumber(r.count/float64(nodes)) + "/" + unit
}

// shortNumber writes a number with six digits that count at most.
func shortNumber(n float64) string {
	if n == 0 {
		return "0"
	}
	digits := math.Pow(10, 5-math.Floor(math.Log10(math.Abs(n))))
	return strconv.FormatFloat(math.Round(n*digits)/digits, 'f', -1, 64)
}
