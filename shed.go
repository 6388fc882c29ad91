package ratelimit

import (
	"cmp"

	"github.com/caddyserver/caddy/v2"
)

// Shed bounds the requests in flight. One more is answered 503 at once, before any key is read.
type Shed struct {
	// The most requests inside the handler at a time. Default 100.
	MaxInFlight int `json:"max_in_flight,omitempty"`

	// The name of the counter. Handlers that name the same pool share its slots; a request takes one of them.
	// Default `default`.
	Pool string `json:"pool,omitempty"`

	// What a refused client is told to wait. Default 5s.
	RetryAfter caddy.Duration `json:"retry_after,omitempty"`
}

// differs returns the names of the fields in which two definitions of one pool disagree, defaults applied.
func (s *Shed) differs(other *Shed) []string {
	if cmp.Or(s.MaxInFlight, 100) != cmp.Or(other.MaxInFlight, 100) {
		return []string{"max_in_flight"}
	}
	return nil
}
