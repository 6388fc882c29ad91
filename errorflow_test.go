package ratelimit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"pgregory.net/rapid"
)

func init() {
	caddy.RegisterModule(new(testRefuser))
	caddy.RegisterModule(new(testVerdict))
	caddy.RegisterModule(new(testMark))
	httpcaddyfile.RegisterHandlerDirective("test_refuse", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		t := new(testRefuser)
		err := t.UnmarshalCaddyfile(h.Dispenser)
		return t, err
	})
}

// testRefuser is a handler that has the answers of ours and takes the decision from the request: X-Refuse says why it is
// refused.
type testRefuser struct {
	Answer string `json:"answer,omitempty"`

	answers answerer
}

func (*testRefuser) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_refuse", New: func() caddy.Module { return new(testRefuser) }}
}

// UnmarshalCaddyfile reads `test_refuse [<answer>]`.
func (t *testRefuser) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	d.Args(&t.Answer)
	return nil
}

func (t *testRefuser) Provision(ctx caddy.Context) (err error) {
	t.answers, err = newAnswerer(t.Answer, "", "", 0)
	t.answers.nested = enclosingErrors(ctx)
	return err
}

func (t *testRefuser) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if r.Context().Value(caddyhttp.ErrorCtxKey) != nil {
		return next.ServeHTTP(w, r)
	}
	why := r.Header.Get("X-Refuse")
	if why == "identity" {
		return t.answers.missingIdentity(w, r)
	}
	d := testDecision(Reason(why))
	t.answers.show(w.Header(), &d, new(headerNumbers))
	if d.Allowed {
		return next.ServeHTTP(w, r)
	}
	return t.answers.refuse(w, r, &d)
}

func testDecision(reason Reason) Decision {
	d := Decision{Reason: reason, Zone: "api", Limit: 20, Remaining: 3, RetryAfter: 7 * time.Second, ResetAfter: time.Minute, Now: answerNow}
	if reason == ReasonNone {
		d.Allowed, d.RetryAfter = true, 0
	}
	if reason == ReasonOverloaded {
		d = Decision{Reason: reason, RetryAfter: 5 * time.Second}
	}
	return d
}

// testServer is a Caddy in this process.
type testServer struct {
	t    *testing.T
	addr string
	log  string
}

// serve runs Caddy with sites of port 8080; in fact it listens on a free one.
func serve(t *testing.T, sites string) *testServer {
	t.Helper()
	return serveWith(t, "DEBUG", "", sites)
}

// serveWith does what serve does, with a log of that level, and with more global options.
func serveWith(t *testing.T, level, options, sites string) *testServer {
	t.Helper()
	dir := t.TempDir()
	s := &testServer{t: t, log: filepath.Join(dir, "log")}
	text := fmt.Sprintf(`{
		admin off
		persist_config off
		auto_https off
		storage file_system %s
		storage_clean_interval off
		log {
			output file %s {
				roll_disabled
			}
			level %s
		}
		%s
	}
	%s`, dir, s.log, level, options, sites)
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	if err != nil {
		t.Fatal(err)
	}
	s.load(bytes.ReplaceAll(config, []byte(`":8080"`), []byte(`"127.0.0.1:0"`)))
	return s
}

func (s *testServer) load(config []byte) {
	s.t.Helper()
	if err := caddy.Load(config, true); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			s.t.Error(err)
		}
	})
	app, err := caddy.ActiveContext().App("http")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, server := range app.(*caddyhttp.App).Servers {
		s.addr = server.Listeners()[0].Addr().String()
	}
}

type testAnswer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request to http://<host>/<path> that is refused for a reason.
func (s *testServer) ask(method, url, refuse string) testAnswer {
	s.t.Helper()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", s.addr)
		},
	}, Timeout: 30 * time.Second}
	r, err := http.NewRequest(method, url, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("X-Refuse", refuse)
	res, err := client.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return testAnswer{res.StatusCode, res.Header, string(body)}
}

// errorLines returns the lines of level ERROR that Caddy has logged.
func (s *testServer) errorLines() []string {
	s.t.Helper()
	text, err := os.ReadFile(s.log)
	if err != nil {
		s.t.Fatal(err)
	}
	if !bytes.Contains(text, []byte(`"level":"info"`)) {
		s.t.Fatalf("this is no log of Caddy: %s", text)
	}
	var lines []string
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, `"level":"error"`) {
			lines = append(lines, line)
		}
	}
	return lines
}

const (
	ourLimited     = `{"error":"rate_limited","retry_after":7}`
	ourUnavailable = `{"error":"limiter_unavailable","retry_after":7}`
	ourOverloaded  = `{"error":"overloaded","retry_after":5}`
	ourIdentity    = `{"error":"identity_required"}`
)

func TestWhoAnswers(t *testing.T) {
	const route = `
		header Access-Control-Allow-Origin *
		route {
			test_refuse
			respond "hello"
		}`
	page := func(codes, body string) string { return "handle_errors " + codes + " {\nrespond `" + body + "`\n}\n" }
	site := func(host, inside string) string { return "http://" + host + ":8080 {\n" + inside + "\n}\n" }
	type ask struct{ url, refuse, body string }
	for _, row := range []struct {
		why    string
		config string
		asks   []ask
		errors int // lines of level ERROR
	}{
		{"no error routes", site("a.test", route), []ask{
			{"http://a.test/", "", "hello"},
			{"http://a.test/", "limited", ourLimited},
			{"http://a.test/", "blocked", ourLimited},
			{"http://a.test/", "unavailable", ourUnavailable},
			{"http://a.test/", "overloaded", ourOverloaded},
			{"http://a.test/", "identity", ourIdentity},
		}, 0},
		{"a page for 429", site("a.test", route+"\n"+page("429",
			"zone={http.rate_limit.zone}/{http.rate_limit.exceeded.name} limit={http.rate_limit.limit} remaining={http.rate_limit.remaining} "+
				"reset={http.rate_limit.reset} retry_after={http.rate_limit.retry_after} reason={http.rate_limit.reason} {err.message}")), []ask{
			{"http://a.test/", "", "hello"},
			{"http://a.test/", "limited", "zone=api/api limit=20 remaining=3 reset=1800000060 retry_after=7 reason=limited rate limited"},
			{"http://a.test/", "blocked", "zone=api/api limit=20 remaining=3 reset=1800000060 retry_after=7 reason=blocked blocked"},
			{"http://a.test/", "unavailable", ourUnavailable},
			{"http://a.test/", "overloaded", ourOverloaded},
			{"http://a.test/", "identity", ourIdentity},
		}, 0},
		{"a page for something else", site("a.test", route+"\n"+page("502", "bad gateway")), []ask{
			{"http://a.test/", "limited", ourLimited},
			{"http://a.test/", "blocked", ourLimited},
			{"http://a.test/", "unavailable", ourUnavailable},
			{"http://a.test/", "overloaded", ourOverloaded},
		}, 0},
		{"pages of another site", site("a.test", route) + site("b.test", route+"\n"+page("", "b's page")), []ask{
			{"http://a.test/", "limited", ourLimited},
			{"http://a.test/", "unavailable", ourUnavailable},
			{"http://b.test/", "limited", "b's page"},
			{"http://b.test/", "unavailable", "b's page"},
		}, 0},
		{"pages of a catch-all site", site("a.test", route+"\n"+page("502", "bad gateway")) + site("", route+"\n"+page("", "anybody's page")), []ask{
			{"http://a.test/", "limited", ourLimited},
			{"http://c.test/", "limited", "anybody's page"},
		}, 0},
		{"a page for everything", site("a.test", route+"\n"+page("",
			"{err.status_code} limit={http.rate_limit.limit} reset={http.rate_limit.reset} retry_after={http.rate_limit.retry_after} {http.rate_limit.reason}.")), []ask{
			{"http://a.test/", "limited", "429 limit=20 reset=1800000060 retry_after=7 limited."},
			{"http://a.test/", "unavailable", "503 limit= reset= retry_after=7 unavailable."},
			{"http://a.test/", "overloaded", ourOverloaded},
			{"http://a.test/", "identity", "400 limit= reset= retry_after= ."},
		}, 0},
		{"pages for classes and lists of codes", site("a.test", route+"\n"+page("4xx", "client")+page("500 503", "server")), []ask{
			{"http://a.test/", "limited", "client"},
			{"http://a.test/", "unavailable", "server"},
			{"http://a.test/", "overloaded", ourOverloaded},
		}, 0},
		{"pages for a path", site("a.test", route+`
			handle_errors {
				@app path /app/*
				respond @app "the app's page"
			}`), []ask{
			{"http://a.test/app/x", "limited", "the app's page"},
			{"http://a.test/app/x", "unavailable", "the app's page"},
			{"http://a.test/api/x", "limited", ourLimited},
			{"http://a.test/api/x", "unavailable", ourUnavailable},
		}, 0},
		{"pages in handle blocks, one of which is empty", site("a.test", route+`
			handle_errors {
				handle /silent/* {
				}
				handle /a/* {
					respond "a"
				}
				handle /b/* {
					respond "b"
				}
			}`), []ask{
			{"http://a.test/a/x", "limited", "a"},
			{"http://a.test/b/x", "limited", "b"},
			{"http://a.test/c/x", "limited", ourLimited},
			{"http://a.test/silent/x", "limited", ourLimited},
		}, 0},
		{"pages by our own placeholders", site("a.test", route+`
			handle_errors {
				@blocked expression {http.rate_limit.reason} == "blocked" && {http.rate_limit.retry_after} > 5
				respond @blocked "you are blocked"
			}`), []ask{
			{"http://a.test/", "blocked", "you are blocked"},
			{"http://a.test/", "limited", ourLimited},
		}, 0},
		{"pages by the address before a rewrite", site("a.test", `
			route {
				vars tenant one
				map {host} {plan} {
					a.test gold
				}
				rewrite /was/* /is?now=1
				uri strip_prefix /cut
				test_refuse
			}
			handle_errors {
				@was path /was/*
				respond @was "by matcher: {path} {query}"
				@cut expression path('/cut/*') && {path}.startsWith("/cut/") && {uri} == {http.request.orig_uri} && {http.vars.tenant} == "one" && {plan} == "gold"
				respond @cut "by placeholder: {path}"
				respond /is "a page for the rewritten address"
			}`), []ask{
			{"http://a.test/was/x?q", "limited", "by matcher: /was/x q"},
			{"http://a.test/cut/x", "limited", "by placeholder: /cut/x"},
			{"http://a.test/other", "limited", ourLimited},
		}, 0},
		{"a matcher that fails", site("a.test", route+`
			handle_errors {
				@broken expression {err.status_code} / 0 == 1
				respond @broken "never"
				respond "never either"
			}`), []ask{
			{"http://a.test/", "limited", ourLimited},
		}, 1}, // Caddy logs what is wrong with the expression
		{"answer json", site("a.test", strings.Replace(route, "test_refuse", "test_refuse json", 1)+"\n"+page("", "a page")), []ask{
			{"http://a.test/", "limited", ourLimited},
			{"http://a.test/", "unavailable", ourUnavailable},
			{"http://a.test/", "overloaded", ourOverloaded},
			{"http://a.test/", "identity", ourIdentity},
		}, 0},
		{"answer error", site("a.test", strings.Replace(route, "test_refuse", "test_refuse error", 1)+"\n"+page("", "a page for {http.rate_limit.reason}")), []ask{
			{"http://a.test/", "limited", "a page for limited"},
			{"http://a.test/", "unavailable", "a page for unavailable"},
			{"http://a.test/", "overloaded", "a page for overloaded"},
			{"http://a.test/", "identity", "a page for "},
		}, 0},
		{"answer error without error routes", site("a.test", strings.Replace(route, "test_refuse", "test_refuse error", 1)), []ask{
			{"http://a.test/", "limited", ""},
			{"http://a.test/", "unavailable", ""},
			{"http://a.test/", "overloaded", ""},
		}, 2}, // which is why the default is another
	} {
		t.Run(row.why, func(t *testing.T) {
			s := serve(t, row.config)
			for _, ask := range row.asks {
				got := s.ask("GET", ask.url, ask.refuse)
				if got.body != ask.body {
					t.Errorf("%s, %s: body\n%s, want\n%s", ask.url, ask.refuse, got.body, ask.body)
				}
				isRefusal(t, ask.url+", "+ask.refuse, got, ask.refuse, strings.HasPrefix(ask.body, "{"))
			}
			if lines := s.errorLines(); len(lines) != row.errors {
				t.Errorf("%d lines of level ERROR, want %d:\n%s", len(lines), row.errors, strings.Join(lines, ""))
			}
		})
	}
}

// isRefusal checks what holds for an answer whoever writes its body.
func isRefusal(t *testing.T, why string, got testAnswer, refuse string, ours bool) {
	t.Helper()
	want := http.Header{}
	status := http.StatusOK
	trio := func() {
		want["X-Ratelimit-Limit"], want["X-Ratelimit-Remaining"], want["X-Ratelimit-Reset"] = []string{"20"}, []string{"3"}, []string{"1800000060"}
	}
	refused := func(code int, retryAfter string) {
		status = code
		want["Cache-Control"], want["X-Ratelimit-Reason"], want["Retry-After"] = []string{"no-store"}, []string{refuse}, []string{retryAfter}
	}
	switch refuse {
	case "":
		trio()
	case "limited", "blocked":
		trio()
		refused(429, "7")
	case "unavailable":
		refused(503, "7")
	case "overloaded":
		refused(503, "5")
	case "identity":
		status, want["Cache-Control"] = 400, []string{"no-store"}
	}
	if got.status != status {
		t.Errorf("%s: status %d, want %d", why, got.status, status)
	}
	for _, name := range []string{headerLimit, headerRemaining, headerReset, headerReason, headerRetry, headerCache} {
		if !reflect.DeepEqual(got.header[name], want[name]) {
			t.Errorf("%s: %s is %q, want %q", why, name, got.header[name], want[name])
		}
	}
	if isJSON := got.header.Get("Content-Type") == "application/json"; isJSON != ours {
		t.Errorf("%s: Content-Type %q", why, got.header.Get("Content-Type"))
	}
}

func TestOuterHeadersReachTheClient(t *testing.T) {
	s := serve(t, `http://a.test:8080 {
		header Access-Control-Allow-Origin https://app.test
		header Access-Control-Expose-Headers Retry-After
		route {
			header Etag "of the page"
			test_refuse
		}
	}`)
	for _, method := range []string{"GET", "HEAD"} {
		got := s.ask(method, "http://a.test/", "limited")
		if got.header.Get("Access-Control-Allow-Origin") != "https://app.test" || got.header.Get("Access-Control-Expose-Headers") != "Retry-After" {
			t.Errorf("%s: headers of CORS are gone: %v", method, got.header)
		}
		if got.header.Get("Etag") != "" {
			t.Errorf("%s: our body has the Etag of another", method)
		}
		if want := map[string]string{"GET": ourLimited, "HEAD": ""}[method]; got.body != want {
			t.Errorf("%s: body %q, want %q", method, got.body, want)
		}
	}
}

func TestManyAsksAtOnce(t *testing.T) {
	s := serve(t, `http://a.test:8080 {
		route {
			test_refuse
		}
		handle_errors {
			@page path_regexp name ^/page/(.*)$
			respond @page "{re.name.1} {http.rate_limit.reason}"
		}
	}`)
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			path := fmt.Sprintf("%d", i)
			if got := s.ask("GET", "http://a.test/page/"+path, "blocked").body; got != path+" blocked" {
				t.Errorf("got %q, want the page of %s", got, path)
			}
			if got := s.ask("GET", "http://a.test/"+path, "limited").body; got != ourLimited {
				t.Errorf("got %q, want %s", got, ourLimited)
			}
		})
	}
	all.Wait()
}

// A Caddyfile makes no subroutes with error routes, so these are written as JSON.
func TestWhoAnswersInASubroute(t *testing.T) {
	for _, row := range []struct {
		why, answer, errors, server string
		refuse, body                string
	}{
		{"a page of the subroute", "auto", `[{"handle":[{"handler":"static_response","body":"nested {http.request.uri.path}"}]}]`, `[]`, "limited", "nested /rewritten"},
		{"a page by the address before a rewrite", "auto", `[{"match":[{"expression":"{http.request.orig_uri.path} == '/asked'"}],"handle":[{"handler":"static_response","body":"asked"}]}]`,
			`[]`, "limited", "asked"},
		{"it comes before the server's", "auto", `[{"handle":[{"handler":"static_response","body":"nested"}]}]`,
			`[{"handle":[{"handler":"static_response","body":"server"}]}]`, "limited", "nested"},
		{"overload has no page", "auto", `[{"handle":[{"handler":"static_response","body":"nested"}]}]`, `[]`, "overloaded", ourOverloaded},
		{"none that matches: the request must not get through", "auto", `[{"match":[{"path":["/other"]}],"handle":[{"handler":"static_response","body":"nested"}]}]`, `[]`, "limited", ourLimited},
		{"nor if the server has one", "auto", `[]`, `[{"handle":[{"handler":"static_response","body":"server"}]}]`, "limited", ourLimited},
		{"nor with answer error", "error", `[]`, `[]`, "overloaded", ourOverloaded},
		{"answer error with a page", "error", `[{"match":[{"path":["/rewritten"]}],"handle":[{"handler":"static_response","body":"nested"}]}]`, `[]`, "overloaded", "nested"},
		{"answer json", "json", `[{"handle":[{"handler":"static_response","body":"nested"}]}]`, `[]`, "limited", ourLimited},
		{"allowed", "auto", `[]`, `[]`, "", "the backend"},
	} {
		t.Run(row.why, func(t *testing.T) {
			s := &testServer{t: t}
			s.load(fmt.Appendf(nil, `{"admin":{"disabled":true,"config":{"persist":false}},
				"storage":{"module":"file_system","root":%q},
				"apps":{"tls":{"disable_storage_clean":true},"http":{"servers":{"s":{
					"listen":["127.0.0.1:0"],"automatic_https":{"disable":true},
					"errors":{"routes":%s},
					"routes":[
						{"handle":[{"handler":"rewrite","uri":"/rewritten"},{"handler":"subroute",
							"routes":[{"handle":[{"handler":"subroute","routes":[{"handle":[{"handler":"test_refuse","answer":%q}]}]}]}],
							"errors":{"routes":%s}}]},
						{"handle":[{"handler":"static_response","body":"the backend"}]}
					]}}}}}`, t.TempDir(), row.server, row.answer, row.errors))
			if got := s.ask("GET", "http://a.test/asked", row.refuse); got.body != row.body {
				t.Errorf("body %q, want %q", got.body, row.body)
			}
		})
	}
}

// The same with the handler itself: an error that no route of the subroute matches must not open the way to the backend.
func TestRefusedRequestDoesNotLeaveASubroute(t *testing.T) {
	for _, answer := range []string{"auto", "error", "json"} {
		s := &testServer{t: t}
		s.load(fmt.Appendf(nil, `{"admin":{"disabled":true,"config":{"persist":false}},
			"storage":{"module":"file_system","root":%q},
			"apps":{"tls":{"disable_storage_clean":true},"http":{"servers":{"s":{
				"listen":["127.0.0.1:0"],"automatic_https":{"disable":true},
				"routes":[
					{"handle":[{"handler":"subroute",
						"routes":[{"handle":[{"handler":"rate_limit","answer":%q,"rate_limits":{%q:{"key":"all","rate":"1/h"}}}]}],
						"errors":{"routes":[{"match":[{"path":["/other"]}],"handle":[{"handler":"static_response","body":"a page"}]}]}}]},
					{"handle":[{"handler":"static_response","body":"the backend"}]}
				]}}}}}`, t.TempDir(), answer, "nested_"+answer))
		if got := s.ask("GET", "http://a.test/", ""); got.body != "the backend" {
			t.Errorf("answer %s: the first request gets %q", answer, got.body)
		}
		if got := s.ask("GET", "http://a.test/", ""); got.status != 429 || !strings.HasPrefix(got.body, `{"error":"rate_limited",`) {
			t.Errorf("answer %s: the second request gets %d %q, want to be refused", answer, got.status, got.body)
		}
		if got := s.ask("GET", "http://a.test/other", ""); answer != "json" && got.body != "a page" {
			t.Errorf("answer %s: where a page matches, the answer is %q", answer, got.body)
		}
	}
}

// testVerdict is a matcher that says what it is told to.
type testVerdict struct {
	Says string `json:"says"`
}

func (*testVerdict) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.matchers.test_verdict", New: func() caddy.Module { return new(testVerdict) }}
}

// MatchWithError also leaves traces, like matchers of Caddy do.
func (v *testVerdict) MatchWithError(r *http.Request) (bool, error) {
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	repl.Set("http.regexp.test.1", v.Says)
	caddyhttp.SetVar(r.Context(), "test_verdict", v.Says)
	r.URL.Path, r.RequestURI, r.Method = "/trace", "/trace", "TRACE"
	_, _ = io.ReadAll(r.Body)
	if v.Says == "fail" {
		return false, io.ErrUnexpectedEOF
	}
	return v.Says == "yes", nil
}

// testMark is a handler that notes that it was reached.
type testMark struct{}

func (*testMark) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.test_mark", New: func() caddy.Module { return new(testMark) }}
}

func (*testMark) ServeHTTP(_ http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	caddyhttp.SetVar(r.Context(), "reached", true)
	return nil
}

// provisioned returns error routes as a server has them.
func provisioned(t rapid.TB, routes any) caddyhttp.RouteList {
	text, err := json.Marshal(routes)
	if err != nil {
		t.Fatal(err)
	}
	var list caddyhttp.RouteList
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	if err := list.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	return list
}

// prepared returns a request as a server passes it on.
func prepared(body io.Reader, server *caddyhttp.Server) (*http.Request, *caddy.Replacer) {
	repl := caddy.NewReplacer()
	return caddyhttp.PrepareRequest(httptest.NewRequest("POST", "/original", body), repl, httptest.NewRecorder(), server), repl
}

type object = map[string]any

func drawRoutes(t *rapid.T, depth int) []any {
	routes := []any{}
	for range rapid.IntRange(0, 4).Draw(t, "routes") {
		route := object{"terminal": rapid.Bool().Draw(t, "terminal"), "group": rapid.SampledFrom([]string{"", "", "a", "b", "passed"}).Draw(t, "group")}
		if says := rapid.SampledFrom([]string{"", "yes", "yes", "no", "no", "no", "fail"}).Draw(t, "match"); says != "" {
			route["match"] = []any{object{"test_verdict": object{"says": says}}}
		}
		handlers := []any{}
		for range rapid.IntRange(0, 2).Draw(t, "handlers") {
			if depth > 0 && rapid.IntRange(0, 3).Draw(t, "kind") > 0 {
				handlers = append(handlers, object{"handler": "subroute", "routes": drawRoutes(t, depth-1)})
			} else {
				handlers = append(handlers, object{"handler": "test_mark"})
			}
		}
		route["handle"] = handlers
		routes = append(routes, route)
	}
	return routes
}

// What we foresee is what Caddy does: its own routing is the oracle.
func TestForesightIsCaddysRouting(t *testing.T) {
	outcomes := map[bool]int{}
	rapid.Check(t, func(t *rapid.T) {
		routes := provisioned(t, drawRoutes(t, 2))
		server := &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: routes}}
		r, _ := prepared(nil, server)
		r.Context().Value(routeGroups).(map[string]struct{})["passed"] = struct{}{}
		err := caddyhttp.Error(http.StatusTooManyRequests, errLimited)

		flow := new(answerer).errorFlow(r)
		foreseen := flow.answers(flow.view(httptest.NewRecorder(), r, err, new(answerer).placeholders(Decision{}, 0)))

		r = server.Errors.WithError(r, err)
		end := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
		_ = routes.Compile(end).ServeHTTP(httptest.NewRecorder(), r)
		reached, _ := caddyhttp.GetVar(r.Context(), "reached").(bool)
		if foreseen != reached {
			t.Fatalf("foreseen %v, but Caddy reaches a handler: %v", foreseen, reached)
		}
		outcomes[reached]++
	})
	if outcomes[true] == 0 || outcomes[false] == 0 {
		t.Errorf("this shows nothing: %v", outcomes)
	}
}

func TestPagesOfOtherSitesCostLittle(t *testing.T) {
	mark := []any{object{"handler": "test_mark"}}
	host := func(names ...string) object { return object{"host": names} }
	for _, row := range []struct {
		why    string
		routes []any
		want   bool
	}{
		{"no error routes", []any{}, true},
		{"another host", []any{object{"match": []any{host("b.test")}, "handle": mark}}, true},
		{"other hosts", []any{object{"match": []any{host("b.test", "c.test"), host("*.d.test")}, "handle": mark}}, true},
		{"another host and more", []any{object{"match": []any{object{"host": []string{"b.test"}, "path": []string{"/"}}}, "handle": mark}}, true},
		{"this host", []any{object{"match": []any{host("b.test", "example.com")}, "handle": mark}}, false},
		{"this host among the sets", []any{object{"match": []any{host("b.test"), host("example.com")}, "handle": mark}}, false},
		{"a set without a host", []any{object{"match": []any{host("b.test"), object{"path": []string{"/"}}}, "handle": mark}}, false},
		{"any host", []any{object{"handle": mark}}, false},
		{"any host after another", []any{object{"match": []any{host("b.test")}, "handle": mark}, object{"handle": mark}}, false},
		{"this host, but nothing there: that takes the closer look", []any{object{"match": []any{host("example.com")}}}, false},
	} {
		r, _ := prepared(nil, &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: provisioned(t, row.routes)}})
		a, w, d := answerer{}, sink{}, testDecision(ReasonLimited)
		if got := a.errorFlow(r).passes(r); got != row.want {
			t.Errorf("%s: passes %v, want %v", row.why, got, row.want)
		}
		if n := testing.AllocsPerRun(100, func() { _ = a.refuse(w, r, &d) }); row.want && n > 8 {
			t.Errorf("%s: refuse allocates %v times, want at most 8: matchers of hosts do, too", row.why, n)
		}
	}
}

// traces is all of a request that matchers can change, and that others can see afterwards.
func traces(r *http.Request, repl *caddy.Replacer) object {
	seen := object{
		"method": r.Method, "uri": r.RequestURI, "url": r.URL.String(), "header": r.Header.Clone(),
		"vars":   maps.Clone(r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)),
		"groups": maps.Clone(r.Context().Value(routeGroups).(map[string]struct{})),
		"error":  r.Context().Value(caddyhttp.ErrorCtxKey),
	}
	for _, name := range []string{
		"http.error", "http.error.status_code", "http.error.status_text", "http.error.id", "http.error.trace", "http.error.message",
		"http.rate_limit.zone", "http.rate_limit.exceeded.name", "http.rate_limit.reason", "http.rate_limit.retry_after",
		"http.rate_limit.limit", "http.rate_limit.remaining", "http.rate_limit.reset", "http.regexp.test.1", "http.request.uri", "http.request.orig_uri.path",
	} {
		seen[name], _ = repl.Get(name)
	}
	return seen
}

func TestLookingLeavesNoTrace(t *testing.T) {
	routes := provisioned(t, []any{
		object{"group": "a", "match": []any{object{"test_verdict": object{"says": "yes"}}}, "handle": []any{}},
		object{"group": "b", "match": []any{object{"test_verdict": object{"says": "no"}}}, "handle": []any{object{"handler": "test_mark"}}},
	})
	server := &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: routes}}
	r, repl := prepared(strings.NewReader("the body"), server)
	r.URL.Path, r.RequestURI = "/rewritten", "/rewritten" // by a handler before us
	repl.Set("http.error.message", "of an earlier error")
	before := traces(r, repl)

	w, a, d := httptest.NewRecorder(), answerer{numbers: true}, testDecision(ReasonLimited)
	if err := a.refuse(w, r, &d); err != nil {
		t.Fatal(err)
	}
	if w.Body.String() != ourLimited {
		t.Errorf("body %s, want %s", w.Body, ourLimited)
	}
	if after := traces(r, repl); !reflect.DeepEqual(after, before) {
		t.Errorf("the request is\n%v, was\n%v", after, before)
	}
	if body, err := io.ReadAll(r.Body); string(body) != "the body" {
		t.Errorf("the body is %q (%v)", body, err)
	}
}

func TestErrorsArePublic(t *testing.T) {
	server := &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: provisioned(t, []any{object{"handle": []any{object{"handler": "test_mark"}}}})}}
	for reason, want := range map[Reason]string{ReasonLimited: "rate limited", ReasonBlocked: "blocked", ReasonUnavailable: "limiter unavailable"} {
		r, repl := prepared(nil, server)
		a, d := answerer{}, testDecision(reason)
		w := httptest.NewRecorder()
		var err caddyhttp.HandlerError
		if !errors.As(a.refuse(w, r, &d), &err) || err.Err.Error() != want {
			t.Errorf("%s: error %v, want %s", reason, err, want)
		}
		if got, _ := repl.Get("http.rate_limit.reason"); got != string(reason) {
			t.Errorf("%s: the placeholder says %v", reason, got)
		}
		if w.Body.Len() > 0 || len(w.Header().Values("Content-Type")) > 0 {
			t.Errorf("%s: something is written, too: %v %s", reason, w.Header(), w.Body)
		}
	}
}

func BenchmarkRefuseBesidePages(b *testing.B) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	var routes caddyhttp.RouteList
	if err := json.Unmarshal([]byte(`[{"match":[{"expression":"{http.error.status_code} in [502]"}],"handle":[{"handler":"test_mark"}]}]`), &routes); err != nil {
		b.Fatal(err)
	}
	if err := routes.Provision(ctx); err != nil {
		b.Fatal(err)
	}
	r, _ := prepared(nil, &caddyhttp.Server{Errors: &caddyhttp.HTTPErrorConfig{Routes: routes}})
	a, w, d := answerer{}, sink{}, testDecision(ReasonLimited)
	b.ReportAllocs()
	for b.Loop() {
		if a.refuse(w, r, &d) != nil {
			b.Fatal("not answered here")
		}
	}
}
