package node

import (
	"debug/buildinfo"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

const hello = `
http://127.0.0.1:{$PORT} {
	log
	respond /header "{header.X-Test} {host}" 418
	respond /echo {http.request.body}
	redir /away /header
	respond "hello from {$NAME}"
}`

func TestNodeAnswers(t *testing.T) {
	t.Parallel()
	n := Start(t, hello+"\nhttp://example.test:{$PORT} {\n\trespond {host}\n}", Env("NAME", "one"))
	if r := n.Get("/"); r.Status != 200 || r.Body != "hello from one" || r.Header.Get("Server") != "Caddy" {
		t.Errorf("got %+v", r)
	}
	if r := n.Get("/header", "X-Test: a:b"); r.Status != 418 || r.Body != "a:b 127.0.0.1" {
		t.Errorf("with a header: got %+v", r)
	}
	if r := n.Get("/", "Host: example.test"); r.Body != "example.test" {
		t.Errorf("another host: got %+v", r)
	}
	if r := n.Get("/away"); r.Status != 302 {
		t.Errorf("a redirect: got %+v, want it not followed", r)
	}
	if r, err := n.Try("POST", "/echo", "body"); err != nil || r.Body != "body" {
		t.Errorf("POST: got %+v, error %v", r, err)
	}
	if _, err := n.Try("GET", "/", "", "no colon"); err == nil {
		t.Error("a header without a colon: no error")
	}
}

func TestNodeLoadsAndKeepsWhatItHadOnAnError(t *testing.T) {
	t.Parallel()
	n := Start(t, hello)
	if err := n.Load("http://127.0.0.1:{$PORT} {\n\trespond new\n}"); err != nil {
		t.Fatal(err)
	}
	if r := n.Get("/"); r.Body != "new" {
		t.Errorf("after a load: got %q", r.Body)
	}
	if err := n.Load("http://127.0.0.1:{$PORT} {\n\tnonsense\n}"); err == nil || !strings.Contains(err.Error(), "unrecognized directive: nonsense") {
		t.Errorf("loading nonsense: got %v, want Caddy's error", err)
	}
	if r := n.Get("/"); r.Body != "new" {
		t.Errorf("after a refused load: got %q", r.Body)
	}
	const body = "apps/http/servers/srv0/routes/0/handle/0/routes/0/handle/0/body"
	if status, answer := n.Patch(body, `"patched"`); status != 200 {
		t.Fatalf("patch: status %d: %s", status, answer)
	}
	if r := n.Get("/"); r.Body != "patched" {
		t.Errorf("after a patch: got %q", r.Body)
	}
	if status, _ := n.Patch("apps/nothing", `1`); status == 200 {
		t.Error("patching nothing: status 200")
	}
}

func TestNodeLogs(t *testing.T) {
	t.Parallel()
	n := Start(t, hello)
	n.Get("/logged")
	proc.Eventually(t, "the request is logged", func() bool { return n.LogLines(`"uri":"/logged"`) == 1 })
	logged := func(entry map[string]any) bool {
		return entry["logger"] == "http.log.access" && entry["status"] == 200.0
	}
	if !slices.ContainsFunc(n.Logs(), logged) {
		t.Errorf("no entry of the request among %d", len(n.Logs()))
	}
	if got := n.Goroutines(); got < 5 {
		t.Errorf("goroutines: got %d", got)
	}
}

func TestNodeEndsAndComesBack(t *testing.T) {
	t.Parallel()
	n := Start(t, hello)
	address := n.Addr()
	n.Get("/")
	n.Kill()
	if _, err := n.Try("GET", "/", ""); err == nil {
		t.Error("a killed node answered")
	}
	n.Restart()
	if r := n.Get("/"); r.Status != 200 || n.Addr() != address {
		t.Errorf("after a restart: %+v on %s, want 200 on %s", r, n.Addr(), address)
	}
	if code := n.Stop(); code != 0 {
		t.Errorf("exit code: got %d, want 0", code)
	}
	if conn, err := net.Dial("tcp", n.AdminAddr()); err == nil {
		conn.Close()
		t.Error("the admin endpoint of a stopped node is open")
	}
}

func TestNodesAreApart(t *testing.T) {
	t.Parallel()
	one, two := Start(t, hello, Env("NAME", "one")), Start(t, "{\n\tadmin off\n}\n"+hello, Env("NAME", "two"))
	one.Signal(syscall.SIGSTOP)
	if r := two.Get("/"); r.Body != "hello from two" {
		t.Errorf("got %+v", r)
	}
	one.Signal(syscall.SIGCONT)
	if r := one.Get("/"); r.Body != "hello from one" {
		t.Errorf("got %+v", r)
	}
}

func TestNodeWritesInItsFolder(t *testing.T) {
	t.Parallel()
	n := Start(t, hello)
	if _, err := os.Stat(filepath.Join(n.dir, ".config", "caddy", "autosave.json")); err != nil {
		t.Error(err)
	}
}

func TestRaceNode(t *testing.T) {
	t.Parallel()
	n := Start(t, hello, Race())
	path, err := raceBinary()
	if err != nil {
		t.Fatal(err)
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil || !slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Errorf("not built with the race detector: error %v, %v", err, info)
	}
	if r := n.Get("/"); r.Status != 200 {
		t.Errorf("got %+v", r)
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	stdout, _, code := Run(t, "list-modules")
	if code != 0 || !strings.Contains(stdout, "\nhttp.handlers.rate_limit\n") || !strings.Contains(stdout, "\nrate_limit\n") {
		t.Errorf("list-modules: exit code %d, got:\n%s", code, stdout)
	}
	if _, stderr, code := Run(t, "validate", "--config", "none"); code == 0 || !strings.Contains(stderr, "none") {
		t.Errorf("validating nothing: exit code %d, %s", code, stderr)
	}
}

func TestRunInANodesEnvironment(t *testing.T) {
	t.Parallel()
	n := Start(t, hello, Env("NAME", "one"))
	n.write("Caddyfile", strings.Replace(hello, "hello", "goodbye", 1))
	if _, stderr, code := n.Run("reload", "--config", "Caddyfile"); code != 0 {
		t.Fatalf("reload: exit code %d: %s", code, stderr)
	}
	if r := n.Get("/"); r.Body != "goodbye from one" {
		t.Errorf("got %+v", r)
	}
}

func TestShell(t *testing.T) {
	t.Parallel()
	n := Start(t, hello)
	for range 2 {
		if output, code := n.Shell("caddy list-modules | grep -x rate_limit; ls Caddyfile; exit 3"); output != "rate_limit\nCaddyfile\n" || code != 3 {
			t.Errorf("got %q, exit code %d", output, code)
		}
	}
}

func TestNodesLeaveNoGoroutines(t *testing.T) {
	before := goleak.IgnoreCurrent()
	t.Run("inner", func(t *testing.T) {
		n := Start(t, hello)
		n.Get("/")
		n.Goroutines()
		n.Restart()
	})
	goleak.VerifyNone(t, before)
}
