package ratelimit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
)

// actedEndpoint plays the admin endpoint: it notes what it is asked, and gives the same answer to everything.
type actedEndpoint struct {
	method, uri, body string
	status            int
	answer            string
}

func (e *actedEndpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.method, e.uri, e.body = r.Method, r.URL.RequestURI(), string(body)
	w.WriteHeader(e.status)
	_, _ = io.WriteString(w, e.answer)
}

// runCommand runs `caddy rate-limit` with arguments, and returns what it prints.
func runCommand(args ...string) (string, error) {
	cmd := &cobra.Command{Use: "rate-limit", SilenceUsage: true}
	addCommands(cmd)
	var out bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(io.Discard)
	cmd.SetArgs(args)
	err := cmd.Execute()
	return out.String(), err
}

// asked runs a command against an endpoint.
func (e *actedEndpoint) asked(t *testing.T, args ...string) (string, error) {
	t.Helper()
	server := httptest.NewServer(e)
	defer server.Close()
	return runCommand(append(args, "--address", server.Listener.Addr().String())...)
}

// What is typed is what is asked.
func TestCommandsAsk(t *testing.T) {
	for _, c := range []struct {
		typed             string
		method, uri, body string
	}{
		{"status", "GET", "/rate_limit/status", ""},
		{"zones", "GET", "/rate_limit/zones", ""},
		{"inspect login 203.0.113.7", "POST", "/rate_limit/inspect", `{"zone":"login","key":["203.0.113.7"]}`},
		{"inspect login --id abc", "POST", "/rate_limit/inspect", `{"id":"abc","zone":"login"}`},
		{"inspect api 2001:db8::1 bob", "POST", "/rate_limit/inspect", `{"zone":"api","key":["2001:db8::1","bob"]}`},
		{"blocks", "GET", "/rate_limit/blocks", ""},
		{"blocks --after x/y", "GET", "/rate_limit/blocks?after=x%2Fy", ""},
		{"blocks --limit 5", "GET", "/rate_limit/blocks?limit=5", ""},
		{"block login 203.0.113.7 --for 30m", "POST", "/rate_limit/block", `{"zone":"login","key":["203.0.113.7"],"for":"30m"}`},
		{"block --id abc --for 1h --group api", "POST", "/rate_limit/block", `{"id":"abc","for":"1h","group":"api"}`},
		{"unblock login 203.0.113.7", "POST", "/rate_limit/unblock", `{"zone":"login","key":["203.0.113.7"]}`},
		{"unblock --id abc --amnesty 10m --group=", "POST", "/rate_limit/unblock", `{"id":"abc","group":"","amnesty":"10m"}`},
		{"reset login 203.0.113.7", "POST", "/rate_limit/reset", `{"zone":"login","key":["203.0.113.7"]}`},
		{"override", "GET", "/rate_limit/override", ""},
		{"override log&in allow --for 15m", "POST", "/rate_limit/override", `{"zone":"log\u0026in","action":"allow","for":"15m"}`},
		{"override log&in --end", "DELETE", "/rate_limit/override?zone=log%26in", ""},
		{
			"explain GET https://example.com/ -H x-key:a:b -H X-Key:c --client-ip 203.0.113.7", "POST", "/rate_limit/explain",
			`{"method":"GET","url":"https://example.com/","headers":{"X-Key":["a:b","c"]},"client_ip":"203.0.113.7"}`,
		},
		{"top --limit 3", "GET", "/rate_limit/top?limit=3", ""},
	} {
		e := &actedEndpoint{status: http.StatusOK, answer: `{"a":[1]}`}
		got, err := e.asked(t, append(strings.Fields(c.typed), "--json")...)
		if err != nil || got != "{\n  \"a\": [\n    1\n  ]\n}\n" {
			t.Errorf("%s: prints %q, %v", c.typed, got, err)
		}
		if e.method != c.method || e.uri != c.uri || e.body != c.body {
			t.Errorf("%s: asks\n%s %s %s, want\n%s %s %s", c.typed, e.method, e.uri, e.body, c.method, c.uri, c.body)
		}
	}
}

// What is wrong is said in one line that names what would be right, and nothing is asked.
func TestCommandsTypedWrong(t *testing.T) {
	for typed, want := range map[string]string{
		"statsu":                              "use one of status, zones, inspect",
		"status now":                          `"now" is one argument too many`,
		"inspect":                             "got nothing",
		"inspect login":                       "`login --id <id>`; got login",
		"inspect --id abc":                    "name a zone",
		"inspect login 203.0.113.7 --id abc":  "or a zone and an id",
		"block login 203.0.113.7":             "say for how long, as in `--for 30m`",
		"block login --id abc --for 1m":       "or only an id",
		"unblock login":                       "name a zone and the values of its key",
		"override login":                      "local|deny|allow --for 15m",
		"override login open --for 15m":       "got login open",
		"override login allow":                "say for how long",
		"override login allow --for 1m --end": "`<zone> --end`",
		"explain /login":                      "write a method and a URL",
		"explain GET http://a/ -H nonsense":   `got "nonsense"`,
		"top 5":                               "one argument too many",
		"blocks --limit many":                 "invalid argument",
		"status --where x":                    "unknown flag: --where",
	} {
		e := &actedEndpoint{status: http.StatusOK, answer: "{}"}
		got, err := e.asked(t, strings.Fields(typed)...)
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") || e.method != "" {
			t.Errorf("%s: %v, prints %q, asked %q; want an error with %q", typed, err, got, e.method, want)
		}
	}
}

// Without a command there is help.
func TestCommandHelp(t *testing.T) {
	got, err := runCommand()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range commandNames() {
		if !strings.Contains(got, "\n  "+name) {
			t.Errorf("%s is missing in the help:\n%s", name, got)
		}
	}
}

// The words of the server are the error, and as clean as everything else.
func TestCommandsTellErrors(t *testing.T) {
	for answer, want := range map[string]string{
		`{"error":"there is no zone \"l\u001b[2Jgin\""}`: `there is no zone "l\x1b[2Jgin"`,
		"404 page\u202e not found\n":                     "HTTP 404: 404 page\\u202e not found",
	} {
		e := &actedEndpoint{status: http.StatusNotFound, answer: answer}
		if _, err := e.asked(t, "zones"); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%q: %v, want %q", answer, err, want)
		}
	}
	if _, err := (&actedEndpoint{status: http.StatusOK, answer: `["another version"]`}).asked(t, "status"); err == nil || !strings.Contains(err.Error(), "another version?") {
		t.Errorf("an answer of another kind: %v", err)
	}
	if _, err := runCommand("status", "--address", "unix/"+filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "is Caddy running? --address or --config say where") {
		t.Errorf("nobody there: %v", err)
	}
}

// The admin endpoint may be a unix socket, named by --address or in a configuration.
func TestCommandsOnUnixSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	e := &actedEndpoint{status: http.StatusOK, answer: `{"blocks":[],"more":false}`}
	server := httptest.NewUnstartedServer(e)
	server.Listener = listener
	server.Start()
	defer server.Close()
	config := filepath.Join(t.TempDir(), "caddy.json")
	if err := os.WriteFile(config, fmt.Appendf(nil, `{"admin":{"listen":%q}}`, "unix/"+path), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, where := range [][]string{{"--address", "unix/" + path}, {"--config", config}} {
		if got, err := runCommand(append(where, "blocks")...); err != nil || got != "nobody is blocked\n" {
			t.Errorf("%v: prints %q, %v", where, got, err)
		}
	}
}

// Clients choose their keys; they choose nothing on the terminal of who reads them.
func TestHostileTexts(t *testing.T) {
	for text, want := range map[string]string{
		"203.0.113.7":                                    "203.0.113.7",
		"Zoë 東京 a b":                                     "Zoë 東京 a b",
		"\x1b[2J\x1b]0;title\a":                          `\x1b[2J\x1b]0;title\a`,
		"a\nblocked  no":                                 `a\nblocked \x20no`,
		"a\tb\vc\fd\re\x00\x7f":                          `a\tb\vc\fd\re\x00\x7f`,
		"\u009b31m\u0085":                                `\u009b31m\u0085`,
		"\u202aa\u202bb\u202cc\u202dd\u202ee":            `\u202aa\u202bb\u202cc\u202dd\u202ee`,
		"\u2066a\u2067b\u2068c\u2069d":                   `\u2066a\u2067b\u2068c\u2069d`,
		"\u200ea\u200fb\u061cc":                          `\u200ea\u200fb\u061cc`,
		"\u200ba\u200cb\u200dc\u2060d\ufeffe\u00adf":     `\u200ba\u200cb\u200dc\u2060d\ufeffe\u00adf`,
		"\u2028a\u2029b\u00a0c\u3000d\u2003e":            `\u2028a\u2029b\u00a0c\u3000d\u2003e`,
		"\u3164a\uffa0b\u115fc\u034fd\ufe0fe\U000e0041f": `\u3164a\uffa0b\u115fc\u034fd\ufe0fe\U000e0041f`,
		"\xff\xfea\xc3":                                  `\xff\xfea\xc3`,
		"\ufffd":                                         `\ufffd`,
		`\x1b`:                                           `\\x1b`,
		"it's \"quoted\" 'here'":                         `it's "quoted" 'here'`,
	} {
		if got := clean(text); got != want {
			t.Errorf("%+q is shown as %+q, want %+q", text, got, want)
		}
	}
}

// No text of the server reaches the terminal by any command as it came.
func TestHostileAnswers(t *testing.T) {
	const hostile = "a\x1b[2J\u202eb\nc\u200b"
	group, now := hostile, time.Now()
	client := clientInfo{Zone: hostile, ID: hostile, Source: hostile, Rate: hostile, Group: &group, ForgottenAt: &now}
	zone := zoneInfo{Zone: hostile, Key: hostile, Rate: hostile, Store: hostile, OnStoreError: hostile, Override: hostile, Penalty: &group}
	overrides := []overrideInfo{{Zone: hostile, Action: hostile}}
	for typed, answer := range map[string]any{
		"status": statusInfo{
			Version: hostile, Node: hostile, Pools: []poolInfo{{Pool: hostile}}, Overrides: overrides,
			Stores: []storeInfo{{Redis: hostile, Prefix: hostile, Servers: []serverInfo{{Server: hostile, State: hostile}}}},
		},
		"zones":                    zonesInfo{Zones: []zoneInfo{zone, {Zone: hostile, OnStoreError: "local", ShareRate: hostile}}},
		"inspect a b":              client,
		"blocks":                   blocksInfo{Blocks: []blockInfo{{ID: hostile, Group: hostile, Key: hostile, Store: hostile}}, Errors: []string{hostile}},
		"block a b --for 1m":       blockResult{ID: hostile, Group: hostile, Stores: []string{hostile}},
		"unblock a b":              unblockResult{ID: hostile},
		"reset a b":                resetResult{Zone: hostile, ID: hostile, Reset: []string{hostile}},
		"override":                 overridesInfo{Overrides: overrides},
		"override a deny --for 1m": overrides[0],
		"top":                      topInfo{Enabled: true, Clients: []topClient{{Zone: hostile, ID: hostile, Key: hostile}}},
		"explain GET http://a/": explainInfo{
			Server: hostile, Unsure: []string{hostile}, AnsweredBy: hostile,
			Handlers: []explainedHandler{{
				Verdict: hostile, Error: hostile, Pool: &poolInfo{Pool: hostile},
				Zones: []explainedZone{{Zone: hostile}, {Zone: hostile, Matched: true}, {
					Zone: hostile, Matched: true, Charged: true, Key: hostile, KeyValue: hostile, Verdict: hostile, clientInfo: client,
				}},
			}},
		},
	} {
		encoded, err := json.Marshal(answer)
		if err != nil {
			t.Fatal(err)
		}
		e := &actedEndpoint{status: http.StatusOK, answer: string(encoded)}
		got, err := e.asked(t, strings.Fields(typed)...)
		if err != nil || !strings.Contains(got, `a\x1b[2J\u202eb\nc\u200b`) {
			t.Errorf("%s: %v, prints\n%s", typed, err, got)
		}
		if strings.ContainsAny(got, "\x1b\u202e\u200b") || strings.Contains(got, "b\nc") {
			t.Errorf("%s prints hostile text as it came:\n%+q", typed, got)
		}
	}
}
