package ratelimit

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/textproto"
	"net/url"
	"reflect"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file reads the value of one placeholder from a request, so that whoever sends it cannot be two people by saying the
// same in two ways. Headers, cookies and query parameters are read from the request itself: Caddy's replacer joins what
// occurs twice, or takes the first, and does not tell.

// valueFunc returns the value of a placeholder for a request. It is false, or the value empty, if that is missing.
type valueFunc func(*http.Request, *caddy.Replacer) (string, bool)

// connect gives the part what reads its value.
func (p *keyPart) connect() error {
	switch {
	case p.name == "": // text between placeholders
	case p.name == nameClientIP:
		p.address = clientIP
	case p.name == nameRemoteHost:
		p.address = remoteHost
	case p.name == "http.request.method", p.name == "http.request.orig_method":
		p.value = refined(replaced(p.name), method)
	case p.name == "http.request.host", p.name == "http.request.tls.server_name":
		p.value = refined(replaced(p.name), hostname)
	case strings.HasPrefix(p.name, prefixHeader):
		p.value = headerValue(p.name[len(prefixHeader):])
	case strings.HasPrefix(p.name, prefixCookie):
		p.value = cookieValue(p.name[len(prefixCookie):])
	case strings.HasPrefix(p.name, prefixQuery):
		p.value = queryValue(p.name[len(prefixQuery):])
	case strings.HasPrefix(p.name, prefixClientCert):
		p.value = certified(replaced(p.name))
	case strings.HasPrefix(p.name, "env."), strings.HasPrefix(p.name, "file."), strings.HasPrefix(p.name, "system."):
		return p.connectConstant()
	default:
		p.value = replaced(p.name)
	}
	return nil
}

// connectConstant reads what is the same for all requests. {file.*} would be read from disk for every one of them.
func (p *keyPart) connectConstant() error {
	constant, _ := caddy.NewReplacer().GetString(p.name)
	if constant == "" {
		return fmt.Errorf("{%s} expands to nothing", p.name)
	}
	p.constant = true
	p.value = func(*http.Request, *caddy.Replacer) (string, bool) { return constant, true }
	return nil
}

// network returns the network that counts as one client.
func (p *keyPart) network(r *http.Request) (netip.Prefix, bool) {
	addr, ok := p.address(r)
	if !ok {
		return netip.Prefix{}, false
	}
	network, err := p.group(addr)
	return network, err == nil
}

// group returns the network of an address that counts as one client, without the interface (%eth0): a client is not another
// one on each.
func (p *keyPart) group(addr netip.Addr) (netip.Prefix, error) {
	addr = embedded(addr)
	if addr.Is4() {
		return addr.Prefix(p.v4)
	}
	return addr.Prefix(p.v6)
}

// embedded returns the IPv4 address inside of an IPv6 address, if there is one: written as IPv6 by a socket that takes both
// (::ffff:0:0/96), or by a gateway between the two under the well-known prefix (64:ff9b::/96). Else the whole IPv4 Internet is
// one client, for it has one /64. Gateways with a prefix of their own are not recognized.
func embedded(addr netip.Addr) netip.Addr {
	addr = addr.Unmap()
	if b := addr.As16(); addr.Is6() && [12]byte(b[:]) == [12]byte{0, 0x64, 0xff, 0x9b} {
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return addr
}

// clientIP returns the address that the server found out under its trusted_proxies, where {http.vars.client_ip} finds it.
func clientIP(r *http.Request) (netip.Addr, bool) {
	addr, err := netip.ParseAddr(caddy.ToString(caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey)))
	return addr, err == nil
}

// remoteHost returns the address of the other end of the connection, once a handshake has proven it.
func remoteHost(r *http.Request) (netip.Addr, bool) {
	if r.TLS != nil && !r.TLS.HandshakeComplete {
		return netip.Addr{}, false
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		host = r.RemoteAddr
	}
	addr, err := netip.ParseAddr(host)
	return addr, err == nil
}

// replaced returns what the replacer knows under the name.
func replaced(name string) valueFunc {
	return func(_ *http.Request, repl *caddy.Replacer) (string, bool) {
		value, known := repl.Get(name)
		if !known || isEmpty(value) {
			return "", false
		}
		return caddy.ToString(value), true
	}
}

// isEmpty says whether a value says nothing, although it may print as something: [], <nil>.
func isEmpty(value any) bool {
	switch v := reflect.ValueOf(value); v.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	case reflect.Pointer, reflect.Func, reflect.Chan:
		return v.IsNil()
	default:
		return false
	}
}

func refined(read valueFunc, refine func(string) string) valueFunc {
	return func(r *http.Request, repl *caddy.Replacer) (string, bool) {
		value, ok := read(r, repl)
		return refine(value), ok
	}
}

// certified reads only if there is a client certificate. Caddy describes an empty one otherwise: all clients without a
// certificate have the same fingerprint.
func certified(read valueFunc) valueFunc {
	return func(r *http.Request, repl *caddy.Replacer) (string, bool) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return "", false
		}
		return read(r, repl)
	}
}

// method returns the method, or one word for all that nobody has registered: a client may invent them, and there are
// backends that run the same script for any.
func method(name string) string {
	switch name {
	case "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "QUERY",
		"PROPFIND", "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH", "MKCALENDAR", "ACL", "PURGE":
		return name
	}
	return "other"
}

// hostname removes the differences with which a site is still the same to Caddy's host matcher or to DNS.
func hostname(host string) string {
	return strings.ToLower(strings.TrimSuffix(strings.Trim(host, "[]"), "."))
}

// headerValue reads a header that occurs once.
func headerValue(field string) valueFunc {
	read := func(value string) (string, bool) { return value, true }
	switch field {
	case "Authorization", "Proxy-Authorization":
		read = credentials
	case "X-Forwarded-For", "Forwarded":
		read = onlyAddress
	}
	return func(r *http.Request, _ *caddy.Replacer) (string, bool) {
		lines := r.Header[field]
		if len(lines) != 1 {
			return "", false
		}
		// HTTP/2 delivers space around a value, which is gone when the backend reads it over HTTP/1.
		return read(textproto.TrimString(lines[0]))
	}
}

// onlyAddress returns the value of a header in which proxies list addresses, if it is one. A proxy appends to what the client
// wrote: in a longer list, the client has written the beginning.
func onlyAddress(value string) (string, bool) { return value, !strings.Contains(value, ",") }

// credentials returns what follows the scheme, if that is one word, as in `Bearer xyz`. Many backends accept the scheme in any
// case, with any space behind it, and some ignore what comes after the credentials: a token would be as many clients as
// there are ways to write it.
func credentials(value string) (string, bool) {
	scheme := strings.IndexAny(value, " \t")
	if scheme < 0 {
		return value, true
	}
	value = textproto.TrimString(value[scheme:])
	return value, !strings.ContainsAny(value, " \t")
}

// cookieValue reads a cookie that occurs once, under its name in any case, as Caddy does.
func cookieValue(name string) valueFunc {
	return func(r *http.Request, _ *caddy.Replacer) (string, bool) {
		value, found := "", false
		for _, rest := range r.Header["Cookie"] {
			for rest != "" {
				var pair string
				pair, rest, _ = strings.Cut(rest, ";")
				key, v, _ := strings.Cut(pair, "=")
				if !sameName(key, name) {
					continue
				}
				if found || !strings.EqualFold(textproto.TrimString(key), name) {
					return "", false
				}
				value, found = v, true
			}
		}
		return decodeCookie(value), found
	}
}

// decodeCookie returns a cookie's value without the space, quotes and percent-encoding that the libraries of many backends take
// off. It is empty for a value that Go does not accept.
func decodeCookie(value string) string {
	value = textproto.TrimString(value)
	if len(value) > 1 && value[0] == '"' && value[len(value)-1] == '"' {
		value = value[1 : len(value)-1]
	}
	if strings.ContainsFunc(value, func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }) {
		return ""
	}
	decoded, err := url.PathUnescape(value)
	if err != nil {
		return ""
	}
	return decoded
}

// queryValue reads a query parameter that occurs once. Some backends end a parameter at a semicolon: what is behind it counts as
// a parameter too.
func queryValue(name string) valueFunc {
	return func(r *http.Request, _ *caddy.Replacer) (string, bool) {
		value, found := "", false
		for rest := r.URL.RawQuery; rest != ""; {
			pair := rest
			if end := strings.IndexAny(rest, "&;"); end >= 0 {
				pair, rest = rest[:end], rest[end+1:]
			} else {
				rest = ""
			}
			key, v, _ := strings.Cut(pair, "=")
			key, err := url.QueryUnescape(key)
			if err != nil || !sameName(key, name) {
				continue
			}
			if found || key != name {
				return "", false
			}
			value, found = v, true
		}
		value, err := url.QueryUnescape(value)
		return value, found && err == nil
	}
}

// sameName says whether a backend may take one name of a cookie or parameter for the other: in another case (ASP.NET), with
// what becomes an underscore (PHP), as an array (PHP, Rails, qs). A client that sends both may be read by us under
// one name and by the backend under the other.
func sameName(got, want string) bool {
	got = strings.Trim(got, " \t\r\n\v\f")
	got, _, _ = strings.Cut(got, "\x00")
	array := strings.IndexByte(got, '[')
	return sameLetters(got, want) || array > 0 && sameLetters(got[:array], want)
}

func sameLetters(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		if a[i] != b[i] && nameLetter(a[i]) != nameLetter(b[i]) {
			return false
		}
	}
	return true
}

func nameLetter(c byte) byte {
	switch {
	case c >= 'A' && c <= 'Z':
		return c + 'a' - 'A'
	case c == '.' || c == ' ' || c == '[':
		return '_'
	}
	return c
}
