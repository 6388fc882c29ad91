package ratelimit

import (
	"cmp"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Zone is one limit: who is counted together, how much they may, and for which requests that is.
type Zone struct {
	// The requests that the zone counts. Default: every request.
	MatchRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Who is counted together: text with placeholders, one bucket for each value. Default `{client_ip}`.
	Key string `json:"key,omitempty"`

	// What happens to a request for which a part of the key is missing (unknown, empty, or a header, cookie or query
	// parameter that occurs more than once): `ip` (default) counts it by client address, `skip` does not count it, `deny`
	// answers 400.
	OnEmpty string `json:"on_empty,omitempty"`

	// How fast a bucket refills: tokens per time, like `100/m`, `5/10s`, `0.5/s`, `1000/day`.
	Rate Rate `json:"rate,omitzero"`

	// How many tokens a bucket holds, at least 1. Default: the count of the rate, at least 1.
	Burst int64 `json:"burst,omitempty"`

	// How many tokens a request takes. The first entry that matches counts; without any, it is 1. At most the burst.
	Costs []Cost `json:"cost,omitempty"`

	// How many leading bits of an IPv4 client address are counted together, 0 to 32. Default 32.
	IPv4Prefix *int `json:"ipv4_prefix,omitempty"`

	// How many leading bits of an IPv6 client address are counted together, 0 to 128. Default 64.
	IPv6Prefix *int `json:"ipv6_prefix,omitempty"`

	// The requests that are refused with status 503 while the store does not answer. Default: none.
	SensitiveRaw caddyhttp.RawMatcherSets `json:"sensitive,omitempty" caddy:"namespace=http.matchers"`

	// What happens while the store does not answer: `local` (default) counts in this process with this node's share
	// of the limit, `full` with the whole limit, `deny` refuses with status 503, `allow` lets pass.
	OnStoreError string `json:"on_store_error,omitempty"`

	// Where the buckets of this zone live: `memory` keeps them in this process, whatever the other zones do. Default: as
	// the handler says.
	Store string `json:"store,omitempty"`

	// `off`: refusals by this zone are no strikes, and its requests are not blocked. Default: as the handler says.
	Penalty string `json:"penalty,omitempty"`

	// `off`: this zone never supplies the X-RateLimit headers. For a login, that should not count down for an attacker.
	Headers string `json:"headers,omitempty"`

	// Whether the zone is evaluated and counted but never refuses and never strikes.
	DryRun bool `json:"dry_run,omitempty"`
}

// burst returns how many tokens a bucket of the zone holds.
func (z *Zone) burst() int64 { return cmp.Or(z.Burst, z.Rate.burst()) }

// differs returns the names of the fields in which two definitions of one zone disagree, defaults applied. Fields that say
// which requests are meant, and what happens to them, may differ: the bucket is the same.
func (z *Zone) differs(other *Zone) []string {
	var fields fieldNames
	fields.unless(z.Rate.num == other.Rate.num && z.Rate.den == other.Rate.den, "rate")
	fields.unless(z.burst() == other.burst(), "burst")
	fields.unless(z.fullKey() == other.fullKey(), "key")
	fields.unless(orDefault(z.IPv4Prefix, 32) == orDefault(other.IPv4Prefix, 32), "ipv4_prefix")
	fields.unless(orDefault(z.IPv6Prefix, 64) == orDefault(other.IPv6Prefix, 64), "ipv6_prefix")
	fields.unless(z.Store == other.Store, "store")
	fields.unless(cmp.Or(z.OnStoreError, "local") == cmp.Or(other.OnStoreError, "local"), "on_store_error")
	return fields
}

// fieldNames are names of fields that differ.
type fieldNames []string

func (f *fieldNames) unless(same bool, name string) {
	if !same {
		*f = append(*f, name)
	}
}

// fullKey returns the key with its default, and without the one shorthand that is also known outside of Caddyfiles.
func (z *Zone) fullKey() string {
	return strings.ReplaceAll(cmp.Or(z.Key, "{client_ip}"), "{client_ip}", "{http.vars.client_ip}")
}

func orDefault[T any](value *T, or T) T {
	if value == nil {
		return or
	}
	return *value
}

// Cost is what some requests of a zone take.
type Cost struct {
	// Tokens for each request, 0 or more. With 0 the zone does not count the request.
	Tokens int64 `json:"tokens"`

	// The requests that this is for. Default: all of the zone.
	MatchRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`
}
