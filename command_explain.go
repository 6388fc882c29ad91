package ratelimit

import (
	"fmt"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// This file holds the command that asks what would become of a request.

var commandExplain = command{
	use:   "explain <method> <url>",
	short: "Which limits a request would meet, with key, cost and what is left; nothing is charged",
	long: `
Asks the running Caddy what it would do with a request, without sending or charging one: which rate_limit handlers it meets, which
zones count it, under which key and for how much, and what is left. The URL is the one that Caddy is asked for, with the port that
it listens on. The scheme says whether that is by TLS.
`,
	takes: func(flags *pflag.FlagSet) {
		flags.StringArrayP("header", "H", nil, "A header of the request, as in 'Name: value'; repeatable")
		flags.String("client-ip", "", "Who sends the request (default 127.0.0.1)")
	},
	needs: func(_ *pflag.FlagSet, args []string) error {
		if len(args) == 2 {
			return nil
		}
		return fmt.Errorf("write a method and a URL, as in `GET https://example.com/login`; got %s", listed(args))
	},
	run: runExplain,
}

func runExplain(s *session, args []string) error {
	lines, err := s.flags.GetStringArray("header")
	if err != nil {
		return err
	}
	headers := map[string][]string{}
	for _, line := range lines {
		name, value, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("a header is written 'Name: value', got %q", line)
		}
		name = textproto.CanonicalMIMEHeaderKey(strings.TrimSpace(name))
		headers[name] = append(headers[name], strings.TrimSpace(value))
	}
	request := explainRequest{Method: args[0], URL: args[1], Headers: headers, ClientIP: s.text("client-ip")}
	return askAdmin(s, http.MethodPost, "explain", request, printExplained)
}

func printExplained(p *page, e *explainInfo) {
	p.line("server %s", e.Server)
	for _, name := range e.Unsure {
		p.line("unsure: %s stands before a limit and may answer or change the request", name)
	}
	if len(e.Handlers) == 0 {
		p.line("no limit: the request meets no rate_limit")
	}
	for i := range e.Handlers {
		printHandler(p, i+1, &e.Handlers[i])
	}
	if e.AnsweredBy != "" {
		p.line("then: %s", e.AnsweredBy)
	}
}

func printHandler(p *page, number int, h *explainedHandler) {
	p.line("rate_limit %d: %s", number, h.Verdict)
	if h.Error != "" {
		p.line("error: %s", h.Error)
	}
	if h.Pool != nil {
		p.line("pool %s: %s in flight", h.Pool.Pool, slots(h.Pool))
	}
	if len(h.Zones) == 0 {
		return
	}
	p.row("ZONE", "VERDICT", "COST", "LEFT", "RATE", "FROM", "KEY")
	for i := range h.Zones {
		z := &h.Zones[i]
		switch {
		case !z.Matched:
			p.row(z.Zone, "not counted", "-", "-", "-", "-", "-")
		case !z.Charged && z.Verdict != "":
			p.row(z.Zone, verdictOf(z), "-", "-", "-", "-", "-")
		case !z.Charged:
			p.row(z.Zone, "charged before", "-", "-", "-", "-", "-")
		default:
			p.row(z.Zone, verdictOf(z), strconv.FormatInt(z.Cost, 10), portion(z.Remaining, z.Limit), z.Rate, z.Source,
				z.Key+" = "+z.KeyValue)
		}
	}
}

// verdictOf says what a zone alone would do.
func verdictOf(z *explainedZone) string {
	verdict := z.Verdict
	if z.RetryAfter > 0 {
		verdict += fmt.Sprintf(", retry after %d s", z.RetryAfter)
	}
	if z.Sensitive {
		verdict += ", sensitive"
	}
	return verdict
}
