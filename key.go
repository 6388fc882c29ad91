package ratelimit

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
)

// This file answers who is counted together: it compiles key expressions, and turns requests into IDs by them.
//
// A key can only be as good as what it holds. Prevented, by reading stricter than Caddy does, is that a client becomes
// somebody else by saying the same thing in another way: a header, cookie or query parameter that occurs twice or under a name
// that some backends take for the same, space around a header (HTTP/2 delivers it, HTTP/1 to the backend does not), space,
// quotes and percent-encoding in cookies, the letter case of hosts, methods nobody has heard of. Not prevented is what only the
// backend knows: paths that mean the same, base64 with spare bits, user names in another case, a Host that a catch-all site
// answers, and values that went through `vars` or `map` first, which join repeated headers as Caddy does.

// hasher turns identities into IDs. It may be used by many requests at a time.
type hasher struct {
	digests sync.Pool
}

// newHasher returns a hasher that uses HMAC-SHA-256 with the secret, or SHA-256 if there is none. Without a secret, who
// reads the IDs finds the IPv4 addresses behind them by trying all.
func newHasher(secret string) *hasher {
	sum := sha256.New
	if secret != "" {
		sum = func() hash.Hash { return hmac.New(sha256.New, []byte(secret)) }
	}
	return &hasher{digests: sync.Pool{New: func() any { return &digest{sum: sum()} }}}
}

// digest hashes a sequence of values. Every value is preceded by its length, so that no two sequences look the same:
// ("a_b", "c") and ("a", "b_c") differ.
type digest struct {
	sum hash.Hash
	buf [256]byte
}

const lengthSize = 8

// text adds a value. It goes through the buffer in pieces: converting it as a whole would copy what may be a megabyte.
func (d *digest) text(s string) {
	binary.BigEndian.PutUint64(d.buf[:lengthSize], uint64(len(s)))
	n := copy(d.buf[lengthSize:], s)
	d.sum.Write(d.buf[:lengthSize+n])
	for s = s[n:]; s != ""; s = s[n:] {
		n = copy(d.buf[:], s)
		d.sum.Write(d.buf[:n])
	}
}

// network adds the bytes of a network: 4 or 16 of the address, one for the length of the prefix.
func (d *digest) network(p netip.Prefix) {
	b, _ := p.AppendBinary(d.buf[:lengthSize]) // never fails
	binary.BigEndian.PutUint64(d.buf[:lengthSize], uint64(len(b)-lengthSize))
	d.sum.Write(b)
}

func (d *digest) id() ID { return ID(d.sum.Sum(d.buf[:0])[:len(ID{})]) }

// keyTemplate is a compiled key expression.
type keyTemplate struct {
	// canonical is the expression with the one name of every placeholder. It is part of what is hashed: zones with the
	// same expression and prefixes know a client by the same ID, and share its strikes.
	canonical string
	parts     []keyPart
}

// keyPart is a placeholder, or the text between two.
type keyPart struct {
	literal string // if not a placeholder
	name    string // of the placeholder
	origin  origin
	// constant says that the value was read at load. It may be a secret, so logs show the name.
	constant bool
	// address is set for client addresses, value for all other placeholders.
	address func(*http.Request) (netip.Addr, bool)
	v4, v6  int // prefix lengths for the address
	value   valueFunc
}

// parseKey compiles a key expression, such as `{client_ip}-{http.request.host}`; an empty one is the client's address.
// Braces are escaped as everywhere in Caddy: `\{` and `\}`. Shorthands of the Caddyfile are understood. Client addresses are
// grouped by their leading v4 or v6 bits. Placeholders in {env.*}, {file.*} and {system.*} are read now, once.
func parseKey(text string, v4, v6 int) (*keyTemplate, error) {
	k, err := compileKey(text, v4, v6)
	if err != nil {
		return nil, err
	}
	for i := range k.parts {
		if err := k.parts[i].connect(); err != nil {
			return nil, err
		}
	}
	return k, nil
}

// compileKey is parseKey without what can only be read where the key is used: it tells whether an expression is one.
func compileKey(text string, v4, v6 int) (*keyTemplate, error) {
	if text == "" {
		text = "{" + nameClientIP + "}"
	}
	k := new(keyTemplate)
	start := 0 // of the text since the last placeholder
	for i := 0; i < len(text); i++ {
		if text[i] != '{' && text[i] != '}' || i > 0 && text[i-1] == '\\' {
			continue
		}
		if text[i] == '}' {
			return nil, fmt.Errorf("%q: a } closes nothing; write \\} for a brace that is text", text)
		}
		length := strings.IndexByte(text[i:], '}')
		if length < 0 {
			return nil, fmt.Errorf("%q: a { is not closed; write \\{ for a brace that is text", text)
		}
		k.addLiteral(text[start:i])
		if err := k.addPlaceholder(text[i+1:i+length], v4, v6); err != nil {
			return nil, err
		}
		i += length
		start = i + 1
	}
	k.addLiteral(text[start:])
	return k, nil
}

func (k *keyTemplate) addLiteral(escaped string) {
	if escaped == "" {
		return
	}
	k.canonical += escaped
	text := strings.NewReplacer(`\{`, "{", `\}`, "}").Replace(escaped)
	k.parts = append(k.parts, keyPart{literal: text, origin: fromRequest})
}

func (k *keyTemplate) addPlaceholder(written string, v4, v6 int) error {
	if written == "" {
		return errors.New("{} names no placeholder")
	}
	if strings.Contains(written, "{") || strings.HasSuffix(written, `\`) {
		return fmt.Errorf("{%s} is not closed before the next brace; write \\{ and \\} for braces that are text", written)
	}
	if strings.HasPrefix(written, nameRemoteHost+"/") {
		var err error
		if v4, v6, err = nativeGrouping(written); err != nil {
			return err
		}
		written = nameRemoteHost
	}
	name, origin, err := resolve(written)
	if err != nil {
		return err
	}
	k.canonical += "{" + name + "}"
	k.parts = append(k.parts, keyPart{name: name, origin: origin, v4: v4, v6: v6})
	return nil
}

// identity expands the key for a request. It is false if a part is missing: unknown, empty, no address, or said more than
// once by the client.
func (k *keyTemplate) identity(r *http.Request, repl *caddy.Replacer, h *hasher) (ID, bool) {
	d := h.digests.Get().(*digest)
	defer h.digests.Put(d)
	d.sum.Reset()
	d.text(k.canonical)
	for i := range k.parts {
		if !k.parts[i].hash(d, r, repl) {
			return ID{}, false
		}
	}
	return d.id(), true
}

func (p *keyPart) hash(d *digest, r *http.Request, repl *caddy.Replacer) bool {
	switch {
	case p.name == "":
		return true // the text is in the expression
	case p.address != nil:
		network, ok := p.network(r)
		if ok {
			d.network(network)
		}
		return ok
	default:
		value, ok := p.value(r, repl)
		if ok = ok && value != ""; ok {
			d.text(value)
		}
		return ok
	}
}

// maxPlain bounds what a value adds to a log line.
const maxPlain = 256

// plain returns the key as people read it. It may hold passwords and tokens of clients, so it is for logs of those who
// asked for it. What is missing is left out.
func (k *keyTemplate) plain(r *http.Request, repl *caddy.Replacer) string {
	var b strings.Builder
	for i := range k.parts {
		value := k.parts[i].plain(r, repl)
		if len(value) > maxPlain {
			value = value[:maxPlain] + "…"
		}
		b.WriteString(value)
	}
	return b.String()
}

func (p *keyPart) plain(r *http.Request, repl *caddy.Replacer) string {
	switch {
	case p.name == "":
		return p.literal
	case p.constant:
		return "{" + p.name + "}"
	case p.address != nil:
		network, ok := p.network(r)
		switch {
		case !ok:
			return ""
		case network.IsSingleIP():
			return network.Addr().String()
		}
		return network.String()
	default:
		value, _ := p.value(r, repl)
		return value
	}
}

// holdsAddress says whether the client's address is part of the key. Until a TLS handshake is complete, nothing proves it.
func (k *keyTemplate) holdsAddress() bool { return k.holds(fromAddress) }

// holdsClient says whether the key depends on the client at all. If not, a block for one would be a block for everybody. An
// address of which no bit counts does not.
func (k *keyTemplate) holdsClient() bool {
	return k.holds(fromClient) || k.holds(fromWords) || slices.ContainsFunc(k.parts, func(p keyPart) bool {
		return p.origin == fromAddress && p.v4 > 0 && p.v6 > 0
	})
}

// clientVaries says whether a client can have a new bucket for every request, by what it writes into a header, cookie or
// query. `{client_ip}-{http.request.header.User-Agent}` holds the address, and still limits nobody who changes the
// header.
func (k *keyTemplate) clientVaries() bool { return k.holds(fromWords) || k.holds(fromRawRequest) }

func (k *keyTemplate) holds(o origin) bool {
	return slices.ContainsFunc(k.parts, func(p keyPart) bool { return p.origin == o })
}

// names returns the placeholders of the key, each once.
func (k *keyTemplate) names() []string {
	var names []string
	for _, p := range k.parts {
		if p.name != "" && !slices.Contains(names, p.name) {
			names = append(names, p.name)
		}
	}
	return names
}
