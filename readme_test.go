package ratelimit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// snippets returns the fenced blocks of a language in a document, in which there are some.
func snippets(t *testing.T, path, language string) []string {
	t.Helper()
	found := snippetsIn(t, path, language)
	if len(found) == 0 {
		t.Fatalf("no %s snippets in %s", language, path)
	}
	return found
}

func snippetsIn(t *testing.T, path, language string) (found []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		found = append(found, match[1])
	}
	return found
}

// Every Caddyfile in the README and in the docs is valid as it stands.
func TestReadmeCaddyfiles(t *testing.T) {
	t.Setenv("REDIS_URL", "redis://127.0.0.1:6379/0")
	docs, err := filepath.Glob("docs/*.md")
	if err != nil || len(docs) == 0 || len(snippetsIn(t, "README.md", "caddyfile")) == 0 {
		t.Fatal("no snippets", err)
	}
	for _, path := range append(docs, "README.md") {
		for i, snippet := range snippetsIn(t, path, "caddyfile") {
			t.Run(path+" "+strconv.Itoa(i), func(t *testing.T) {
				if message := validate(t, snippet); message != "" {
					t.Errorf("%s\n%s", message, snippet)
				}
			})
		}
	}
}

// validate runs caddy validate on a Caddyfile and returns the error, empty if it is valid.
func validate(t *testing.T, caddyfile string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	// Placeholders of the environment are replaced when a configuration loads, so it must be there.
	_, stderr, code := node.Run(t, "validate", "--config", file, "--envfile", envFile(t))
	if code == 0 {
		return ""
	}
	return strings.TrimSpace(stderr)
}

// envFile holds the variables that the README names.
func envFile(t *testing.T) string {
	t.Helper()
	keys := newTestKeys(t)
	var lines strings.Builder
	for name, value := range map[string]string{
		"REDIS_URL": os.Getenv("REDIS_URL"), "REDIS_PASSWORD": "secret", "SENTINEL_PASSWORD": "secret",
		"KEY_SECRET": "secret", "REDIS_CA": keys.ca, "REDIS_CERT": keys.cert, "REDIS_KEY": keys.key,
	} {
		fmt.Fprintf(&lines, "%s=\"%s\"\n", name, value)
	}
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The commands of the README, typed one after the other, print what it says.
func TestReadmeTranscript(t *testing.T) {
	example, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	n := node.Start(t, string(example), node.Env("PAGE_PORT", strconv.Itoa(proc.Port(t))))
	s := &stage{
		t: t, node: n,
		real:  strings.NewReplacer("127.0.0.1:8080", n.Addr(), "localhost:2019", n.AdminAddr()),
		shown: strings.NewReplacer(n.Addr(), "127.0.0.1:8080", n.AdminAddr(), "localhost:2019"),
	}
	s.play("README.md")
}

// transcript returns the commands behind `$ ` in their order, each with what follows it.
func transcript(snippet string) func(yield func(command, output string) bool) {
	return func(yield func(string, string) bool) {
		for _, part := range strings.Split("\n"+snippet, "\n$ ")[1:] {
			command, output, _ := strings.Cut(part, "\n")
			if !yield(command, output) {
				return
			}
		}
	}
}

// The example is valid, formatted, and serves its page for refusals.
func TestExample(t *testing.T) {
	example, err := os.ReadFile("example.Caddyfile")
	if err != nil {
		t.Fatal(err)
	}
	if stdout, stderr, code := node.Run(t, "fmt", "--diff", abs(t, "example.Caddyfile")); code != 0 {
		t.Errorf("caddy fmt --diff: %s%s", stdout, stderr)
	}
	page := proc.Port(t)
	n := node.Start(t, string(example), node.Env("PAGE_PORT", strconv.Itoa(page)))
	if answer := n.Get("/healthz", "Host: localhost"); answer.Body != "ok\n" || answer.Header.Get("X-RateLimit-Limit") != "" {
		t.Errorf("health check: %+v", answer)
	}
	if answer := n.Get("/account/", "Host: localhost", "Authorization: Basic Ym9iOmhpY2N1cA=="); answer.Body != "account of bob\n" || answer.Header.Get("X-RateLimit-Limit") != "10" {
		t.Errorf("account: %+v", answer)
	}
	out, err := exec.Command("sh", "-c", "for i in 1 2 3 4 5 6; do curl -s localhost:"+strconv.Itoa(page)+"/; done").Output()
	if want := strings.Repeat("hello\n", 5) + "Slow down: pages allows 5 at once. Come back in 12 s.\n"; err != nil || string(out) != want {
		t.Errorf("got %q, %v, want %q", out, err, want)
	}
}

func abs(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Every word of the configuration stands in the syntax: in the README, and what is about Redis in its own document.
func TestReadmeSyntax(t *testing.T) {
	syntax := strings.Join(append(snippets(t, "README.md", "caddyfile-syntax"), snippets(t, redisDocs, "caddyfile-syntax")...), "")
	for _, room := range (blockReader{}).rooms() {
		for _, word := range room.table.known() {
			if !regexp.MustCompile(`(?m)^\t+` + word + `\b`).MatchString(syntax) {
				t.Errorf("%s, which belongs in %s, is in no syntax", word, room.name)
			}
		}
	}
}

// Every link to a file of this repository leads to one that is there, and to a headline in it.
func TestReadmeLinks(t *testing.T) {
	documents, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	documents = append(documents, "README.md")
	for _, document := range documents {
		for _, match := range regexp.MustCompile(`\]\(([^):]*)\)`).FindAllStringSubmatch(read(t, document), -1) {
			file, headline, _ := strings.Cut(match[1], "#")
			target := filepath.Join(filepath.Dir(document), file)
			if file == "" {
				target = document
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: %v", document, err)
			} else if headline != "" && !strings.Contains(anchors(read(t, target)), "#"+headline+"\n") {
				t.Errorf("%s: there is no #%s in %s", document, headline, target)
			}
		}
	}
}

// anchors returns the names that headlines get as targets of links, a line for each.
func anchors(document string) (names string) {
	for _, match := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(document, -1) {
		name := strings.ReplaceAll(strings.ToLower(match[1]), " ", "-")
		names += "#" + regexp.MustCompile(`[^a-z0-9_-]`).ReplaceAllString(name, "") + "\n"
	}
	return names
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
