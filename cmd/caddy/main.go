// Command caddy is Caddy with its standard modules and this plugin.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/caddy-tollgate/ratelimit"
)

func main() { caddycmd.Main() }
