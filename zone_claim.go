package ratelimit

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"
)

// This file says what a zone charges a request for: whether it counts it, for whom, and for how much.

// Why a request cannot be charged.
var (
	// errEarlyData is for requests in a TLS handshake that is not complete, where the client address counts: it is not
	// proven, and the request may be a replay.
	errEarlyData = errors.New("early data")
	// errIdentityRequired is for requests without the key that a zone demands.
	errIdentityRequired = errors.New("identity required")
	// errNoAddress is for requests to a sensitive route of which not even the client address is known.
	errNoAddress = errors.New("no client address")
)

// claim returns what the zone charges a request for, and false if that is nothing. Errors of matchers are returned as
// they are.
func (z *Zone) claim(r *http.Request, repl *caddy.Replacer, h *hasher) (Charge, bool, error) {
	if matched, err := z.match.AnyMatchWithError(r); err != nil || !matched {
		return Charge{}, false, err
	}
	c := z.charge
	var err error
	if c.Cost, err = z.cost(r); err != nil || c.Cost == 0 {
		return Charge{}, false, err
	}
	if c.Patient, err = matchesAny(z.sensitive, r); err != nil {
		return Charge{}, false, err
	}
	if c.Patient {
		c.OnStoreError = PolicyDeny
	}
	c.NoStrike = r.TLS != nil && !r.TLS.HandshakeComplete
	if c.NoStrike && (c.Patient || z.key.holdsAddress()) {
		return Charge{}, false, errEarlyData
	}
	var known bool
	c.ID, known = z.key.identity(r, repl, h)
	z.missing.note(z, known)
	if known {
		return c, true, nil
	}
	return z.claimWithoutKey(c, r, repl, h)
}

// claimWithoutKey decides about a request for which a part of the key is missing.
func (z *Zone) claimWithoutKey(c Charge, r *http.Request, repl *caddy.Replacer, h *hasher) (Charge, bool, error) {
	switch {
	case z.OnEmpty == "skip":
		return Charge{}, false, nil
	case z.OnEmpty == "deny":
		return Charge{}, false, errIdentityRequired
	case c.NoStrike:
		return Charge{}, false, errEarlyData
	}
	var known bool
	if c.ID, known = z.address.identity(r, repl, h); known {
		return c, true, nil
	}
	z.missing.noAddress(z)
	if c.Patient {
		return Charge{}, false, errNoAddress
	}
	return Charge{}, false, nil
}

// cost returns what a request takes, in millionths of a token.
func (z *Zone) cost(r *http.Request) (int64, error) {
	for i := range z.Costs {
		if matched, err := z.Costs[i].match.AnyMatchWithError(r); err != nil || matched {
			return z.Costs[i].Tokens * Token, err
		}
	}
	return Token, nil
}
