package ratelimit

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"pgregory.net/rapid"
)

// edit changes a request before Caddy prepares it.
type edit func(*http.Request)

func from(remote string) edit { return func(r *http.Request) { r.RemoteAddr = remote } }

func with(field string, lines ...string) edit {
	return func(r *http.Request) { r.Header[http.CanonicalHeaderKey(field)] = lines }
}

func querying(raw string) edit { return func(r *http.Request) { r.URL.RawQuery = raw } }

// arrived returns a request the way a handler gets it from Caddy's server.
func arrived(edits ...edit) (*http.Request, *caddy.Replacer) {
	r := httptest.NewRequest(http.MethodGet, "http://example.com/dir/file.txt", nil)
	r.RemoteAddr = "192.0.2.1:1234"
	for _, e := range edits {
		e(r)
	}
	local := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 9), Port: 443}
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, local))
	repl := caddy.NewReplacer()
	return caddyhttp.PrepareRequest(r, repl, httptest.NewRecorder(), new(caddyhttp.Server)), repl
}

func parsed(t testing.TB, text string, v4, v6 int) *keyTemplate {
	t.Helper()
	k, err := parseKey(text, v4, v6)
	if err != nil {
		t.Fatalf("parsing the key %s: %v", text, err)
	}
	return k
}

// known returns the ID of a request that must have one.
func known(t testing.TB, k *keyTemplate, edits ...edit) ID {
	t.Helper()
	r, repl := arrived(edits...)
	id, ok := k.identity(r, repl, newHasher(""))
	if !ok {
		t.Fatalf("%s: a part is missing", k.canonical)
	}
	return id
}

// missing fails the test if the request has an ID.
func missing(t testing.TB, k *keyTemplate, edits ...edit) {
	t.Helper()
	r, repl := arrived(edits...)
	if _, ok := k.identity(r, repl, newHasher("")); ok {
		t.Errorf("%s: nothing is missing, it is %q", k.canonical, k.plain(r, repl))
	}
}

func TestKeyGroupsAddresses(t *testing.T) {
	for _, tc := range []struct {
		reason       string
		key          string
		v4, v6       int
		one, another string
		same         bool
	}{
		{"every IPv4 address is a client", "{client_ip}", 32, 64, "192.0.2.1:1", "192.0.2.2:1", false},
		{"ports are no clients", "{client_ip}", 32, 64, "192.0.2.1:1", "192.0.2.1:2", true},
		{"a /24 is a client", "{client_ip}", 24, 64, "192.0.2.1:1", "192.0.2.255:1", true},
		{"another /24 is another", "{client_ip}", 24, 64, "192.0.2.1:1", "192.0.3.1:1", false},
		{"a /64 is a client", "{client_ip}", 32, 64, "[2001:db8::1]:1", "[2001:db8::ffff:ffff:ffff:ffff]:1", true},
		{"another /64 is another", "{client_ip}", 32, 64, "[2001:db8::1]:1", "[2001:db8:0:1::1]:1", false},
		{"a /56 is a client", "{client_ip}", 32, 56, "[2001:db8:0:0::1]:1", "[2001:db8:0:ff::1]:1", true},
		{"a /128 if wanted", "{client_ip}", 32, 128, "[2001:db8::1]:1", "[2001:db8::2]:1", false},
		{"mapped IPv4 is IPv4", "{client_ip}", 32, 64, "192.0.2.1:1", "[::ffff:192.0.2.1]:1", true},
		{"mapped IPv4 in hexadecimal as well", "{client_ip}", 32, 64, "192.0.2.1:1", "[::ffff:c000:201]:1", true},
		{"mapped IPv4 is not one /64", "{client_ip}", 32, 64, "[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:1", false},
		{"behind a NAT64 gateway is IPv4", "{client_ip}", 32, 64, "192.0.2.1:1", "[64:ff9b::192.0.2.1]:1", true},
		{"a NAT64 gateway is not one /64", "{client_ip}", 32, 64, "[64:ff9b::192.0.2.1]:1", "[64:ff9b::192.0.2.2]:1", false},
		{"next to the NAT64 prefix is IPv6", "{client_ip}", 32, 64, "[64:ff9b:0:0:0:1:c000:201]:1", "[64:ff9b::1:c000:202]:1", true},
		{"interfaces are no clients", "{client_ip}", 32, 128, "[fe80::1%eth0]:1", "[fe80::1%eth1]:1", true},
		{"interfaces of the other end neither", "{remote_host}", 32, 128, "[fe80::1%eth0]:1", "[fe80::1%eth1]:1", true},
		{"interfaces of mapped IPv4 neither", "{remote_host}", 32, 64, "[::ffff:192.0.2.1%eth0]:1", "192.0.2.1:1", true},
		{"the way to write IPv6 is no client", "{remote_host}", 32, 128, "[2001:DB8:0::1]:1", "[2001:db8::1]:1", true},
		{"no bit, one client", "{client_ip}", 0, 64, "192.0.2.1:1", "198.51.100.1:1", true},
		{"no bit of IPv4 is not no bit of IPv6", "{client_ip}", 0, 0, "192.0.2.1:1", "[2001:db8::1]:1", false},
		{"the other end is grouped too", "{http.request.remote.host}", 24, 64, "192.0.2.1:1", "192.0.2.2:1", true},
		{"inside of a longer key too", "{host}-{client_ip}-{method}", 24, 64, "192.0.2.1:1", "192.0.2.2:1", true},
		{"twice in a key too", "{client_ip}{remote_host}", 32, 64, "[2001:db8::1]:1", "[2001:db8::2]:1", true},
		{"Caddy's own prefix counts, not the zone's", "{http.request.remote.host/24,48}", 32, 64, "192.0.2.1:1", "192.0.2.2:1", true},
		{"Caddy's own prefix for IPv6", "{http.request.remote.host/24,48}", 32, 64, "[2001:db8::1]:1", "[2001:db8:0:ffff::]:1", true},
		{"Caddy's own prefix unmaps, what Caddy does not", "{http.request.remote.host/32,64}", 8, 8, "[::ffff:192.0.2.1]:1", "[::ffff:192.0.2.2]:1", false},
		{"Caddy's own prefix, one for both", "{http.request.remote.host/24}", 32, 64, "192.0.2.1:1", "192.0.2.2:1", true},
	} {
		t.Run(tc.reason, func(t *testing.T) {
			k := parsed(t, tc.key, tc.v4, tc.v6)
			if same := known(t, k, from(tc.one)) == known(t, k, from(tc.another)); same != tc.same {
				t.Errorf("%s with /%d and /%d: %s and %s are the same: %t", tc.key, tc.v4, tc.v6, tc.one, tc.another, same)
			}
		})
	}
}

func TestKeyThousandAddressesOfOneNetwork(t *testing.T) {
	k := parsed(t, "{client_ip}-{host}", 32, 64)
	ids := make(map[ID]bool)
	for i := range 1000 {
		address := net.IP{0x20, 0x01, 0xd, 0xb8, 0, 0, 0, 0, byte(i), byte(i >> 2), byte(i * 7), 0, 0, 0, byte(i >> 8), byte(i)}
		ids[known(t, k, from(net.JoinHostPort(address.String(), "1")))] = true
	}
	if len(ids) != 1 {
		t.Errorf("1000 addresses of a /64 are %d clients", len(ids))
	}
}

func TestKeyExpressionIsPartOfTheID(t *testing.T) {
	for _, tc := range []struct {
		reason   string
		one      string
		v4, v6   int
		another  string
		w4, w6   int
		sameness bool
	}{
		{"the same in two zones", "{client_ip}-{host}", 32, 64, "{client_ip}-{host}", 32, 64, true},
		{"a shorthand and its long form", "{client_ip}-{host}", 32, 64, "{http.vars.client_ip}-{http.request.host}", 32, 64, true},
		{"nothing is the client's address", "", 32, 64, "{client_ip}", 32, 64, true},
		{"header names have no case", "{header.x-api-key}", 32, 64, "{http.request.header.X-Api-Key}", 32, 64, true},
		{"cookie names have no case", "{cookie.SID}", 32, 64, "{http.request.cookie.sid}", 32, 64, true},
		{"prefixes of no address in the key", "{header.X-Api-Key}", 32, 64, "{header.X-Api-Key}", 24, 56, true},
		{"prefixes of the other address family", "{client_ip}", 32, 64, "{client_ip}", 32, 56, true},
		{"the prefix, though the network's address is the same", "{client_ip}", 32, 64, "{client_ip}", 31, 64, false},
		{"other text", "a{client_ip}", 32, 64, "b{client_ip}", 32, 64, false},
		{"text at another place", "{client_ip}a", 32, 64, "a{client_ip}", 32, 64, false},
		{"another placeholder with the same value", "{client_ip}", 32, 64, "{remote_host}", 32, 64, false},
		{"text that looks like a placeholder", `\{method\}{client_ip}`, 32, 64, `{method}{client_ip}`, 32, 64, false},
		{"Caddy's prefix, the same as the zone's", "{remote_host}", 24, 64, "{http.request.remote.host/24,64}", 8, 8, true},
	} {
		t.Run(tc.reason, func(t *testing.T) {
			request := []edit{from("192.0.2.0:1"), with("X-Api-Key", "k"), with("Cookie", "sid=s")}
			one := known(t, parsed(t, tc.one, tc.v4, tc.v6), request...)
			another := known(t, parsed(t, tc.another, tc.w4, tc.w6), request...)
			if (one == another) != tc.sameness {
				t.Errorf("%q and %q have the same ID: %t", tc.one, tc.another, one == another)
			}
		})
	}
}

func TestKeyPartsCannotBeConfused(t *testing.T) {
	k := parsed(t, "{header.A}_{header.B}", 32, 64)
	for _, tc := range []struct{ reason, a1, b1, a2, b2 string }{
		{"a separator inside of a value", "a_b", "c", "a", "b_c"},
		{"letters that move", "ab", "c", "a", "bc"},
		{"a placeholder as a value", "{header.B}", "c", "c", "{header.B}"},
		{"exchanged", "a", "b", "b", "a"},
	} {
		t.Run(tc.reason, func(t *testing.T) {
			if known(t, k, with("A", tc.a1), with("B", tc.b1)) == known(t, k, with("A", tc.a2), with("B", tc.b2)) {
				t.Errorf("(%q, %q) and (%q, %q) are the same client", tc.a1, tc.b1, tc.a2, tc.b2)
			}
		})
	}
}

// TestKeySplitsAreInjective cuts one text into the values of a key in two ways: the IDs are the same only if the cuts are.
func TestKeySplitsAreInjective(t *testing.T) {
	k := parsed(t, "{http.vars.a}{http.vars.b}{http.vars.c}", 32, 64)
	h := newHasher("")
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringN(3, 600, 1200).Draw(t, "text")
		split := func(label string) ([2]int, ID) {
			first := rapid.IntRange(1, len(text)-2).Draw(t, label+" first")
			second := rapid.IntRange(first+1, len(text)-1).Draw(t, label+" second")
			r, repl := arrived()
			caddyhttp.SetVar(r.Context(), "a", text[:first])
			caddyhttp.SetVar(r.Context(), "b", text[first:second])
			caddyhttp.SetVar(r.Context(), "c", text[second:])
			id, ok := k.identity(r, repl, h)
			if !ok {
				t.Fatal("a part is missing")
			}
			return [2]int{first, second}, id
		}
		cuts1, id1 := split("one")
		cuts2, id2 := split("another")
		if (cuts1 == cuts2) != (id1 == id2) {
			t.Fatalf("cuts at %v and %v: the IDs are the same: %t", cuts1, cuts2, id1 == id2)
		}
	})
}

// TestIDLayout holds the IDs to what they are made of: nodes of two versions work side by side during an update, and would
// count the same client twice under two IDs.
func TestIDLayout(t *testing.T) {
	long := strings.Repeat("long ", 1000) + "."
	values := [][]byte{
		[]byte("{http.vars.client_ip}/{http.request.header.X}"),
		{192, 0, 2, 0, 24},
		[]byte(long),
	}
	var message []byte
	for _, v := range values {
		message = append(binary.BigEndian.AppendUint64(message, uint64(len(v))), v...)
	}
	sum := sha256.Sum256(message)
	mac := hmac.New(sha256.New, []byte("secret"))
	mac.Write(message)

	k := parsed(t, "{client_ip}/{header.x}", 24, 64)
	r, repl := arrived(with("X", long))
	for secret, want := range map[string][]byte{"": sum[:], "secret": mac.Sum(nil)} {
		h := newHasher(secret)
		for range 3 { // a hash is used again
			if id, ok := k.identity(r, repl, h); !ok || !slices.Equal(id[:], want[:16]) {
				t.Errorf("with secret %q: got %x, want %x", secret, id, want[:16])
			}
		}
	}
}

func TestKeyOfAnIPv6Network(t *testing.T) {
	k := parsed(t, "{client_ip}", 32, 56)
	expression := "{http.vars.client_ip}"
	message := append(binary.BigEndian.AppendUint64(nil, uint64(len(expression))), expression...)
	message = binary.BigEndian.AppendUint64(message, 17)
	message = append(message, 0x20, 0x01, 0x0d, 0xb8, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 56)
	sum := sha256.Sum256(message)
	if id := known(t, k, from("[2001:db8:1:203:4::5]:6")); !slices.Equal(id[:], sum[:16]) {
		t.Errorf("got %x, want %x", id, sum[:16])
	}
}

func TestKeySecret(t *testing.T) {
	k := parsed(t, "{client_ip}", 32, 64)
	r, repl := arrived()
	ids := make(map[ID]string)
	for _, secret := range []string{"", "one", "another"} {
		id, _ := k.identity(r, repl, newHasher(secret))
		if other, taken := ids[id]; taken {
			t.Errorf("the secrets %q and %q give the same ID", secret, other)
		}
		ids[id] = secret
	}
}

func TestKeyTraits(t *testing.T) {
	const yes, no = true, false
	for _, tc := range []struct {
		key                              string
		address, client, written, varies bool
		reason                           string
	}{
		{"{client_ip}", yes, yes, no, no, "the address of the client"},
		{"{http.vars.client_ip}", yes, yes, no, no, "its long form"},
		{"{remote_host}", yes, yes, no, no, "the address of the other end"},
		{"{http.request.remote.host/24,64}", yes, yes, no, no, "grouped by Caddy's own form"},
		{"{http.request.remote.host/0}", yes, no, no, no, "no bit of the address counts"},
		{"all", no, no, no, no, "a constant"},
		{"{host}", no, no, no, no, "a site is not a client"},
		{"{labels.1}", no, no, no, no, "part of a site neither"},
		{"{scheme}{method}{path}", no, no, no, no, "what is asked for"},
		{"{path.0}{orig_path}{file}", no, no, no, no, "parts of it"},
		{"{http.request.local.port}", no, no, no, no, "a port of the server"},
		{"{system.os}", no, no, no, no, "of this machine"},
		{"{uri}", no, no, yes, yes, "anybody can ask for any URI"},
		{"{query}", no, no, yes, yes, "or query"},
		{"{client_ip}{uri}", yes, yes, no, yes, "an address, but any query makes a new bucket"},
		{"{header.X-Api-Key}", no, yes, yes, yes, "a header is the client's word"},
		{"{cookie.session}", no, yes, yes, yes, "so is a cookie"},
		{"{query.key}", no, yes, yes, yes, "so is a parameter"},
		{"{host}{header.X-Api-Key}", no, yes, yes, yes, "a site adds nothing to it"},
		{"{client_ip}{header.User-Agent}", yes, yes, no, yes, "an address, but any header makes a new bucket"},
		{"{header.X-Api-Key}{http.auth.user.id}", no, yes, no, yes, "a login is more than a word"},
		{"{http.auth.user.id}", no, yes, no, no, "a login"},
		{"{vars.tenant}", no, yes, no, no, "whatever a handler said"},
		{"{tier}", no, yes, no, no, "from map"},
		{"{http.vars.trusted_proxy}", no, no, no, no, "yes or no"},
		{"{re.tenant.1}", no, yes, no, no, "whatever a matcher caught"},
		{"{rp.header.Remote-User}", no, yes, no, no, "what forward_auth found out"},
		{"{tls_client_fingerprint}", no, yes, no, no, "a certificate"},
		{"{tls_version}", no, no, no, no, "a few values for all"},
		{"{http.request.tls.server_name}", no, no, no, no, "a site"},
	} {
		t.Run(tc.key, func(t *testing.T) {
			k := parsed(t, tc.key, 32, 64)
			for _, check := range []struct {
				name      string
				got, want bool
			}{
				{"holdsAddress", k.holdsAddress(), tc.address},
				{"holdsClient", k.holdsClient(), tc.client},
				{"clientWritten", k.clientWritten(), tc.written},
				{"clientVaries", k.clientVaries(), tc.varies},
			} {
				if check.got != check.want {
					t.Errorf("%s: %s is %t", tc.reason, check.name, check.got)
				}
			}
		})
	}
	if parsed(t, "{client_ip}", 0, 64).holdsClient() {
		t.Error("with ipv4_prefix 0, a block for one is a block for all of IPv4")
	}
}

func TestKeyNames(t *testing.T) {
	k := parsed(t, "x-{client_ip}-{header.x-api-key}-{client_ip}-{tier}", 32, 64)
	want := []string{"http.vars.client_ip", "http.request.header.X-Api-Key", "tier"}
	if got := k.names(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestKeyPlain(t *testing.T) {
	t.Setenv("SHARD", "hidden")
	for _, tc := range []struct{ reason, key, want string }{
		{"an address", "{client_ip}", "192.0.2.1"},
		{"text around", "ip={client_ip}!", "ip=192.0.2.1!"},
		{"a network", "{http.request.remote.host/24}", "192.0.2.0/24"},
		{"escaped braces", `\{{method}\}`, "{GET}"},
		{"a constant may be a secret", "{env.SHARD}-{host}", "{env.SHARD}-example.com"},
		{"missing", "{http.auth.user.id}-{host}", "-example.com"},
		{"long", "{header.Long}", strings.Repeat("x", maxPlain) + "…"},
	} {
		t.Run(tc.reason, func(t *testing.T) {
			r, repl := arrived(with("Long", strings.Repeat("x", 5000)))
			if got := parsed(t, tc.key, 32, 64).plain(r, repl); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// TestKeyReadsTextLikeCaddy holds the parser to Caddy's replacer.
func TestKeyReadsTextLikeCaddy(t *testing.T) {
	piece := rapid.SampledFrom([]string{"a", "b-", "_", `\`, `\\`, `\{`, `\}`, `\\{`, "{x}", "{y}", "{x.y}", "ü", " "})
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(piece, 1, 12).Draw(t, "pieces"), "")
		k, err := parseKey(text, 32, 64)
		if err != nil {
			return // a backslash before a placeholder
		}
		r, repl := arrived()
		for _, name := range []string{"x", "y", "x.y"} {
			repl.Set(name, "("+name+")")
		}
		if got, want := k.plain(r, repl), repl.ReplaceAll(text, ""); got != want {
			t.Fatalf("%q: got %q, Caddy says %q", text, got, want)
		}
	})
}

func TestKeyConstants(t *testing.T) {
	t.Setenv("SHARD", "a")
	k := parsed(t, "{env.SHARD}-{client_ip}", 32, 64)
	before := known(t, k)
	t.Setenv("SHARD", "b")
	if known(t, k) != before {
		t.Error("a constant was read again for a request")
	}
	if known(t, parsed(t, "{env.SHARD}-{client_ip}", 32, 64)) == before {
		t.Error("the value of a constant is not part of the ID")
	}
}

// TestKeyLongValueCostsNoMemory sends what a client may at most: a header of a megabyte.
func TestKeyLongValueCostsNoMemory(t *testing.T) {
	h := newHasher("secret")
	for _, key := range []string{"{client_ip}-{header.X}", "{cookie.x}", "{query.x}", "{header.Authorization}"} {
		k := parsed(t, key, 32, 64)
		long := strings.Repeat("x", 1<<20)
		r, repl := arrived(with("X", long), with("Cookie", "x="+long), with("Authorization", "Bearer  "+long), querying("x="+long))
		const rounds = 20
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range rounds {
			if _, ok := k.identity(r, repl, h); !ok {
				t.Fatalf("%s: a part is missing", key)
			}
		}
		runtime.ReadMemStats(&after)
		if each := (after.TotalAlloc - before.TotalAlloc) / rounds; each > 8<<10 {
			t.Errorf("%s: a value of 1 MiB costs %d bytes of memory", key, each)
		}
	}
}

func TestKeyAllocations(t *testing.T) {
	for _, tc := range []struct {
		key string
		max float64
	}{
		{"{client_ip}", 0},
		{"{client_ip}-{header.X-Api-Key}", 0},
		{"{header.Authorization}", 0},
		{"{cookie.session}", 0},
		{"{query.key}", 0},
		{"{client_ip}-{http.request.host}", 2}, // Caddy's, while it looks for a port
	} {
		k, h := parsed(t, tc.key, 32, 64), newHasher("secret")
		r, repl := arrived(with("X-Api-Key", "k"), with("Authorization", "Bearer x"), with("Cookie", "a=b; session=s"), querying("a=b&key=k"))
		got := testing.AllocsPerRun(1000, func() {
			if _, ok := k.identity(r, repl, h); !ok {
				t.Fatalf("%s: a part is missing", tc.key)
			}
		})
		if raceEnabled() {
			tc.max += 4 // the race detector makes sync.Pool forget
		}
		if got > tc.max {
			t.Errorf("%s: %v allocations, want at most %v", tc.key, got, tc.max)
		}
	}
}

func raceEnabled() bool {
	info, _ := debug.ReadBuildInfo()
	return slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

func TestKeyConcurrently(t *testing.T) {
	k, h := parsed(t, "{client_ip}-{header.X}", 32, 64), newHasher("secret")
	r, repl := arrived(with("X", strings.Repeat("x", 1000)))
	want, _ := k.identity(r, repl, h)
	done := make(chan ID)
	for range 8 {
		go func() {
			var id ID
			for range 500 {
				if id, _ = k.identity(r, repl, h); id != want {
					break
				}
			}
			done <- id
		}()
	}
	for range 8 {
		if got := <-done; got != want {
			t.Errorf("got %x, want %x", got, want)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	for _, text := range []string{
		"", "{client_ip}", "{", "}", "{}", `\{`, "{{}}", "{http.request.remote_ip}", "{http.request.remote.host/24,64}", "{http.request.header.}",
		"{http.request.tls.client.san.uris.0}", "{http.request.uri.path.-1}", "{re.x.1}{$X}{env.PATH}", "{http.request.header.*}",
	} {
		f.Add(text)
	}
	h := newHasher("")
	r, repl := arrived(with("X", "x"), with("Cookie", "x=y"), querying("x=y"))
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "{file.") {
			return // whatever is on this disk
		}
		k, err := parseKey(text, 32, 64)
		if err != nil {
			return
		}
		k.identity(r, repl, h)
		k.plain(r, repl)
		if again, err := parseKey(k.canonical, 32, 64); err != nil || again.canonical != k.canonical {
			t.Errorf("%q became %q, and that becomes %v %v", text, k.canonical, again, err)
		}
	})
}

func FuzzKeyValues(f *testing.F) {
	f.Add("session=x", "key=x", "Bearer x", "192.0.2.1:1")
	f.Add(`Session="%zz; session`, "key=%zz&KEY;key[]=1", "  Bearer\t", "[::ffff:1.2.3.4%x]")
	keys := []*keyTemplate{}
	for _, text := range []string{"{cookie.session}", "{query.key}", "{header.Authorization}", "{remote_host}{client_ip}"} {
		keys = append(keys, parsed(f, text, 32, 64))
	}
	h := newHasher("")
	f.Fuzz(func(t *testing.T, cookies, query, authorization, remote string) {
		r, repl := arrived(with("Cookie", cookies), with("Authorization", authorization), querying(query), from(remote))
		for _, k := range keys {
			id, ok := k.identity(r, repl, h)
			if again, okAgain := k.identity(r, repl, h); id != again || ok != okAgain {
				t.Errorf("%s: %x %t, then %x %t", k.canonical, id, ok, again, okAgain)
			}
		}
	})
}

func BenchmarkIdentity(b *testing.B) {
	for _, key := range []string{"{client_ip}", "{client_ip}-{header.X-Api-Key}", "{cookie.session}", "{client_ip}-{http.request.host}"} {
		b.Run(key, func(b *testing.B) {
			k, h := parsed(b, key, 32, 64), newHasher("secret")
			r, repl := arrived(with("X-Api-Key", "k"), with("Cookie", "a=b; session=s"))
			b.ReportAllocs()
			for b.Loop() {
				k.identity(r, repl, h)
			}
		})
	}
}
