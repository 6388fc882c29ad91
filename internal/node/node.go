// Package node runs the Caddy of this module for tests, as users run it: built from cmd/caddy, in a process of its own,
// with a Caddyfile. Several nodes are several processes.
package node

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// Node is a running Caddy.
type Node struct {
	t      testing.TB
	proc   *proc.Process
	dir    string
	port   int
	admin  string
	env    []string
	race   bool
	pkg    string // of the program
	client *http.Client
}

// Option changes how a node is started.
type Option func(*Node)

// Env sets an environment variable of the node, for {$NAME} and {env.NAME} in its Caddyfile.
func Env(name, value string) Option {
	return func(n *Node) { n.env = append(n.env, name+"="+value) }
}

// Race runs a Caddy that was built with the race detector; a race that it reports fails the test. It is some times
// slower than a real one.
func Race() Option {
	return func(n *Node) { n.race = true }
}

// Program runs the Caddy of another package of this module, named like "./cmd/caddy".
func Program(pkg string) Option {
	return func(n *Node) { n.pkg = pkg }
}

// Start starts Caddy with a Caddyfile and waits until it serves. It is killed when the test ends; what it logged is shown
// if the test failed.
//
// In the Caddyfile, {$PORT} is a port of 127.0.0.1 for the node's site, and {$ADMIN} the address of the admin endpoint,
// which is also the default: a Caddyfile need not name it. More ports are had by proc.Port and Env. The environment
// holds nothing else of the test's but PATH, and everything that Caddy stores is in a temporary folder.
func Start(t testing.TB, caddyfile string, options ...Option) *Node {
	t.Helper()
	n := &Node{t: t, proc: proc.New(t, "caddy"), dir: t.TempDir(), port: proc.Port(t)}
	n.admin = net.JoinHostPort("127.0.0.1", strconv.Itoa(proc.Port(t)))
	n.env = append(environment(n.dir), "PORT="+strconv.Itoa(n.port), "ADMIN="+n.admin, "CADDY_ADMIN="+n.admin)
	for _, option := range options {
		option(n)
	}
	n.client = &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 256},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       time.Minute,
	}
	t.Cleanup(n.end)
	n.write("Caddyfile", caddyfile)
	n.run()
	return n
}

func (n *Node) write(name, text string) {
	n.t.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

// environment returns one in which Caddy, and what it runs, writes below dir only.
func environment(dir string) []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TMPDIR=" + dir}
}

// run starts the process and waits until it says that its configuration is served. It says so by returning a text to a
// listener, which tells more than a port that answers: that it is this process, and that all its sites are up.
func (n *Node) run() {
	n.t.Helper()
	listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		n.t.Fatal(err)
	}
	defer listener.Close()
	n.write("token", n.admin)
	token, err := os.Open(filepath.Join(n.dir, "token"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer token.Close()
	cmd := exec.Command(n.binary(), "run", "--config", "Caddyfile", "--pingback", listener.Addr().String())
	cmd.Dir, cmd.Env, cmd.Stdin = n.dir, n.env, token
	n.proc.Start(cmd)
	n.proc.Ready(func() bool { return saidBy(listener) == n.admin })
}

func saidBy(listener *net.TCPListener) string {
	if err := listener.SetDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		return ""
	}
	conn, err := listener.Accept()
	if err != nil {
		return ""
	}
	defer conn.Close()
	said, _ := io.ReadAll(conn)
	return string(said)
}

func (n *Node) binary() string {
	n.t.Helper()
	if n.pkg == "" {
		return caddy(n.t, n.race)
	}
	path, err := build(filepath.Base(n.pkg), n.pkg)
	if err != nil {
		n.t.Fatal(err)
	}
	return path
}

func caddy(t testing.TB, race bool) string {
	t.Helper()
	build := binary
	if race {
		build = raceBinary
	}
	path, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func (n *Node) end() {
	n.client.CloseIdleConnections()
	if strings.Contains(n.proc.Output(), "WARNING: DATA RACE") {
		n.t.Error("the node reported a data race")
	}
}

// Stop ends Caddy as a service manager does, by SIGTERM, waits until it is gone, and returns its exit code. Requests in
// flight are finished first.
func (n *Node) Stop() int {
	n.t.Helper()
	n.client.CloseIdleConnections()
	n.Signal(syscall.SIGTERM)
	return n.proc.Wait()
}

// Kill ends Caddy as a crash would.
func (n *Node) Kill() {
	n.t.Helper()
	n.proc.Kill()
}

// Restart starts Caddy again with the Caddyfile and the ports that it had at first. One that still runs is killed.
func (n *Node) Restart() {
	n.t.Helper()
	n.Kill()
	n.run()
}

// Signal sends a signal to Caddy.
func (n *Node) Signal(sig syscall.Signal) {
	n.t.Helper()
	n.proc.Signal(sig)
}

// Run runs a command of Caddy in the node's environment, in which commands like reload find its admin endpoint.
func (n *Node) Run(args ...string) (stdout, stderr string, code int) {
	n.t.Helper()
	return run(n.t, n.dir, n.env, args)
}

// Shell runs a line of shell in the node's folder and environment, where `caddy` is the node's program, and returns what it wrote
// to either output, and its exit code.
func (n *Node) Shell(line string) (output string, code int) {
	n.t.Helper()
	programs := filepath.Join(n.dir, "bin")
	if err := os.MkdirAll(programs, 0o700); err != nil {
		n.t.Fatal(err)
	}
	if err := os.Symlink(n.binary(), filepath.Join(programs, "caddy")); err != nil && !errors.Is(err, fs.ErrExist) {
		n.t.Fatal(err)
	}
	cmd := exec.CommandContext(n.t.Context(), "sh", "-c", line)
	cmd.Dir, cmd.Env = n.dir, append(slices.Clone(n.env), "PATH="+programs+string(os.PathListSeparator)+os.Getenv("PATH"))
	written, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState == nil {
		n.t.Fatalf("running %s: %v", line, err)
	}
	return string(written), cmd.ProcessState.ExitCode()
}

// Run runs a command of Caddy, like validate or adapt, in a temporary folder, and returns what it wrote and its exit
// code. Its standard input is empty.
func Run(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	dir := t.TempDir()
	return run(t, dir, environment(dir), args)
}

func run(t testing.TB, dir string, env, args []string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), caddy(t, false), args...)
	cmd.Dir, cmd.Env = dir, env
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatalf("running caddy: %v", err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// Pids returns Caddy's process and its children.
func (n *Node) Pids() []int { return n.proc.Pids() }

// Logs returns the lines that Caddy has logged so far.
func (n *Node) Logs() []map[string]any {
	n.t.Helper()
	var logs []map[string]any
	for line := range strings.Lines(n.proc.Output()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) == nil { // others: a panic, a line that is being written
			logs = append(logs, entry)
		}
	}
	return logs
}

// LogLines returns how many lines that hold the text Caddy has logged so far.
func (n *Node) LogLines(text string) int {
	n.t.Helper()
	count := 0
	for line := range strings.Lines(n.proc.Output()) {
		if strings.Contains(line, text) {
			count++
		}
	}
	return count
}

// Goroutines returns how many goroutines Caddy has.
func (n *Node) Goroutines() int {
	n.t.Helper()
	profile := n.Admin(http.MethodGet, "/debug/pprof/goroutine?debug=1", "").Body
	var count int
	if _, err := fmt.Sscanf(profile, "goroutine profile: total %d", &count); err != nil {
		n.t.Fatalf("reading the goroutine profile: %v", err)
	}
	return count
}
