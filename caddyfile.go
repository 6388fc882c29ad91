package ratelimit

// This file reads the directive and the global option, and the blocks that they have in common, from a Caddyfile.
// caddyfile_zone.go reads a zone, caddyfile_redis.go how Redis is reached, caddyfile_names.go compares what has one name in several places, and caddyfile_block.go,
// caddyfile_value.go and caddyfile_unknown.go are the tools of all.

import (
	"cmp"
	"encoding/json"
	"math"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("rate_limit", parseDirective)
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
	httpcaddyfile.RegisterGlobalOption("rate_limit", parseGlobalOption)
}

// parseDirective reads the directive:
//
//	rate_limit [<matcher>] {
//		redis   [<address> …] { … } | off
//		nodes   [auto] <n>
//		exempt  <matcher>
//		zone    <name> [{ … }]
//		penalty [<group>] { … }
//		shed    [<n>] { … }
//		headers on | off
//		reset   epoch | delta
//		answer  auto | json | error
//		jitter  <part>
//		log_key [on | off]
//		log_refusals off | debug | info | warn | error
//		dry_run
//		dry_run_header <name>
//	}
//
// A zone without a block is the one of that name in the global option.
func parseDirective(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	h.Next() // the name of the directive
	b := blockReader{Helper: h, subject: "rate_limit", shared: globalOptionOf(h)}
	start := b.here()
	if b.NextArg() {
		return nil, b.errorf("unexpected argument %q: the settings stand in a block, and more than one matcher needs a name, like @api path /a /b", b.Val())
	}
	handler := new(Handler)
	if _, err := b.block(handlerOptions(b, handler)); err != nil {
		return nil, err
	}
	if len(handler.Zones) == 0 && handler.Shed == nil {
		return nil, start.errorf("nothing is limited: write a block with a zone or shed")
	}
	return handler, nil
}

func handlerOptions(b blockReader, h *Handler) optionTable {
	h.Zones = map[string]*Zone{}
	return optionTable{
		"redis":          once(b.redis(&h.Redis)),
		"nodes":          once(b.nodes(&h.Nodes, &h.NodesAuto)),
		"exempt":         repeatable(b.matcher("exempt", &h.ExemptRaw)),
		"zone":           repeatable(b.zone(h.Zones)),
		"penalty":        once(b.penalty(&h.Penalty)),
		"shed":           once(b.shed(&h.Shed)),
		"headers":        once(b.notYet(b.oneOf(&h.Headers, "on", "off"), "draft", "both")),
		"reset":          once(b.oneOf(&h.Reset, "epoch", "delta")),
		"answer":         once(b.oneOf(&h.Answer, "auto", "json", "error")),
		"jitter":         once(b.part(&h.Jitter)),
		"log_key":        once(b.toggle(&h.LogKey)),
		"log_refusals":   once(b.oneOf(&h.LogRefusals, "off", "debug", "info", "warn", "error")),
		"dry_run":        once(b.flag(&h.DryRun)),
		"dry_run_header": once(b.markName(&h.DryRunHeader)),
	}
}

// parseGlobalOption reads the global option:
//
//	rate_limit {
//		redis      [<address> …] { … } | off
//		nodes      [auto] <n>
//		key_secret <text>
//		prefix     <word>
//		max_keys   <n>
//		top        [<n>]
//		penalty    [<group>] { … }
//		zone       <name> { … }
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the name of the option
	b := blockReader{
		Helper:  httpcaddyfile.Helper{Dispenser: d, State: map[string]any{}},
		subject: "global option",
		global:  true,
	}
	if existing != nil {
		return nil, b.errorf("rate_limit is there already: write everything into one block")
	}
	start := b.here()
	if b.NextArg() {
		return nil, b.errorf("unexpected argument %q: the settings stand in a block", b.Val())
	}
	app := new(App)
	found, err := b.block(appOptions(b, app))
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, start.errorf("rate_limit needs a block")
	}
	value, err := json.Marshal(app)
	if err != nil {
		return nil, start.errorf("encoding: %w", err)
	}
	rememberGlobalOption(value, &globalOption{app, b.State})
	return httpcaddyfile.App{Name: "rate_limit", Value: value}, nil
}

func appOptions(b blockReader, a *App) optionTable {
	a.Zones = map[string]*Zone{}
	return optionTable{
		"redis":      once(b.redis(&a.Redis)),
		"nodes":      once(b.nodes(&a.Nodes, &a.NodesAuto)),
		"key_secret": once(b.secret(&a.KeySecret)),
		"prefix":     once(b.keyPrefix(&a.Prefix)),
		"max_keys":   once(whole(b, &a.MaxKeys, 1, math.MaxInt32)),
		"top":        once(b.top(&a.Top)),
		"penalty":    once(b.penalty(&a.Penalty)),
		"zone":       repeatable(b.zone(a.Zones)),
	}
}

// top reads `top [<n>]`.
func (b blockReader) top(to *Count) func() error {
	return func() error {
		*to = defaultTop
		if b.CountRemainingArgs() == 0 {
			return nil
		}
		return whole(b, to, 1, maxTop)()
	}
}

// nodes reads `nodes <n>` or `nodes auto <n>`.
func (b blockReader) nodes(to *Count, auto *bool) func() error {
	number := whole(b, to, 1, math.MaxInt32)
	return b.value("a whole number", func(_, text string) error {
		*auto = text == "auto"
		switch {
		case !*auto:
			b.Prev()
		case b.CountRemainingArgs() == 0:
			return b.errorf("nodes auto needs a number too, which holds until Redis has told and is the least that is believed, like nodes auto 3")
		default:
			number = whole(b.in(b.subject+": nodes"), to, 1, math.MaxInt32)
		}
		return number()
	})
}

// penalty reads `penalty [<group>] { … }`.
func (b blockReader) penalty(to **Penalty) func() error {
	return func() error {
		b := b.withShorthands()
		p, start := new(Penalty), b.here()
		if err := b.group(&p.Group); err != nil {
			return err
		}
		start = start.in(strings.TrimSpace("penalty " + p.Group))
		b = b.in(start.subject)
		if _, err := b.block(penaltyOptions(b, p)); err != nil {
			return err
		}
		*to = p
		if n := p.numbers(); n.base > n.max {
			return start.errorf("base is above max: raise max (default 1h) or lower base (default 1m)")
		}
		return define(start, p, "strikes of a group are counted together; write the same or name another group, like penalty strict")
	}
}

// group reads the optional name of a penalty group.
func (b blockReader) group(to *string) error {
	if b.CountRemainingArgs() == 0 {
		return nil
	}
	if err := b.name(to)(); err != nil {
		return err
	}
	if *to == "on" || *to == "off" {
		return b.errorf("penalty %s: here stands the name of a group; leave penalty out for none, or write penalty off in a zone", *to)
	}
	return b.lastArgument("penalty")
}

func penaltyOptions(b blockReader, p *Penalty) optionTable {
	return optionTable{
		"after":   once(optional(b, &p.After, 0, maxStrikes-1)),
		"base":    once(b.duration(&p.Base, 1)),
		"max":     once(b.duration(&p.Max, 1)),
		"window":  once(b.duration(&p.Window, 1)),
		"every":   once(b.duration(&p.Every, 0)),
		"except":  repeatable(b.matcher("except", &p.ExceptRaw)),
		"dry_run": once(b.flag(&p.DryRun)),
	}
}

// shed reads `shed [<n>] { … }`.
func (b blockReader) shed(to **Shed) func() error {
	return func() error {
		s, start := new(Shed), b.here()
		if b.CountRemainingArgs() > 0 {
			if err := whole(b, &s.MaxInFlight, 1, math.MaxInt32)(); err != nil {
				return err
			}
		}
		if err := b.lastArgument("shed"); err != nil {
			return err
		}
		if _, err := b.in("shed").block(shedOptions(b.in("shed"), s)); err != nil {
			return err
		}
		*to = s
		return define(start.in("shed pool "+cmp.Or(s.Pool, "default")), s, "a pool is one counter; write the same number or another pool")
	}
}

func shedOptions(b blockReader, s *Shed) optionTable {
	return optionTable{
		"pool":        once(b.name(&s.Pool)),
		"retry_after": once(b.duration(&s.RetryAfter, 1)),
		"class":       notYet(""),
		"per_client":  notYet(""),
		"streams":     notYet(""),
		"adaptive":    notYet(""),
	}
}

// withShorthands replaces placeholders like {client_ip} by their full names in the option that follows. Caddy does that in
// sites but not in global options.
func (b blockReader) withShorthands() blockReader {
	if !b.global {
		return b
	}
	segment := b.NextSegment()
	httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&segment)
	b.Helper = b.WithDispenser(caddyfile.NewDispenser(segment))
	b.Next()
	return b
}
