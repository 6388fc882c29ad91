// Command reference is Caddy with the rate limiter that one would write first: each request sends one EVALSHA of bucket.lua over a
// connection of an ordinary pool and waits for the answer. It is what `make bench` compares ours with, and nothing to use: it has one
// zone, no fallback, no penalties, and calls again by itself.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

func main() { caddycmd.Main() }
