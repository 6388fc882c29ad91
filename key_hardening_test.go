package ratelimit

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func hosted(host string) edit       { return func(r *http.Request) { r.Host = host } }
func methodically(name string) edit { return func(r *http.Request) { r.Method = name } }

func secured(state tls.ConnectionState) edit {
	return func(r *http.Request) { r.TLS = &state }
}

// TestKeyDisguises names ways in which a client could say the same and be somebody else, with a full bucket. All of them leave it
// who it is, or make it one whose key is missing.
func TestKeyDisguises(t *testing.T) {
	const same, gone = true, false
	for _, tc := range []struct {
		attack   string
		key      string
		honest   edit
		disguise edit
		want     bool
	}{
		{"a header twice, the junk first", "{header.X-Api-Key}", with("X-Api-Key", "real"), with("X-Api-Key", "junk", "real"), gone},
		{"a header twice, the junk last", "{header.X-Api-Key}", with("X-Api-Key", "real"), with("X-Api-Key", "real", "junk"), gone},
		{"a header twice, the same", "{header.X-Api-Key}", with("X-Api-Key", "real"), with("X-Api-Key", "real", "real"), gone},
		{"a header twice, once empty", "{header.X-Api-Key}", with("X-Api-Key", "real"), with("X-Api-Key", "", "real"), gone},
		{"space around a header, by HTTP/2", "{header.X-Api-Key}", with("X-Api-Key", "real"), with("X-Api-Key", " real\t "), same},
		{"another case of the scheme", "{header.Authorization}", with("Authorization", "Bearer real"), with("Authorization", "bEARER real"), same},
		{"space behind the scheme", "{header.Authorization}", with("Authorization", "Bearer real"), with("Authorization", "Bearer \t  real "), same},
		{"junk behind the token", "{header.Authorization}", with("Authorization", "Bearer real"), with("Authorization", "Bearer real junk"), gone},
		{"junk before the token", "{header.Authorization}", with("Authorization", "Bearer real"), with("Authorization", "Bearer junk real"), gone},
		{"the same for a proxy", "{header.Proxy-Authorization}", with("Proxy-Authorization", "Basic real"), with("Proxy-Authorization", "BASIC  real"), same},
		{"an address before the one that the proxy appends", "{header.X-Forwarded-For}", with("X-Forwarded-For", "192.0.2.1"), with("X-Forwarded-For", "junk, 192.0.2.1"), gone},
		{"the same in the new header", "{header.Forwarded}", with("Forwarded", "for=192.0.2.1"), with("Forwarded", "for=junk,for=192.0.2.1"), gone},
		{"a forwarded address from nobody whom the server trusts", "{client_ip}", with("X-Forwarded-For", ""), with("X-Forwarded-For", "198.51.100.7"), same},

		{"a cookie twice", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=junk; session=real"), gone},
		{"a cookie on two lines", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=junk", "session=real"), gone},
		{"a cookie in two cases", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "SESSION=junk; session=real"), gone},
		{"a cookie in another case", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "Session=real"), same},
		{"a cookie without a value first", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session; session=real"), gone},
		{"a cookie that Go drops", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=\x01; session=real"), gone},
		{"space around the name", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", " session\t=junk;session=real"), gone},
		{"space around the value", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=  real  "), same},
		{"quotes", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", `session="real"`), same},
		{"percent-encoding, for PHP and Express", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=re%61%6C"), same},
		{"broken percent-encoding", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "session=real%"), gone},
		{"a backslash, which Go drops", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", `session=re\141l`), gone},
		{"a dot for PHP's underscore", "{cookie.app_session}", with("Cookie", "app_session=real"), with("Cookie", "app.session=real; app_session=junk"), gone},
		{"PHP's other name alone", "{cookie.app_session}", with("Cookie", "app_session=real"), with("Cookie", "app.session=junk"), gone},
		{"other cookies", "{cookie.session}", with("Cookie", "session=real"), with("Cookie", "a=1; sessions=junk; session=real; xsession=junk"), same},

		{"a parameter twice", "{query.key}", querying("key=real"), querying("key=junk&key=real"), gone},
		{"a parameter with an encoded name", "{query.api_key}", querying("api_key=real"), querying("api%5Fkey=junk&api_key=real"), gone},
		{"a parameter in another case, for ASP.NET", "{query.key}", querying("key=real"), querying("KEY=real&key=junk"), gone},
		{"a dot for PHP's underscore", "{query.api_key}", querying("api_key=real"), querying("api.key=real&api_key=junk"), gone},
		{"a plus for PHP's underscore", "{query.api_key}", querying("api_key=real"), querying("api+key=real&api_key=junk"), gone},
		{"a bracket for PHP's underscore", "{query.api_key}", querying("api_key=real"), querying("api[key=real&api_key=junk"), gone},
		{"space before the name, for PHP", "{query.key}", querying("key=real"), querying("+key=real&key=junk"), gone},
		{"the end of a C string, for PHP", "{query.key}", querying("key=real"), querying("key%00x=real&key=junk"), gone},
		{"another name alone", "{query.key}", querying("key=real"), querying("KEY=junk"), gone},
		{"an array", "{query.key}", querying("key=real"), querying("key=junk&key[]=real"), gone},
		{"an object", "{query.key}", querying("key=real"), querying("key=junk&key%5Bx%5D=real"), gone},
		{"a semicolon for an ampersand", "{query.key}", querying("key=real"), querying("a=1;key=real&key=junk"), gone},
		{"a parameter that Go drops", "{query.key}", querying("key=real"), querying("key=%zz&key=real"), gone},
		{"an encoded value", "{query.key}", querying("key=real"), querying("key=re%61l"), same},
		{"other parameters, in any order", "{query.key}", querying("key=real"), querying("b=2&key=real&a=1&keys=junk"), same},

		{"a host in another case", "{client_ip}{host}", hosted("example.com"), hosted("eXample.COM"), same},
		{"a host with the root's dot", "{client_ip}{host}", hosted("example.com"), hosted("example.com."), same},
		{"a host with any port", "{client_ip}{host}", hosted("example.com"), hosted("example.com:12345"), same},
		{"an address in brackets", "{client_ip}{host}", hosted("[2001:db8::1]:443"), hosted("[2001:db8::1]"), same},
		{"a host label in another case", "{client_ip}{labels.1}", hosted("example.com"), hosted("eXample.com"), same},
		{"a server name in another case", "{client_ip}{http.request.tls.server_name}",
			secured(tls.ConnectionState{HandshakeComplete: true, ServerName: "example.com"}),
			secured(tls.ConnectionState{HandshakeComplete: true, ServerName: "Example.com"}), same},
		{"an invented method", "{client_ip}{method}", methodically("JUNK1"), methodically("JUNK2"), same},
	} {
		t.Run(tc.attack, func(t *testing.T) {
			k := parsed(t, tc.key, 32, 64)
			if tc.want == gone {
				known(t, k, tc.honest)
				missing(t, k, tc.disguise)
			} else if known(t, k, tc.honest) != known(t, k, tc.disguise) {
				t.Errorf("%s: the disguise makes another client", tc.key)
			}
		})
	}
}

func TestKeyMethodsAreNotOne(t *testing.T) {
	k := parsed(t, "{method}", 32, 64)
	if known(t, k, methodically("GET")) == known(t, k, methodically("POST")) || known(t, k, methodically("GET")) == known(t, k, methodically("get")) {
		t.Error("GET is taken for another method")
	}
}

func TestKeyMissing(t *testing.T) {
	certificate := &x509.Certificate{Raw: []byte("x"), Subject: pkix.Name{CommonName: "c"}, SerialNumber: big.NewInt(1)}
	mutual := secured(tls.ConnectionState{HandshakeComplete: true, PeerCertificates: []*x509.Certificate{certificate}})
	anonymous := secured(tls.ConnectionState{HandshakeComplete: true})
	early := secured(tls.ConnectionState{})
	for _, tc := range []struct {
		reason string
		key    string
		edits  []edit
	}{
		{"nobody knows it", "{client_ip}-{tier}", nil},
		{"a variable that is not set", "{vars.tenant}", nil},
		{"no login", "{http.auth.user.id}", nil},
		{"no header", "{client_ip}-{header.X}", nil},
		{"an empty header", "{header.X}", []edit{with("X", "")}},
		{"a header of space", "{header.X}", []edit{with("X", " \t")}},
		{"a header without lines", "{header.X}", []edit{with("X")}},
		{"no cookie", "{cookie.x}", nil},
		{"another cookie", "{cookie.x}", []edit{with("Cookie", "xx=1; y=x")}},
		{"an empty cookie", "{cookie.x}", []edit{with("Cookie", "x=")}},
		{"a quoted empty cookie", "{cookie.x}", []edit{with("Cookie", `x=""`)}},
		{"no parameter", "{query.x}", nil},
		{"an empty parameter", "{query.x}", []edit{querying("x=")}},
		{"a parameter without a value", "{query.x}", []edit{querying("x")}},
		{"a broken parameter", "{query.x}", []edit{querying("x=%zz")}},
		{"no query", "{query}", nil},
		{"a Unix socket", "{client_ip}", []edit{from("@")}},
		{"the other end is a Unix socket", "{remote_host}", []edit{from("/run/x.sock")}},
		{"no address at all, as in HTTP/3", "{remote_host}", []edit{from("")}},
		{"an address in early data is not proven", "{remote_host}", []edit{early}},
		{"nor in Caddy's own prefix form, which does not look", "{http.request.remote.host/32,64}", []edit{early}},
		{"a network name is no address", "{remote_host}", []edit{from("localhost:1")}},
		{"no such part of the path", "{path.7}", nil},
		{"no such label", "{labels.7}", nil},
		{"no TLS", "{tls_version}", nil},
		{"no TLS, no certificate", "{tls_client_fingerprint}", nil},
		{"no certificate, which Caddy gives a fingerprint", "{tls_client_fingerprint}", []edit{anonymous}},
		{"no certificate, whose number Caddy calls <nil>", "{tls_client_serial}", []edit{anonymous}},
		{"no certificate, which Caddy prints", "{tls_client_certificate_pem}", []edit{anonymous}},
		{"a certificate without names, which Caddy calls []", "{http.request.tls.client.san.dns_names}", []edit{mutual}},
		{"or without the first", "{http.request.tls.client.san.dns_names.0}", []edit{mutual}},
	} {
		t.Run(tc.reason, func(t *testing.T) { missing(t, parsed(t, tc.key, 32, 64), tc.edits...) })
	}
	known(t, parsed(t, "{tls_client_fingerprint}{tls_client_serial}{tls_client_subject}", 32, 64), mutual)
}

// TestKeyMissingValuesOfOthers is for what handlers and plugins may set that prints as something and says nothing.
func TestKeyMissingValuesOfOthers(t *testing.T) {
	k := parsed(t, "{vars.x}", 32, 64)
	for _, value := range []any{nil, "", []string{}, []string(nil), map[string]int{}, (*big.Int)(nil), (*strings.Builder)(nil), []byte{}} {
		r, repl := arrived()
		caddyhttp.SetVar(r.Context(), "x", value)
		if _, ok := k.identity(r, repl, newHasher("")); ok {
			t.Errorf("%#v is a client", value)
		}
	}
	for _, value := range []any{"x", 0, false, 1.5, []string{"x"}, big.NewInt(1)} {
		r, repl := arrived()
		caddyhttp.SetVar(r.Context(), "x", value)
		if _, ok := k.identity(r, repl, newHasher("")); !ok {
			t.Errorf("%#v is no client", value)
		}
	}
}

// TestClientIPIsTheVariable holds the short way to the client's address to what the placeholder says.
func TestClientIPIsTheVariable(t *testing.T) {
	for _, value := range []any{"192.0.2.7", "2001:db8::7", "", nil, "192.0.2.7:80", net.ParseIP("192.0.2.7"), 7} {
		r, repl := arrived()
		caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, value)
		address, ok := clientIP(r)
		said, _ := repl.GetString(nameClientIP)
		if want := net.ParseIP(said) != nil; ok != want || ok && address.String() != said {
			t.Errorf("%v: got %v, the placeholder says %q", value, address, said)
		}
	}
}

// identifying serves requests with the ID of their key, or nothing if it is missing.
func identifying(k *keyTemplate) *httptest.Server {
	return httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		repl := caddy.NewReplacer()
		r = caddyhttp.PrepareRequest(r, repl, w, new(caddyhttp.Server))
		if id, ok := k.identity(r, repl, newHasher("")); ok {
			fmt.Fprintf(w, "%s %x", r.Proto, id)
		}
	}))
}

// TestKeySpaceOverHTTP2 is the attack that made headers be trimmed: HTTP/1 cannot deliver space around a value, HTTP/2 can.
func TestKeySpaceOverHTTP2(t *testing.T) {
	server := identifying(parsed(t, "{header.X-Api-Key}", 32, 64))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	answers := make(map[string]bool)
	for _, value := range []string{"real", " real", "real  ", "\treal\t"} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header["X-Api-Key"] = []string{value}
		response, err := server.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		answers[string(body)] = true
	}
	for answer := range answers {
		if len(answers) != 1 || !strings.HasPrefix(answer, "HTTP/2.0 ") {
			t.Errorf("space makes other clients: %q", answer)
		}
	}
}

// TestServerTakesHeadersOut sends the headers that keys must not name because they are never there.
func TestServerTakesHeadersOut(t *testing.T) {
	headers := make(chan http.Header, 1)
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { headers <- r.Header }))
	defer server.Close()
	connection, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer connection.Close()
	fmt.Fprint(connection, "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\nX-Other: x\r\n\r\n0\r\nX: y\r\n\r\n")
	if _, err := http.ReadResponse(bufio.NewReader(connection), nil); err != nil {
		t.Fatal(err)
	}
	got := <-headers
	for name, p := range placeholders {
		field, ok := strings.CutPrefix(name, prefixHeader)
		if ok && strings.HasPrefix(p.refusal, takenOut) && got.Get(field) != "" {
			t.Errorf("the server leaves %s: %q", field, got.Get(field))
		}
	}
	if got.Get("X-Other") == "" {
		t.Error("no header arrived at all")
	}
}
