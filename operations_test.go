package ratelimit

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// stage is where a document is played: its first Caddyfile runs in a Caddy with a Redis, and whatever its console snippets type is
// typed and must print what they say. A comment like `<!-- $ curl … -->`, which readers do not see, is typed too, whatever it
// prints; one like `<!-- redis dies -->` is an event.
type stage struct {
	t      *testing.T
	node   *node.Node
	events map[string]func()
	// real puts what exists here in place of what the document says, and shown the other way round.
	real, shown *strings.Replacer
}

// newStage starts what a document needs. The admin endpoint is a unix socket if that is wanted.
func newStage(t *testing.T, document string, unix bool) *stage {
	t.Helper()
	server, backend := redistest.Start(t), holdingBackend(t)
	caddyfile := snippets(t, document, "caddyfile")[0]
	caddyfile = strings.NewReplacer("127.0.0.1:8080", "127.0.0.1:{$PORT}", "127.0.0.1:9000", backend.addr,
		"127.0.0.1:6379", server.Addr()).Replace(caddyfile)
	options := []node.Option{node.Env("KEY_SECRET", "secret")}
	admin := "unix/" + filepath.Join(t.TempDir(), "admin.sock")
	if unix {
		options = append(options, node.Env("CADDY_ADMIN", admin))
	}
	s := &stage{t: t, node: node.Start(t, caddyfile, options...)}
	if !unix {
		admin = s.node.AdminAddr()
	}
	s.real = strings.NewReplacer("127.0.0.1:8080", s.node.Addr(), "localhost:2019", admin, "127.0.0.1:6379", server.Addr())
	s.shown = strings.NewReplacer(s.node.Addr(), "127.0.0.1:8080", admin, "localhost:2019", server.Addr(), "127.0.0.1:6379")
	s.events = map[string]func(){
		"redis dies":       server.Kill,
		"redis is back":    server.Restart,
		"backend recovers": backend.release,
		"the pool is full": func() {
			for range 4 {
				select {
				case <-backend.arrived:
				case <-time.After(10 * time.Second):
					t.Fatal("the backend waits for requests")
				}
			}
		},
	}
	return s
}

var acts = regexp.MustCompile("(?ms)^(?:```console\n(.*?)\n```|<!-- (.*?) -->)$")

// play types what a document says, in its order.
func (s *stage) play(document string) {
	s.t.Helper()
	text, err := os.ReadFile(document)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, act := range acts.FindAllStringSubmatch(string(text), -1) {
		switch command, hidden := strings.CutPrefix(act[2], "$ "); {
		case hidden:
			s.node.Shell(s.real.Replace(command))
		case act[2] != "":
			event, ok := s.events[act[2]]
			if !ok {
				s.t.Fatalf("%s: there is no event %q", document, act[2])
			}
			event()
		default:
			for command, want := range transcript(act[1]) {
				s.prints(command, want)
			}
		}
	}
}

// looks finds what only looks: it may be typed again until what it shows has come about.
var looks = regexp.MustCompile(`^(caddy rate-limit (status|zones|inspect|explain|blocks|top)|caddy rate-limit override( --json)?$|curl -s localhost:2019/metrics|grep )`)

// prints types a command that must print what the document says.
func (s *stage) prints(command, want string) {
	s.t.Helper()
	patience := time.Now()
	if looks.MatchString(command) {
		patience = patience.Add(10 * time.Second)
	}
	for {
		output, code := s.node.Shell(s.real.Replace(command))
		got := s.shown.Replace(output)
		if settled(got) == settled(want) && code == 0 {
			return
		}
		if time.Now().After(patience) {
			s.t.Errorf("%s\nprints\n%s\nand the document says\n%s\nexit code %d", command, got, want, code)
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// passing is what is another one every time: dates, times of day, how far off they are, the version,
// and servers, which Caddy numbers by their ports.
var passing = regexp.MustCompile(`(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d \((in )?\d+[smhd]( ago)?\)|"\d{4}-\d\d-\d\dT[^"]*Z"|` +
	`retry after \d+ s|(?m)^(version|server|Date:|X-Ratelimit-Reset:) .*$`)

// gaps are the spaces that align a table.
var gaps = regexp.MustCompile(`  +`)

// settled makes outputs comparable.
func settled(output string) string {
	output = strings.ReplaceAll(output, "\r\n", "\n")
	return strings.TrimSpace(gaps.ReplaceAllString(passing.ReplaceAllString(output, "…"), "  "))
}

// Every command does what docs/commands.md says, by TCP and by a unix socket.
func TestCommandsDocument(t *testing.T) {
	for name, unix := range map[string]bool{"tcp": false, "unix": true} {
		t.Run(name, func(t *testing.T) {
			newStage(t, "docs/commands.md", unix).play("docs/commands.md")
		})
	}
	for _, name := range commandNames() {
		typed := false
		for _, snippet := range snippets(t, "docs/commands.md", "console") {
			typed = typed || strings.Contains(snippet, "$ caddy rate-limit "+name)
		}
		if !typed {
			t.Errorf("docs/commands.md has no example of %s", name)
		}
	}
}

// The incidents of docs/operations.md go as it says.
func TestOperationsDocument(t *testing.T) {
	newStage(t, "docs/operations.md", false).play("docs/operations.md")
}
