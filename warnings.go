package ratelimit

import (
	"reflect"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
)

// This file says, once at load, what is legal but is usually a mistake, and what to write instead.

// warnOnce logs a warning unless this configuration has had the same one.
func (a *App) warnOnce(message string, fields ...zap.Field) {
	if a.warned[message] {
		return
	}
	a.warned[message] = true
	a.logger.Warn(message, fields...)
}

// warn looks at a handler that is provisioned.
func (h *Handler) warn(ctx caddy.Context) {
	h.warnAboutRedis()
	h.warnAboutProxies(ctx)
	h.warnAboutExempt()
	h.warnAboutKeys()
	for _, z := range h.zones {
		h.warnAboutSensitive(z)
	}
}

func (h *Handler) warnAboutRedis() {
	if h.remote == nil {
		if h.redisConfig() == nil && h.countsNodes() {
			h.app.warnOnce("nodes auto counts in Redis, but buckets live in this process; name a redis, or write redis off if that is meant")
		}
		return
	}
	if h.Nodes == 0 && h.app.Nodes == 0 {
		h.app.warnOnce("nodes is not set: while Redis is down, every node admits the whole limit; write nodes <n> with the number of nodes, or nodes auto <n>")
	}
	if h.app.KeySecret == "" {
		h.app.warnOnce("key_secret is not set: who reads Redis finds the IPv4 addresses behind hashed identities by trying all; write key_secret {env.…}, the same on all nodes")
	}
	if secrets := h.redisConfig().openSecrets(); len(secrets) > 0 {
		h.app.warnOnce("secrets of Redis stand in the configuration, which the admin endpoint shows: " + strings.Join(secrets, ", ") + "; write {env.…} or {file.…} in their place")
	}
}

// warnAboutProxies: without strict, Caddy takes the left-most forwarded address, which the client has written.
func (h *Handler) warnAboutProxies(ctx caddy.Context) {
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if ok && trustsProxies(server) && server.TrustedProxiesStrict == 0 {
		h.app.warnOnce("trusted_proxies without trusted_proxies_strict: the left-most forwarded address counts, so a client can pick a fresh bucket for each request, or somebody else's; add trusted_proxies_strict")
	}
}

// trustsProxies says whether a server has trusted_proxies. Caddy empties the raw field once the module is loaded, and what it
// loaded is not exported; in a version that names it differently, the warning is missing.
func trustsProxies(server *caddyhttp.Server) bool {
	loaded := reflect.ValueOf(server).Elem().FieldByName("trustedProxies")
	return server.TrustedProxiesRaw != nil || loaded.Kind() == reflect.Interface && !loaded.IsNil()
}

// warnAboutExempt: PHP and others run /x.php for /x.php/a.css.
func (h *Handler) warnAboutExempt() {
	for _, path := range pathsOf(h.exempt) {
		if strings.HasPrefix(path, "*") {
			h.app.warnOnce("exempt matches a suffix, which reaches scripts too (/login.php/x.css); write the folder instead, like /assets/*", zap.String("path", path))
		}
	}
}

// warnAboutKeys: whoever invents such keys has a fresh bucket for each.
func (h *Handler) warnAboutKeys() {
	for _, z := range h.zones {
		if z.key.holdsAddress() && !z.key.clientVaries() {
			return
		}
	}
	for _, z := range h.zones {
		if z.key.clientVaries() {
			h.app.warnOnce("a client can change the key as it likes, and no zone of this block counts by client address alone: invented keys have a fresh bucket each; add a zone with the key {client_ip}", zap.String("zone", z.charge.Zone))
		}
	}
}

// warnAboutSensitive: an exact path does not match with a slash behind it, which backends often take for the same; and a zone in
// this process is never without its store.
func (h *Handler) warnAboutSensitive(z *Zone) {
	if len(z.sensitive) == 0 {
		return
	}
	paths := pathsOf(z.sensitive)
	if len(paths) == 0 {
		paths = pathsOf(z.match)
	}
	for _, path := range paths {
		if !strings.Contains(path, "*") && !covered(path, paths) {
			h.app.warnOnce("a sensitive zone matches an exact path only: "+path+" does not match "+path+"/; write both "+path+" and "+path+"/*", zap.String("zone", z.charge.Zone))
		}
	}
	if h.redisConfig() == nil {
		h.app.warnOnce("a zone is sensitive, but buckets live in this process, where no store can fail; name a redis, or write redis off if that is meant", zap.String("zone", z.charge.Zone))
	}
}

// covered says whether a pattern among the paths matches what is below the path.
func covered(path string, paths []string) bool {
	for _, other := range paths {
		if prefix, ok := strings.CutSuffix(other, "*"); ok && strings.HasPrefix(path+"/", prefix) {
			return true
		}
	}
	return false
}

// pathsOf returns the patterns of the path matchers in the sets.
func pathsOf(sets caddyhttp.MatcherSets) (paths []string) {
	for _, set := range sets {
		for _, matcher := range set {
			if patterns, ok := matcher.(caddyhttp.MatchPath); ok {
				paths = append(paths, patterns...)
			} else if patterns, ok := matcher.(*caddyhttp.MatchPath); ok {
				paths = append(paths, *patterns...)
			}
		}
	}
	return paths
}
