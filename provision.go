package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/caddyserver/caddy/v2"
)

// This file makes the parts of a handler when a configuration loads: its limiter, zones, penalty and pool.

func (h *Handler) provisionZones(ctx caddy.Context) error {
	if len(h.Zones) > maxZones {
		return fmt.Errorf("rate_limits: a handler has at most %d zones, got %d: spread them over several", maxZones, len(h.Zones))
	}
	for _, name := range sortedNames(h.Zones) {
		z := h.Zones[name]
		if z.isReference() {
			shared, ok := h.app.Zones[name]
			if !ok {
				return fmt.Errorf("zone %q: it has no rate, and there is no shared zone of that name (shared zones: %v)", name, sortedNames(h.app.Zones))
			}
			z = shared
		} else if err := z.provision(ctx, name); err != nil {
			return err
		}
		if err := h.app.claimZone(z, h.placeOf(z)); err != nil {
			return err
		}
		h.zones = append(h.zones, z)
	}
	return nil
}

// placeOf says where the buckets of a zone are, and whether they are only tried.
func (h *Handler) placeOf(z *Zone) string {
	place := "memory"
	if !h.isLocal(z) {
		place = "redis " + h.remote.client.settings.String()
	}
	if h.DryRun || z.DryRun {
		place += " as a dry run"
	}
	return place
}

func (h *Handler) provisionPenalty(ctx caddy.Context) error {
	h.penalty = h.app.Penalty
	if h.Penalty != nil {
		h.penalty = h.Penalty
		if err := h.penalty.provision(ctx); err != nil {
			return err
		}
	}
	if h.penalty == nil {
		return nil
	}
	return h.app.claimPenalty(h.penalty)
}

func (h *Handler) provisionShed(caddy.Context) (err error) {
	if h.Shed == nil {
		return nil
	}
	if err := h.Shed.provision(); err != nil {
		return err
	}
	if err := h.app.claimPool(h.Shed); err != nil {
		return err
	}
	if h.pool, err = acquirePool(h.Shed.Pool); err != nil {
		return err
	}
	h.release = append(h.release, func() { releasePool(h.Shed.Pool) })
	return nil
}

func (h *Handler) provisionLimiter(caddy.Context) error {
	if err := checkNodes(h.Nodes, h.NodesAuto); err != nil {
		return err
	}
	nodes := int64(cmp.Or(h.Nodes, h.app.Nodes, 1))
	h.limiter = &Limiter{
		local: h.app.stores.local, shares: h.app.stores.shares,
		nodes: func() int64 { return nodes }, maxKeys: int(h.app.MaxKeys), now: processMicros,
	}
	server := h.redisConfig()
	if server == nil || server.Off {
		return nil
	}
	settings, err := server.settings()
	if err != nil {
		return err
	}
	settings.prefix = h.app.Prefix
	client, err := acquireRedis(settings)
	if err != nil {
		return err
	}
	h.release = append(h.release, func() { releaseRedis(client) })
	if h.remote, err = h.app.remote(client); err != nil {
		return err
	}
	told := h.remote.told
	h.limiter.remote, h.limiter.known, h.limiter.refusals, h.limiter.leases = h.remote, told.blocks, told.refusals, told.leases
	if h.countsNodes() {
		h.remote.counted = true
		h.limiter.nodes = func() int64 { return client.census.nodes(nodes) }
	}
	return nil
}

// countsNodes says whether the nodes are counted: whoever says how many there are at least also says that.
func (h *Handler) countsNodes() bool { return h.NodesAuto || h.Nodes == 0 && h.app.NodesAuto }

// checkNodes holds the number of nodes in what shares can be calculated with; 0 is none given.
func checkNodes(nodes Count, auto bool) error {
	if auto && nodes == 0 {
		return errors.New("nodes_auto: needs nodes beside it, the number that holds until Redis has told, and the least that is believed")
	}
	if nodes > math.MaxInt32 {
		return fmt.Errorf("nodes: must be from 1 to %d, got %d", math.MaxInt32, nodes)
	}
	return nil
}

// redisConfig returns what says where the buckets of the handler live, nil if nothing does.
func (h *Handler) redisConfig() *Redis {
	if h.Redis != nil {
		return h.Redis
	}
	return h.app.Redis
}
