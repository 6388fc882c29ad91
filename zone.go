package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
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
	Burst Count `json:"burst,omitempty"`

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

	// `auto`: for an identity with many requests on this node, tokens are taken ahead from Redis, and requests served from them
	// without a call: for 100 ms, and at most a quarter of what is left. Together the nodes never admit more than without, over
	// no interval; what is taken ahead and not used is lost. Sensitive requests are never served so. Default: a call for every
	// request.
	Lease string `json:"lease,omitempty"`

	// Whether the zone is evaluated and counted but never refuses and never strikes.
	DryRun bool `json:"dry_run,omitempty"`

	match     caddyhttp.MatcherSets
	sensitive caddyhttp.MatcherSets
	key       *keyTemplate
	address   *keyTemplate // counts in place of key where a part of it is missing
	charge    Charge       // what is the same for every request
	missing   *missingKeys
}

// burst returns how many tokens a bucket of the zone holds.
func (z *Zone) burst() int64 { return cmp.Or(int64(z.Burst), z.Rate.burst()) }

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
	fields.unless(z.Lease == other.Lease, "lease")
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
	return strings.ReplaceAll(cmp.Or(z.Key, "{client_ip}"), "{client_ip}", clientIPKey)
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

	match caddyhttp.MatcherSets
}

// maxFill bounds how long an empty bucket may take to be full: what is stored must be kept for so long.
const maxFill = 10 * 366 * 24 * time.Hour

const (
	// maxName bounds the names of zones and penalty groups. Redis is told their lengths in a byte.
	maxName = 64
	// maxZones bounds the zones of a handler: of one request, Redis is told their number in a byte.
	maxZones = 255
)

// isReference says whether the zone stands for the shared one of its name.
func (z *Zone) isReference() bool { return z == nil || reflect.DeepEqual(*z, Zone{}) }

// punishes says whether refusals by the zone can be strikes. One whose key holds nothing of the client never punishes: it
// would block everybody.
func (z *Zone) punishes() bool { return z.Penalty != "off" && z.key.holdsClient() }

func (z *Zone) provision(ctx caddy.Context, name string) error {
	z.missing = &missingKeys{logger: ctx.Logger()}
	if name == "" {
		return errors.New("rate_limits: a zone needs a name")
	}
	if len(name) > maxName {
		return fmt.Errorf("zone %q: a name has at most %d bytes", name, maxName)
	}
	if err := z.provisionLimit(name); err != nil {
		return fmt.Errorf("zone %q: %w", name, err)
	}
	if err := z.provisionKey(); err != nil {
		return fmt.Errorf("zone %q: key: %w", name, err)
	}
	if err := z.provisionPolicy(); err != nil {
		return fmt.Errorf("zone %q: %w", name, err)
	}
	if err := z.provisionMatchers(ctx); err != nil {
		return fmt.Errorf("zone %q: loading matchers: %w", name, err)
	}
	return nil
}

func (z *Zone) provisionLimit(name string) error {
	if z.Rate.IsZero() {
		return errors.New("rate: a zone needs one, like 100/m; without any field it stands for the shared zone of its name")
	}
	burst := z.burst()
	if burst < 1 || burst > maxExact/Token {
		return fmt.Errorf("burst: must be from 1 to %d, got %d", int64(maxExact/Token), burst)
	}
	limit := Limit{Num: z.Rate.num, Den: z.Rate.den, Burst: burst * Token}
	if limit.Burst/limit.Num > maxFill.Microseconds()/limit.Den {
		return fmt.Errorf("a bucket of %d at %s takes more than ten years to refill: raise the rate or lower the burst", burst, z.Rate)
	}
	z.charge = Charge{Zone: name, Limit: limit, Floor: Token, DryRun: z.DryRun, Quiet: z.Headers == "off", counts: new(zoneCounts)}
	for _, c := range z.Costs {
		if c.Tokens < 0 || c.Tokens > burst {
			return fmt.Errorf("cost: must be from 0 to the burst of %d, or no request could ever pay it; got %d", burst, c.Tokens)
		}
		z.charge.Floor = max(z.charge.Floor, c.Tokens*Token)
	}
	return nil
}

func (z *Zone) provisionKey() (err error) {
	v4, v6 := orDefault(z.IPv4Prefix, 32), orDefault(z.IPv6Prefix, 64)
	if v4 < 0 || v4 > 32 || v6 < 0 || v6 > 128 {
		return fmt.Errorf("ipv4_prefix must be from 0 to 32 and ipv6_prefix from 0 to 128, got %d and %d", v4, v6)
	}
	if z.key, err = parseKey(z.fullKey(), v4, v6); err != nil {
		return err
	}
	z.address, err = parseKey(clientIPKey, v4, v6)
	return err
}

// clientIPKey is the default key.
const clientIPKey = "{http.vars.client_ip}"

func (z *Zone) provisionPolicy() error {
	switch z.OnStoreError {
	case "", "local":
		z.charge.OnStoreError = PolicyShare
	case "full":
		z.charge.OnStoreError = PolicyFull
	case "deny":
		z.charge.OnStoreError = PolicyDeny
	case "allow":
		z.charge.OnStoreError = PolicyAllow
	default:
		return fmt.Errorf("on_store_error: must be local, full, deny or allow, got %q", z.OnStoreError)
	}
	if z.OnStoreError != "" && len(z.SensitiveRaw) > 0 {
		return errors.New("sensitive and on_store_error both say what happens while the store is down: use one of them")
	}
	if z.Lease != "" && (z.Store != "" || z.DryRun) {
		return errors.New("lease takes tokens ahead from Redis: leave it out where store is memory, and in a dry run")
	}
	z.charge.Local, z.charge.Leases = z.Store == "memory", z.Lease == "auto"
	for _, word := range []struct {
		field, value string
		allowed      [4]string
	}{
		{"on_empty", z.OnEmpty, [4]string{"", "ip", "skip", "deny"}},
		{"store", z.Store, [4]string{"", "memory"}},
		{"lease", z.Lease, [4]string{"", "auto"}},
		{"penalty", z.Penalty, [4]string{"", "off"}},
		{"headers", z.Headers, [4]string{"", "off"}},
	} {
		if !slices.Contains(word.allowed[:], word.value) {
			return fmt.Errorf("%s: must be %s, got %q", word.field, strings.Join(strings.Fields(strings.Join(word.allowed[:], " ")), " or "), word.value)
		}
	}
	return nil
}

func (z *Zone) provisionMatchers(ctx caddy.Context) (err error) {
	if z.match, err = loadMatchers(ctx, z, "MatchRaw", z.MatchRaw); err != nil {
		return err
	}
	if z.sensitive, err = loadMatchers(ctx, z, "SensitiveRaw", z.SensitiveRaw); err != nil {
		return err
	}
	for i := range z.Costs {
		if z.Costs[i].match, err = loadMatchers(ctx, &z.Costs[i], "MatchRaw", z.Costs[i].MatchRaw); err != nil {
			return err
		}
	}
	return nil
}
