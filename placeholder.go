package ratelimit

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file answers which placeholders a key may hold, and what they say about a request. All of it happens at load:
// Caddy expands a placeholder that does not exist to nothing and says so nowhere, and a whole site shares one bucket.

// origin says where the value of a placeholder comes from.
type origin uint8

const (
	// fromClient is who asks, as far as is known: what other handlers, the TLS handshake or plugins found out.
	fromClient origin = iota
	// fromAddress is the client's address.
	fromAddress
	// fromWords is who asks, in the client's own words: headers, cookies, query parameters.
	fromWords
	// fromRequest is what is asked for, and constants. All clients may share it.
	fromRequest
	// fromRawRequest is what is asked for, with room for words that change nothing: a URI takes any query.
	fromRawRequest
	// fromNowhere is what must not be in a key.
	fromNowhere
)

// placeholder describes one placeholder, or all that share a beginning.
type placeholder struct {
	origin  origin
	refusal string // why it must not be in a key
}

// Names that are needed in more than one place.
const (
	nameClientIP   = "http.vars.client_ip"
	nameRemoteHost = "http.request.remote.host"

	prefixRequest    = "http.request."
	prefixHeader     = "http.request.header."
	prefixCookie     = "http.request.cookie."
	prefixQuery      = "http.request.uri.query."
	prefixTLS        = "http.request.tls."
	prefixClientCert = "http.request.tls.client."
)

// resolve finds out which placeholder is meant by the text between braces. It returns its one name, the same for all ways
// to write it.
func resolve(written string) (string, origin, error) {
	name := canonicalName(longName(written))
	p := describe(name)
	if p.origin == fromNowhere {
		return "", 0, fmt.Errorf("{%s} cannot be part of a key: %s", written, p.refusal)
	}
	if err := checkName(name); err != nil {
		return "", 0, fmt.Errorf("there is no placeholder {%s}: %w", written, err)
	}
	return name, p.origin, nil
}

// canonicalName removes the differences in letter case that make no difference to Caddy.
func canonicalName(name string) string {
	switch {
	case strings.HasPrefix(name, prefixHeader):
		return prefixHeader + textproto.CanonicalMIMEHeaderKey(name[len(prefixHeader):])
	case strings.HasPrefix(name, prefixCookie), strings.HasPrefix(name, prefixTLS):
		return strings.ToLower(name)
	}
	return name
}

// describe looks a name up in placeholders, and then everything it begins with, the longest first.
func describe(name string) placeholder {
	p, ok := placeholders[name]
	for i := strings.LastIndexByte(name, '.'); !ok && i >= 0; i = strings.LastIndexByte(name[:i], '.') {
		p, ok = placeholders[name[:i]+".*"]
	}
	return p
}

// checkName returns an error with a hint if nothing can ever give the name a value.
func checkName(name string) error {
	if strings.TrimSpace(name) != name {
		return errors.New("remove the spaces inside the braces")
	}
	if strings.HasSuffix(name, ".*") {
		return errors.New("put a name in place of the star")
	}
	if variable, ok := strings.CutPrefix(name, "$"); ok {
		return fmt.Errorf("only a Caddyfile knows that form; write {env.%s}", variable)
	}
	if strings.HasPrefix(name, prefixRequest) && caddyDefines(name) {
		return checkSuffix(name)
	}
	if right, ok := mistakes[squeeze(name)]; ok {
		return fmt.Errorf("did you mean {%s}?", right)
	}
	if strings.HasPrefix(name, "client_ip/") || strings.HasPrefix(name, nameClientIP+"/") {
		return errors.New("write {client_ip}, and the prefix lengths as ipv4_prefix and ipv6_prefix")
	}
	for short, long := range map[string]string{
		"header.": prefixHeader, "cookie.": prefixCookie, "query.": prefixQuery, "remote_host/": nameRemoteHost + "/",
	} {
		if rest, ok := strings.CutPrefix(name, short); ok {
			return fmt.Errorf("did you mean {%s%s}?", long, rest)
		}
	}
	if strings.HasPrefix(name, prefixRequest) {
		return fmt.Errorf("did you mean {%s}?", nearestPlaceholder(name))
	}
	return nil
}

// checkSuffix is for names whose last part can be anything to Caddy, but not to the client that sends it.
func checkSuffix(name string) error {
	for _, prefix := range []string{prefixHeader, prefixCookie} {
		// Names of headers and of cookies are both what HTTP calls a token.
		if suffix, ok := strings.CutPrefix(name, prefix); ok && (&http.Cookie{Name: suffix}).Valid() != nil {
			return fmt.Errorf("a header or cookie cannot have the name %q", suffix)
		}
	}
	if name == prefixQuery {
		return errors.New("the name of the query parameter is missing")
	}
	return nil
}

// squeeze reduces a name to what mistakes are listed by.
func squeeze(name string) string {
	for _, prefix := range []string{"http.", "request.", "req."} {
		name = strings.TrimPrefix(name, prefix)
	}
	return strings.NewReplacer(".", "", "_", "", "-", "").Replace(strings.ToLower(name))
}

// caddyDefines asks Caddy itself whether it would know a placeholder, so that those of a later version are known here too.
func caddyDefines(name string) bool {
	ctx := context.WithValue(context.Background(), http.LocalAddrContextKey, &net.TCPAddr{})
	r := (&http.Request{
		Method:     http.MethodGet,
		URL:        &url.URL{Path: "/"},
		Header:     http.Header{},
		Host:       "localhost",
		RemoteAddr: "127.0.0.1:1",
		TLS:        &tls.ConnectionState{HandshakeComplete: true},
	}).WithContext(ctx)
	repl := caddy.NewEmptyReplacer()
	caddyhttp.PrepareRequest(r, repl, nil, new(caddyhttp.Server))
	_, known := repl.Get(name)
	return known
}

// nearestPlaceholder returns the placeholder that can be in a key and takes the fewest strokes to get to.
func nearestPlaceholder(name string) string {
	last := name[strings.LastIndexByte(name, '.')+1:]
	best, least := "", -1
	for _, candidate := range slices.Sorted(maps.Keys(placeholders)) {
		if placeholders[candidate].origin == fromNowhere || !strings.HasPrefix(candidate, prefixRequest) {
			continue
		}
		if prefix, ok := strings.CutSuffix(candidate, "*"); ok {
			candidate = prefix + last
			if !caddyDefines(candidate) {
				candidate = prefix + "0"
			}
		}
		// A replaced letter counts twice: people leave parts of a name out more often than they take one word for another.
		if d := editDistance(name, candidate, 2); least < 0 || d < least {
			best, least = candidate, d
		}
	}
	return best
}

// nativeGrouping reads the prefix lengths of Caddy's own {http.request.remote.host/24,64}.
func nativeGrouping(name string) (v4, v6 int, err error) {
	four, six, two := strings.Cut(strings.TrimPrefix(name, nameRemoteHost+"/"), ",")
	if !two {
		six = four
	}
	v4, err4 := strconv.Atoi(four)
	v6, err6 := strconv.Atoi(six)
	if err4 != nil || err6 != nil || v4 < 0 || v4 > 32 || v6 < 0 || v6 > 128 {
		return 0, 0, fmt.Errorf("{%s}: after the slash stand two prefix lengths, at most 32 for IPv4 and 128 for IPv6, like {%s/32,64}", name, nameRemoteHost)
	}
	return v4, v6, nil
}
