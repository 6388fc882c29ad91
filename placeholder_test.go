package ratelimit

import (
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// richRequest has everything that Caddy has a placeholder for.
func richRequest() edit {
	return secured(tls.ConnectionState{
		HandshakeComplete: true,
		PeerCertificates: []*x509.Certificate{{
			Raw: []byte("x"), SerialNumber: big.NewInt(1), PublicKey: ed25519.PublicKey("key"),
			DNSNames: []string{"a"}, EmailAddresses: []string{"a@b"}, IPAddresses: []net.IP{{192, 0, 2, 1}}, URIs: []*url.URL{{Host: "a"}},
		}},
	})
}

// setLater are the placeholders that the replacer of a new request does not know yet: handlers and matchers set them.
var setLater = []string{"http.matchers.file.", "http.intercept.", "http.reverse_proxy.", "http.error", "http.rate_limit."}

// TestListedPlaceholdersExist asks Caddy for every name in our list, so that it cannot rot.
func TestListedPlaceholdersExist(t *testing.T) {
	_, repl := arrived(richRequest())
	for listed := range placeholders {
		name := listed
		if prefix, ok := strings.CutSuffix(listed, "*"); ok {
			name = prefix + map[string]string{"http.response.": "header.X", "time.": "now", "system.": "os", "file.": "none"}[prefix]
			if name == prefix {
				name = prefix + "0"
			}
		}
		if slices.ContainsFunc(setLater, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			continue
		}
		if _, known := repl.Get(name); !known {
			t.Errorf("Caddy does not know {%s}", name)
		}
	}
}

// TestCaddysPlaceholdersAreListed reads Caddy's documentation and code for names that we say nothing about: after an update of
// Caddy somebody must decide whether a new one can be in a key.
func TestCaddysPlaceholdersAreListed(t *testing.T) {
	directory, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/caddyserver/caddy/v2").Output()
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for file, form := range map[string]string{
		"modules/caddyhttp/app.go":      "`{(http\\.[^}`]+)}`",
		"modules/caddyhttp/replacer.go": `case "(http\.[^"]+)":`,
	} {
		source, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(directory)), file))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile(form).FindAllStringSubmatch(string(source), -1) {
			name := match[1]
			found++
			switch _, listed := placeholders[name]; {
			case listed, name == "http.vars.*", name == "http.response.header.*":
			default:
				t.Errorf("%s: {%s} is not listed", file, name)
			}
		}
	}
	if found < 100 {
		t.Errorf("found only %d names in Caddy's source: the test does not know it any more", found)
	}
}

// TestShorthands holds keys in JSON to what a Caddyfile makes of them.
func TestShorthands(t *testing.T) {
	for _, short := range []string{
		"{client_ip}", "{remote_host}", "{host}", "{method}", "{path}", "{%path}", "{?query}", "{orig_?query}", "{dir}", "{scheme}", "{tls_client_subject}",
		"{header.X-Api-Key}", "{cookie.sid}", "{labels.1}", "{path.0}", "{query.key}", "{re.name.1}", "{vars.x}", "{rp.header.X}",
	} {
		segment := caddyfile.Segment{{Text: short}}
		httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&segment)
		if long := segment[0].Text; long == short {
			t.Errorf("%s is no shorthand", short)
		} else if got := parsed(t, short, 32, 64).canonical; got != long {
			t.Errorf("%s is %s in JSON and %s in a Caddyfile", short, got, long)
		}
	}
}

// TestFilePlaceholderInJSON is for {file.name}, which a Caddyfile takes for a part of the path, and JSON does not.
func TestFilePlaceholderInJSON(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("name", []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := parsed(t, "{file.name}-{client_ip}", 32, 64)
	before := known(t, k)
	if err := os.Remove("name"); err != nil {
		t.Fatal(err)
	}
	if known(t, k) != before {
		t.Error("the file was read again for a request")
	}
	r, repl := arrived()
	if got := k.plain(r, repl); strings.Contains(got, "s3cret") {
		t.Errorf("a log would hold the content of the file: %q", got)
	}
}

func TestKeyErrors(t *testing.T) {
	for _, tc := range []struct{ reason, key, want string }{
		{"a { alone", "{client_ip", `"{client_ip": a { is not closed; write \{ for a brace that is text`},
		{"a } alone", "client_ip}", `"client_ip}": a } closes nothing; write \} for a brace that is text`},
		{"an escaped end", `{client_ip\}`, `{client_ip\} is not closed before the next brace; write \{ and \} for braces that are text`},
		{"an escaped beginning", `\{client_ip}`, `"\\{client_ip}": a } closes nothing; write \} for a brace that is text`},
		{"one inside of another", "{header.{host}}", `{header.{host} is not closed before the next brace; write \{ and \} for braces that are text`},
		{"no name", "a{}", `{} names no placeholder`},
		{"space", "{ client_ip }", `there is no placeholder { client_ip }: remove the spaces inside the braces`},
		{"the star of the documentation", "{http.request.header.*}", `there is no placeholder {http.request.header.*}: put a name in place of the star`},
		{"the form of a Caddyfile", "{$SHARD}", `there is no placeholder {$SHARD}: only a Caddyfile knows that form; write {env.SHARD}`},

		{"of the tutorials", "{http.request.remote_ip}", `there is no placeholder {http.request.remote_ip}: did you mean {client_ip}?`},
		{"its short form", "{remote_ip}", `there is no placeholder {remote_ip}: did you mean {client_ip}?`},
		{"with a dot", "{remote.ip}", `there is no placeholder {remote.ip}: did you mean {client_ip}?`},
		{"shorter", "{ip}", `there is no placeholder {ip}: did you mean {client_ip}?`},
		{"of nginx", "{remote_addr}", `there is no placeholder {remote_addr}: did you mean {client_ip}?`},
		{"of nginx's module", "{real_ip}", `there is no placeholder {real_ip}: did you mean {client_ip}?`},
		{"half long", "{http.request.client_ip}", `there is no placeholder {http.request.client_ip}: did you mean {client_ip}?`},
		{"half long", "{http.client_ip}", `there is no placeholder {http.client_ip}: did you mean {client_ip}?`},
		{"without http", "{request.remote.host}", `there is no placeholder {request.remote.host}: did you mean {remote_host}?`},
		{"with an underscore", "{http.request.remote_host}", `there is no placeholder {http.request.remote_host}: did you mean {remote_host}?`},
		{"a prefix of the wrong one", "{client_ip/24}", `there is no placeholder {client_ip/24}: write {client_ip}, and the prefix lengths as ipv4_prefix and ipv6_prefix`},
		{"a prefix of a shorthand", "{remote_host/24,64}", `there is no placeholder {remote_host/24,64}: did you mean {http.request.remote.host/24,64}?`},
		{"a prefix too long", "{http.request.remote.host/64}", `{http.request.remote.host/64}: after the slash stand two prefix lengths, at most 32 for IPv4 and 128 for IPv6, like {http.request.remote.host/32,64}`},
		{"a prefix that is none", "{http.request.remote.host/x}", `{http.request.remote.host/x}: after the slash stand two prefix lengths, at most 32 for IPv4 and 128 for IPv6, like {http.request.remote.host/32,64}`},

		{"a letter too many", "{http.request.headers.X-Api-Key}", `there is no placeholder {http.request.headers.X-Api-Key}: did you mean {http.request.header.X-Api-Key}?`},
		{"a letter too many", "{http.request.cookies.sid}", `there is no placeholder {http.request.cookies.sid}: did you mean {http.request.cookie.sid}?`},
		{"a part left out", "{http.request.query.key}", `there is no placeholder {http.request.query.key}: did you mean {http.request.uri.query.key}?`},
		{"a part left out", "{http.request.path}", `there is no placeholder {http.request.path}: did you mean {http.request.uri.path}?`},
		{"letters exchanged", "{http.request.hots}", `there is no placeholder {http.request.hots}: did you mean {http.request.host}?`},
		{"another word", "{http.request.url}", `there is no placeholder {http.request.url}: did you mean {http.request.uri}?`},
		{"a header without its place", "{http.request.user_agent}", `there is no placeholder {http.request.user_agent}: did you mean {http.request.header.User-Agent}?`},
		{"a word for a number", "{path.tenant}", `there is no placeholder {path.tenant}: did you mean {http.request.uri.path}?`},
		{"a number below zero", "{http.request.host.labels.-1}", `there is no placeholder {http.request.host.labels.-1}: did you mean {http.request.host.labels.0}?`},
		{"of TLS", "{http.request.tls.client.subjekt}", `there is no placeholder {http.request.tls.client.subjekt}: did you mean {http.request.tls.client.subject}?`},
		{"no header can be called so", "{http.request.header.X Api}", `there is no placeholder {http.request.header.X Api}: a header or cookie cannot have the name "X Api"`},
		{"no name of a header", "{http.request.header.}", `there is no placeholder {http.request.header.}: a header or cookie cannot have the name ""`},
		{"no cookie can be called so", "{http.request.cookie.a;b}", `there is no placeholder {http.request.cookie.a;b}: a header or cookie cannot have the name "a;b"`},
		{"no name of a parameter", "{query.}", `there is no placeholder {query.}: the name of the query parameter is missing`},
		{"a shorthand that Caddy does not take", "{query.a.b}", `there is no placeholder {query.a.b}: did you mean {http.request.uri.query.a.b}?`},

		{"contains the port", "{remote}", `{remote} cannot be part of a key: the port changes with every connection; write {http.request.remote.host}`},
		{"is the port", "{client_ip}:{remote_port}", `{remote_port} cannot be part of a key: the port changes with every connection; write {http.request.remote.host}`},
		{"a port that anybody writes", "{hostport}", `{hostport} cannot be part of a key: the client writes any port it likes into its Host header; write {http.request.host}, or {http.request.local.port} for the port`},
		{"unique", "{uuid}", `{uuid} cannot be part of a key: it changes with every request, so nobody would ever be limited`},
		{"time", "{time.now.unix}", `{time.now.unix} cannot be part of a key: it changes with every request, so nobody would ever be limited`},
		{"time", "{http.request.duration_ms}", `{http.request.duration_ms} cannot be part of a key: it changes with every request, so nobody would ever be limited`},
		{"time, as a variable", "{vars.start_time}", `{vars.start_time} cannot be part of a key: it changes with every request, so nobody would ever be limited`},
		{"the body", "{http.request.body}", `{http.request.body} cannot be part of a key: the client writes any body it likes, and reading it holds up the request`},
		{"the body", "{http.request.body_base64}", `{http.request.body_base64} cannot be part of a key: the client writes any body it likes, and reading it holds up the request`},
		{"the answer", "{http.response.header.X}", `{http.response.header.X} cannot be part of a key: it is known only after the limit has decided`},
		{"the backend", "{upstream_hostport}", `{upstream_hostport} cannot be part of a key: it is known only after the limit has decided`},
		{"an error", "{err.status_code}", `{err.status_code} cannot be part of a key: it is known only after the limit has decided`},
		{"our own", "{http.rate_limit.zone}", `{http.rate_limit.zone} cannot be part of a key: it is known only after the limit has decided`},
		{"the server's end", "{http.shutting_down}", `{http.shutting_down} cannot be part of a key: it changes when the server stops, and everybody would start with a full bucket`},
		{"a header that is not there", "{header.host}", `{header.host} cannot be part of a key: the server takes this header out of the request before anybody can read it; write {http.request.host}`},
		{"a header that is not there", "{header.Transfer-Encoding}", `{header.Transfer-Encoding} cannot be part of a key: the server takes this header out of the request before anybody can read it`},
		{"all cookies", "{header.Cookie}", `{header.Cookie} cannot be part of a key: a client is somebody else with every cookie it adds; name the one that counts, like {http.request.cookie.session}`},
		{"a constant that is nothing", "{env.TOLLGATE_TEST_UNSET}", `{env.TOLLGATE_TEST_UNSET} expands to nothing`},
		{"a constant that is none", "{system.hostnam}", `{system.hostnam} expands to nothing`},
	} {
		t.Run(fmt.Sprintf("%s: %s", tc.reason, tc.key), func(t *testing.T) {
			if _, err := parseKey(tc.key, 32, 64); err == nil {
				t.Error("no error")
			} else if err.Error() != tc.want {
				t.Errorf("\ngot  %s\nwant %s", err, tc.want)
			}
		})
	}
}

// TestKeyNamesOfOthers is for names that only a handler or plugin can know: a key may hold them.
func TestKeyNamesOfOthers(t *testing.T) {
	for _, key := range []string{
		"{tier}", "{geoip.country}", "{http.auth.user.id}", "{http.regexp.name.1}", "{re.name.1}", "{vars.remote_ip}", "{http.vars.ip}",
		"{http.reverse_proxy.header.Remote-User}", "{http.intercept.status_code}", "{http.matchers.file.relative}", "{http.url_pattern.pathname.id}",
	} {
		parsed(t, key, 32, 64)
	}
}
