package ratelimit

import "github.com/caddyserver/caddy/v2"

// Redis says where buckets live that many nodes share.
type Redis struct {
	// No Redis: buckets live in this process, even if the app names a Redis.
	Off bool `json:"off,omitempty"`

	// Host and port, or a URL like `redis://user:password@host:6379/0`. Placeholders like `{env.REDIS_URL}` and
	// `{file./run/secrets/redis}` are replaced when the configuration loads.
	Address []string `json:"address,omitempty"`

	// How long a decision may take; then it is made without Redis. Default 50ms.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// The same for a decision about a sensitive zone: it may wait longer, since it is refused without Redis. Default 500ms.
	SensitiveTimeout caddy.Duration `json:"sensitive_timeout,omitempty"`
}
