package ratelimit

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/pflag"
)

// This file holds the commands that change something. Each says how to undo it.

var commandBlock = command{
	use:   "block <zone> <value of its key>... | --id <id>",
	short: "Block a client for a while",
	long: `
Blocks a client for a while in every zone of the penalty group, on all nodes within 5 s. What it has struck before stays.
`,
	takes: func(flags *pflag.FlagSet) {
		whoFlags(flags)
		groupFlag(flags, "Default: that of the zone")
		flags.String("for", "", "How long, like 90s, 30m or 24h (required)")
	},
	needs: func(flags *pflag.FlagSet, args []string) error {
		if err := needsClient(flags, args); err != nil {
			return err
		}
		return needsLength(flags)
	},
	run: func(s *session, args []string) error {
		request := blockRequest{who: s.who(args), For: s.text("for"), Group: s.given("group")}
		return askAdmin(s, http.MethodPost, "block", request, printBlocked)
	},
}

func groupFlag(flags *pflag.FlagSet, otherwise string) {
	flags.String("group", "", "The penalty group, empty for the default one. "+otherwise)
}

func needsLength(flags *pflag.FlagSet) error {
	if flagText(flags, "for") == "" {
		return errors.New("say for how long, as in `--for 30m`")
	}
	return nil
}

func printBlocked(p *page, b *blockResult) {
	p.line("blocked %s until %s", b.ID, p.at(b.Until))
	p.row("group", groupName(&b.Group))
	p.row("in", strings.Join(b.Stores, ", "))
	p.row("undo", "caddy rate-limit unblock --id "+b.ID)
}

var commandUnblock = command{
	use:   "unblock <zone> <value of its key>... | --id <id>",
	short: "End the blocks of a client and forget its strikes",
	long: `
Ends the blocks of a client and forgets its strikes, on all nodes within 5 s. With --amnesty its refusals are no strikes for a
while: time to find out why it runs into its limit. Its bucket is as it was, see reset.
`,
	takes: func(flags *pflag.FlagSet) {
		whoFlags(flags)
		groupFlag(flags, "Default: all of them")
		flags.String("amnesty", "", "How long its refusals are no strikes, like 10m (default: they are at once)")
	},
	needs: needsClient,
	run: func(s *session, args []string) error {
		request := unblockRequest{who: s.who(args), Group: s.given("group"), Amnesty: s.text("amnesty")}
		return askAdmin(s, http.MethodPost, "unblock", request, printUnblocked)
	},
}

func printUnblocked(p *page, u *unblockResult) {
	switch u.Forgotten {
	case 0:
		p.line("%s had no strikes and no block", u.ID)
	case 1:
		p.line("unblocked %s: 1 record of strikes forgotten", u.ID)
	default:
		p.line("unblocked %s: %d records of strikes forgotten", u.ID, u.Forgotten)
	}
	if u.Amnesty != nil {
		p.line("amnesty until %s: its refusals are no strikes", p.at(*u.Amnesty))
	}
}

var commandReset = command{
	use:   "reset <zone> <value of its key>... | <zone> --id <id>",
	short: "Fill the bucket of a client",
	takes: whoFlags,
	needs: needsClientIn,
	run: func(s *session, args []string) error {
		return askAdmin(s, http.MethodPost, "reset", resetRequest{s.who(args)}, printReset)
	},
}

func printReset(p *page, r *resetResult) {
	if len(r.Reset) == 0 {
		p.line("the bucket of %s in zone %s was full", r.ID, r.Zone)
		return
	}
	p.line("the bucket of %s in zone %s is full again (in %s)", r.ID, r.Zone, strings.Join(r.Reset, ", "))
}

var commandOverride = command{
	use:   "override [<zone> local|deny|allow --for <at most 1h> | <zone> --end]",
	short: "Change for a while what this node does with a zone while Redis is down",
	long: `
Changes for a while what this node does with the requests of a zone while Redis does not answer: count them with its share of the
limit (local), refuse them (deny), or let them pass uncounted (allow). It ends by itself, at a restart, or by --end; other nodes
have overrides of their own. Without a zone it lists those that hold.
`,
	takes: func(flags *pflag.FlagSet) {
		flags.String("for", "", "How long, at most 1h")
		flags.Bool("end", false, "End the override of the zone")
	},
	needs: needsOverride,
	run:   runOverride,
}

func needsOverride(flags *pflag.FlagSet, args []string) error {
	ends, known := flagText(flags, "end") == "true", false
	if len(args) == 2 {
		_, known = overrideActions[args[1]]
	}
	switch {
	case len(args) == 0 && !ends && !flags.Changed("for"), len(args) == 1 && ends:
		return nil
	case known && !ends:
		return needsLength(flags)
	}
	return fmt.Errorf("write nothing, or `<zone> local|deny|allow --for 15m`, or `<zone> --end`; got %s", listed(args))
}

func runOverride(s *session, args []string) error {
	switch len(args) {
	case 0:
		return askAdmin(s, http.MethodGet, "override", nil, func(p *page, list *overridesInfo) { printOverrides(p, list.Overrides) })
	case 1:
		return askAdmin(s, http.MethodDelete, "override?"+url.Values{"zone": args}.Encode(), nil, func(p *page, o *overrideInfo) {
			p.line("the override of zone %s by %s has ended", o.Zone, o.Action)
		})
	}
	request := overrideRequest{Zone: args[0], Action: args[1], For: s.text("for")}
	return askAdmin(s, http.MethodPost, "override", request, func(p *page, o *overrideInfo) {
		p.line("while Redis is down, this node answers zone %s by %s, until %s", o.Zone, o.Action, p.at(o.Until))
		p.line("undo: caddy rate-limit override %s --end", o.Zone)
	})
}

func printOverrides(p *page, list []overrideInfo) {
	if len(list) == 0 {
		p.line("no overrides")
		return
	}
	p.row("OVERRIDDEN ZONE", "ACTION", "UNTIL")
	for _, o := range list {
		p.row(o.Zone, o.Action, p.at(o.Until))
	}
}
