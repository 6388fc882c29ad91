package ratelimit

import (
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// This file lends Caddy's shorthands for placeholders to keys that come from JSON.

// longName expands Caddy's shorthands: in a Caddyfile that happens before we see the key, in JSON it does not, and who
// copies a key there should get the same limit. {file.*} has a meaning of its own in JSON.
func longName(written string) string {
	if strings.HasPrefix(written, "file.") {
		return written
	}
	segment := caddyfile.Segment{{Text: "{" + written + "}"}}
	httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&segment)
	return segment[0].Text[1 : len(segment[0].Text)-1]
}
