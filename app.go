package ratelimit

import "github.com/caddyserver/caddy/v2"

// App holds what the rate_limit handlers of one configuration share: the defaults for their settings, and zones
// that several of them use by name.
type App struct {
	// Where buckets live, for handlers that do not say it themselves. Default: this process.
	Redis *Redis `json:"redis,omitempty"`

	// How many nodes share the limits in Redis, for handlers that do not say it themselves.
	Nodes int `json:"nodes,omitempty"`

	// The secret under which identities are hashed before they leave the process. All nodes need the same.
	// Placeholders like `{env.SECRET}` and `{file./run/secrets/key}` are replaced when the configuration loads.
	// Default: none, plain SHA-256; hashed IPv4 addresses can then be found by trying all of them.
	KeySecret string `json:"key_secret,omitempty"`

	// The first part of every key in Redis. One for each environment that shares a Redis. Letters, digits, and any
	// of `-_.:/`. Default `tollgate`.
	Prefix string `json:"prefix,omitempty"`

	// The most buckets that this process keeps. Default 1000000.
	MaxKeys int `json:"max_keys,omitempty"`

	// Blocks for clients that keep running into limits, for handlers that do not say it themselves.
	Penalty *Penalty `json:"penalty,omitempty"`

	// Zones for handlers that name them without a definition.
	Zones map[string]*Zone `json:"zones,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit", New: func() caddy.Module { return new(App) }}
}

// Start implements caddy.App.
func (a *App) Start() error { return nil }

// Stop implements caddy.App.
func (a *App) Stop() error { return nil }
