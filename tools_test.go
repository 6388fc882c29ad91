package ratelimit

import (
	_ "github.com/caddyserver/caddy/v2/caddytest"
	_ "github.com/redis/go-redis/v9"
	_ "go.uber.org/goleak"
	_ "pgregory.net/rapid"
)
