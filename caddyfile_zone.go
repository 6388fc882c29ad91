package ratelimit

// This file reads a zone, and matchers, from a Caddyfile.

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// zoneReader reads the block of a zone:
//
//	zone <name> {
//		match          { … } | <matcher> …
//		key            <text with placeholders>
//		on_empty       ip | skip | deny
//		rate           <count>/<unit>
//		burst          <n>
//		cost           <n> [<matcher>]
//		ipv4_prefix    <bits>
//		ipv6_prefix    <bits>
//		sensitive      [<matcher>]
//		on_store_error local [even | full] | deny | allow
//		store          memory
//		lease          auto
//		penalty        off
//		headers        off
//		dry_run
//	}
type zoneReader struct {
	blockReader
	zone  *Zone
	costs []blockReader // where they are written
}

// maxTokens is the most whole tokens that a bucket can hold.
const maxTokens = maxExact / Token

// zone reads `zone <name> { … }` into one more of the zones, or `zone <name>`, the shared zone.
func (b blockReader) zone(zones map[string]*Zone) func() error {
	places := map[string]string{}
	return func() error {
		b := b.withShorthands()
		var name string
		if err := b.name(&name)(); err != nil {
			return err
		}
		start := b.in("zone " + name).here()
		if err := b.lastArgument("zone"); err != nil {
			return err
		}
		if first := places[name]; first != "" {
			return b.errorf("zone %s is in this block already at %s: give one of them another name", name, first)
		}
		places[name] = b.place()
		z := &zoneReader{blockReader: b.in(start.subject), zone: new(Zone)}
		zones[name] = z.zone
		found, err := z.block(z.options())
		switch {
		case err != nil:
			return err
		case !found:
			return z.reference(name)
		}
		if err := z.check(start); err != nil {
			return err
		}
		return define(start, z.zone, "a name is one budget wherever it stands; write the same or choose another name")
	}
}

func (z *zoneReader) options() optionTable {
	return optionTable{
		"match":          repeatable(z.match),
		"key":            once(z.key()),
		"on_empty":       once(z.oneOf(&z.zone.OnEmpty, "ip", "skip", "deny")),
		"rate":           once(z.rate()),
		"burst":          once(whole(z.blockReader, &z.zone.Burst, 1, maxTokens)),
		"cost":           repeatable(z.cost),
		"ipv4_prefix":    once(optional(z.blockReader, &z.zone.IPv4Prefix, 0, 32)),
		"ipv6_prefix":    once(optional(z.blockReader, &z.zone.IPv6Prefix, 0, 128)),
		"sensitive":      repeatable(z.sensitive),
		"on_store_error": once(z.onStoreError),
		"store":          once(z.oneOf(&z.zone.Store, "memory")),
		"lease":          once(z.oneOf(&z.zone.Lease, "auto")),
		"penalty":        once(z.oneOf(&z.zone.Penalty, "off")),
		"headers":        once(z.oneOf(&z.zone.Headers, "off")),
		"dry_run":        once(z.flag(&z.zone.DryRun)),
		"events":         notYet("write rate, like rate 100/m"),
		"max_events":     notYet("write rate, like rate 100/m"),
		"window":         notYet("write rate, like rate 100/m"),
		"plan":           notYet(""),
		"charge_on":      notYet(""),
		"strike_on":      notYet(""),
		"cost_from":      notYet(""),
		"refund_on":      notYet(""),
	}
}

// reference makes sure that a zone without a block has a definition.
func (z *zoneReader) reference(name string) error {
	if z.global {
		return z.errorf("write a block with a rate: here shared zones are defined")
	}
	var known []string
	if z.shared != nil {
		if z.shared.app.Zones[name] != nil {
			return nil
		}
		known = slices.Sorted(maps.Keys(z.shared.app.Zones))
	}
	if len(known) == 0 {
		return z.errorf("write a block with a rate: without one this is a shared zone, and no global option rate_limit defines any")
	}
	return z.errorf("write a block with a rate: without one this is a shared zone, and the global option defines only %s", strings.Join(known, ", "))
}

// check holds the options of a zone against each other.
func (z *zoneReader) check(start blockReader) error {
	if z.zone.Rate.IsZero() {
		return start.errorf("rate is missing: write one, like rate 100/m")
	}
	if z.zone.OnStoreError != "" && len(z.zone.SensitiveRaw) > 0 {
		return start.errorf("sensitive and on_store_error both say what happens while the store is down: write one of them")
	}
	if z.zone.Lease != "" && (z.zone.Store != "" || z.zone.DryRun) {
		return start.errorf("lease takes tokens ahead from Redis: leave it out where there is store memory, and in a dry run")
	}
	for i, c := range z.zone.Costs {
		if burst := z.zone.burst(); c.Tokens > burst {
			return z.costs[i].errorf("cost %d is above the burst of %d, so no request could ever pay it: raise burst or lower the cost", c.Tokens, burst)
		}
	}
	return nil
}

// key reads text with placeholders. Empty text would be nobody's idea of a key.
func (z *zoneReader) key() func() error {
	return z.value("text with placeholders", func(_, text string) error {
		if text == "" {
			return z.errorf("key is empty: write {client_ip} for one bucket per client, or a word like all for one bucket in total")
		}
		if z.NextArg() {
			return z.errorf("key: unexpected argument %q: text with spaces needs quotes", z.Val())
		}
		if _, err := compileKey(text, 32, 128); err != nil {
			return z.errorf("key: %w", err)
		}
		z.zone.Key = text
		return nil
	})
}

func (z *zoneReader) rate() func() error {
	return z.value("a count and a unit, like 100/m", func(_, text string) (err error) {
		if z.zone.Rate, err = ParseRate(text); err != nil {
			return z.errorf("%w", err)
		}
		return nil
	})
}

func (z *zoneReader) cost() error {
	var c Cost
	start := z.here()
	if err := whole(z.blockReader, &c.Tokens, 0, maxTokens)(); err != nil {
		return err
	}
	if z.CountRemainingArgs() > 0 {
		if err := z.matcher("cost", &c.MatchRaw)(); err != nil {
			return err
		}
	}
	if last := len(z.zone.Costs) - 1; last >= 0 && matchesAll(z.zone.Costs[last].MatchRaw) {
		return z.errorf("cost %d never counts: the cost before it is for every request; write that last", c.Tokens)
	}
	z.zone.Costs = append(z.zone.Costs, c)
	z.costs = append(z.costs, start)
	return nil
}

// matchesAll says whether sets that are written down match every request.
func matchesAll(sets caddyhttp.RawMatcherSets) bool {
	return len(sets) == 0 || len(sets[0]) == 0
}

func (z *zoneReader) sensitive() error {
	if z.CountRemainingArgs() > 0 {
		return z.matcher("sensitive", &z.zone.SensitiveRaw)()
	}
	z.zone.SensitiveRaw = append(z.zone.SensitiveRaw, caddy.ModuleMap{})
	return nil
}

func (z *zoneReader) onStoreError() error {
	switch words := strings.Join(z.RemainingArgs(), " "); words {
	case "local", "local even":
		z.zone.OnStoreError = "local"
	case "local full":
		z.zone.OnStoreError = "full"
	case "deny", "allow":
		z.zone.OnStoreError = words
	default:
		return z.errorf("on_store_error %q: write local, local full, deny or allow", words)
	}
	return nil
}

// match reads the requests of a zone: a block of matchers, one matcher with its arguments, or a matcher token.
func (z *zoneReader) match() error {
	if z.NextArg() {
		token := z.Token()
		z.Prev()
		if !token.Quoted() && strings.IndexAny(token.Text, "*/@") == 0 {
			return z.matcher("match", &z.zone.MatchRaw)()
		}
	}
	start := z.here()
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(z.Dispenser)
	if err != nil {
		return fmt.Errorf("%s: match: %w", z.subject, err) // the matcher says where
	}
	if len(set) == 0 {
		return start.errorf("match is empty: write a matcher, or leave match out to count every request")
	}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		if string(set[name]) == "null" {
			return z.errorf("match %s needs arguments", name)
		}
	}
	z.zone.MatchRaw = append(z.zone.MatchRaw, set)
	return nil
}

// matcher reads the matcher token that an option ends with (*, a path, or a named matcher) into one more set.
func (b blockReader) matcher(word string, to *caddyhttp.RawMatcherSets) func() error {
	return func() error {
		if b.CountRemainingArgs() == 0 {
			return b.errorf("%s needs a matcher: *, a path or a named matcher", word)
		}
		set, isMatcher, err := b.MatcherToken()
		text := b.Val()
		switch {
		case err != nil && b.global:
			return b.errorf("%s %s: named matchers belong to sites: write a path here, or in a zone match path /a /b", word, text)
		case err != nil:
			return b.errorf("%s %s: no such matcher in this site: define it, like %s path /a /b", word, text, text)
		case !isMatcher:
			return b.errorf("%s %q: no matcher: write *, a path like /api/*, or define a named one, like @api method POST, and write @api", word, text)
		}
		if b.NextArg() {
			return b.errorf("%s: unexpected argument %q: one matcher a line; repeat the line, or name a matcher, like @api path /a /b", word, b.Val())
		}
		if set == nil { // *, to Caddy no set; but here no set would be no line
			set = caddy.ModuleMap{}
		}
		*to = append(*to, set)
		return nil
	}
}
