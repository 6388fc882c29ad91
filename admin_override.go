package ratelimit

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

// This file lets operators override what this node does about a zone while its store is down.

func listOverrides(context.Context, *App, *http.Request) (any, error) {
	return overridesInfo{Overrides: overridesShown()}, nil
}

func setOverride(_ context.Context, a *App, r *http.Request) (any, error) {
	request, err := readRequest[overrideRequest](r, `{"zone": "…", "action": "local", "deny" or "allow", "for": "30m"}`)
	if err != nil {
		return nil, err
	}
	if _, known := overrideActions[request.Action]; !known {
		return nil, adminError(http.StatusBadRequest, "action must be %s, got %q", strings.Join(sortedNames(overrideActions), ", "), request.Action)
	}
	length, err := readDuration("for", request.For, maxOverride)
	if err != nil {
		return nil, err
	}
	h, z, err := a.zoneInUse(request.Zone)
	if err != nil {
		return nil, err
	}
	if h.isLocal(z) {
		return nil, adminError(http.StatusConflict, "the buckets of zone %q are in this process, which is never down: there is nothing to override", request.Zone)
	}
	info := overrides.set(processMicros(), request.Zone, request.Action, length)
	a.logger.Warn("override set", zap.String("zone", info.Zone), zap.String("action", info.Action),
		zap.Duration("duration", length), zap.Time("until", info.Until))
	return info, nil
}

// endOverride also ends that of a zone which the configuration has lost since.
func endOverride(_ context.Context, a *App, r *http.Request) (any, error) {
	given, err := query(r, "zone")
	if err != nil {
		return nil, err
	}
	info, held := overrides.end(processMicros(), given["zone"])
	if !held {
		return nil, adminError(http.StatusNotFound, "there is no override of a zone %q", given["zone"])
	}
	a.logger.Info("override ended", zap.String("zone", info.Zone), zap.String("action", info.Action), zap.String("why", "an operator ended it"))
	return info, nil
}

// readDuration reads a duration above 0 and at most as long as most.
func readDuration(field, text string, most time.Duration) (time.Duration, error) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d < time.Millisecond || d > most {
		return 0, adminError(http.StatusBadRequest, "%s must be a duration above 0 and at most %s, like 90s or 30m, got %q", field, most, text)
	}
	return d, nil
}
