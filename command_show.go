package ratelimit

import (
	"cmp"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// This file holds the commands that only look.

var commandStatus = command{
	use:   "status",
	short: "Stores, nodes, slots and overrides of this node",
	run: func(s *session, _ []string) error {
		return askAdmin(s, http.MethodGet, "status", nil, printStatus)
	},
}

func printStatus(p *page, status *statusInfo) {
	p.row("version", status.Version)
	if status.Node != "" {
		p.row("node", status.Node)
	}
	m := status.Memory
	p.row("memory", fmt.Sprintf("%d buckets and %d records of strikes, at most %d; %d evicted", m.Buckets, m.Strikes, m.MaxKeys, m.Evicted))
	printStores(p, status.Stores)
	if len(status.Pools) > 0 {
		p.title("POOL", "IN FLIGHT")
		for _, pool := range status.Pools {
			p.row(pool.Pool, slots(&pool))
		}
	}
	if len(status.Overrides) > 0 {
		p.end()
		p.line("")
		printOverrides(p, status.Overrides)
	}
}

func slots(pool *poolInfo) string { return fmt.Sprintf("%d of %d", pool.InFlight, pool.MaxInFlight) }

func printStores(p *page, stores []storeInfo) {
	if len(stores) == 0 {
		p.row("store", "memory: limits are per node")
		return
	}
	p.title("REDIS", "PREFIX", "STATE", "NODES", "SHARE WHILE DOWN")
	for _, s := range stores {
		nodes := strconv.FormatInt(s.Nodes, 10) + " configured"
		if s.Counted {
			nodes = strconv.FormatInt(s.Nodes, 10) + " counted"
		}
		state := "up"
		if !s.Up {
			state = "DOWN"
		}
		p.row(s.Redis, s.Prefix, state, nodes, fmt.Sprintf("%.3g %%", 100*s.Share))
	}
	p.title("SERVER", "STATE", "SINCE", "NEXT PROBE")
	for _, s := range stores {
		for _, server := range s.Servers {
			p.row(server.Server, server.State, p.maybe(server.Since), p.maybe(server.NextProbe))
		}
	}
}

var commandZones = command{
	use:   "zones",
	short: "All zones with the numbers that hold, and how often each matched and refused",
	run: func(s *session, _ []string) error {
		return askAdmin(s, http.MethodGet, "zones", nil, printZones)
	},
}

func printZones(p *page, list *zonesInfo) {
	p.row("ZONE", "KEY", "RATE", "BURST", "STORE", "IF DOWN", "PENALTY", "REQUESTS", "REFUSED", "WOULD DENY", "NOTES")
	for _, z := range list.Zones {
		p.row(z.Zone, z.Key, z.Rate, strconv.FormatInt(z.Burst, 10), z.Store, ifDown(&z), groupName(z.Penalty),
			strconv.FormatUint(z.Requests, 10), strconv.FormatUint(z.Refused, 10), strconv.FormatUint(z.WouldDeny, 10), zoneNotes(&z))
	}
}

// ifDown says what holds while Redis is down.
func ifDown(z *zoneInfo) string {
	if z.OnStoreError == "local" {
		return fmt.Sprintf("%s, burst %d", z.ShareRate, z.ShareBurst)
	}
	if z.OnStoreError == "" {
		return "-"
	}
	return z.OnStoreError
}

func zoneNotes(z *zoneInfo) string {
	var notes []string
	if z.DryRun {
		notes = append(notes, "dry run")
	}
	if z.Override != "" {
		notes = append(notes, "override: "+z.Override)
	}
	if len(notes) == 0 {
		return "-"
	}
	return strings.Join(notes, ", ")
}

var commandInspect = command{
	use:   "inspect <zone> <value of its key>... | <zone> --id <id>",
	short: "What a client has left in a zone, and whether it is blocked",
	takes: whoFlags,
	needs: needsClientIn,
	run: func(s *session, args []string) error {
		return askAdmin(s, http.MethodPost, "inspect", inspectRequest{s.who(args)}, printClient)
	},
}

// who is the client that the arguments and the flag name.
func (s *session) who(args []string) who {
	w := who{ID: s.text("id")}
	if len(args) > 0 {
		w.Zone, w.Key = args[0], args[1:]
	}
	return w
}

func printClient(p *page, c *clientInfo) {
	p.row("zone", c.Zone)
	p.row("id", c.ID)
	p.row("limit", fmt.Sprintf("%s, burst %d", c.Rate, c.Limit))
	p.row("left", portion(c.Remaining, c.Limit))
	if c.Reset != nil {
		p.row("full", p.at(*c.Reset))
	}
	p.row("read from", c.Source)
	if c.Group == nil {
		p.row("penalty", "none in this zone")
		return
	}
	p.row("group", groupName(c.Group))
	p.row("strikes", strconv.FormatInt(c.Strikes, 10))
	if c.LastStrike != nil {
		p.row("last strike", p.at(*c.LastStrike))
	}
	if c.ForgottenAt != nil {
		p.row("forgotten", p.at(*c.ForgottenAt))
	}
	printBlock(p, c)
}

func printBlock(p *page, c *clientInfo) {
	switch {
	case c.BlockedUntil == nil:
		p.row("blocked", "no")
	case c.ByHand:
		p.row("blocked", "by hand, until "+p.at(*c.BlockedUntil))
	default:
		p.row("blocked", "until "+p.at(*c.BlockedUntil))
	}
	if c.AmnestyUntil != nil {
		p.row("amnesty", "until "+p.at(*c.AmnestyUntil))
	}
}

var commandBlocks = command{
	use:   "blocks",
	short: "Who is blocked, until when",
	takes: func(flags *pflag.FlagSet) {
		limitFlag(flags)
		flags.String("after", "", "Where to go on: what the list before named")
	},
	run: func(s *session, _ []string) error {
		return askAdmin(s, http.MethodGet, "blocks"+s.query("limit", "after"), nil, printBlocks)
	},
}

func limitFlag(flags *pflag.FlagSet) { flags.Int("limit", 0, "How many to show at most") }

// query holds those of the flags that were given.
func (s *session) query(names ...string) string {
	values := url.Values{}
	for _, name := range names {
		if s.flags.Changed(name) {
			values.Set(name, s.text(name))
		}
	}
	if len(values) == 0 {
		return ""
	}
	return "?" + values.Encode()
}

func printBlocks(p *page, list *blocksInfo) {
	for _, message := range list.Errors {
		p.line("not complete: %s", message)
	}
	if len(list.Blocks) == 0 {
		p.line("nobody is blocked")
		return
	}
	p.row("ID", "UNTIL", "GROUP", "STORE", "BY HAND", "KEY")
	for _, b := range list.Blocks {
		p.row(b.ID, p.at(b.Until), groupName(&b.Group), b.Store, mark(b.ByHand, "yes"), cmp.Or(b.Key, "-"))
	}
	if list.More {
		p.line("there are more: --after %s, or a larger --limit, shows them", list.Next)
	}
}

var commandTop = command{
	use:   "top",
	short: "Who takes most",
	takes: limitFlag,
	run: func(s *session, _ []string) error {
		return askAdmin(s, http.MethodGet, "top"+s.query("limit"), nil, printTop)
	},
}

func printTop(p *page, top *topInfo) {
	if !top.Enabled {
		p.line("not counted: write `top` into the global option rate_limit, and reload")
		return
	}
	if len(top.Clients) == 0 {
		p.line("no requests yet")
		return
	}
	if top.Since != nil {
		p.line("since %s", p.at(*top.Since))
	}
	p.row("ZONE", "ID", "TOKENS", "REFUSED", "KEY")
	for _, c := range top.Clients {
		p.row(c.Zone, c.ID, atMost(c.Tokens, c.Error), strconv.FormatUint(c.Refused, 10), cmp.Or(c.Key, "-"))
	}
}

// atMost says a number of tokens that may be too large by an error.
func atMost(tokens, error float64) string {
	if error == 0 {
		return fmt.Sprintf("%.0f", tokens)
	}
	return fmt.Sprintf("%.0f to %.0f", tokens-error, tokens)
}
