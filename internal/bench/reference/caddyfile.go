package main

import (
	"fmt"
	"strconv"

	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("bench_reference", parse)
	httpcaddyfile.RegisterDirectiveOrder("bench_reference", httpcaddyfile.Before, "basic_auth")
}

// parse reads `bench_reference <redis> <script> <num> <den> <burst>`.
func parse(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next()
	args := h.RemainingArgs()
	if len(args) != 5 {
		return nil, h.ArgErr()
	}
	handler := &Handler{Redis: args[0], Script: args[1]}
	for i, n := range []*int64{&handler.Num, &handler.Den, &handler.Burst} {
		var err error
		if *n, err = strconv.ParseInt(args[2+i], 10, 64); err != nil {
			return nil, fmt.Errorf("argument %d: %w", 3+i, err)
		}
	}
	return handler, nil
}
