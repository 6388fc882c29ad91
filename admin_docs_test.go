package ratelimit

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/caddy-tollgate/ratelimit/internal/node"
	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

const adminDocs = "docs/admin.md"

// Every route of the admin endpoint is in the docs, by its method, and the docs have no others.
func TestAdminDocsNameEveryRoute(t *testing.T) {
	text, err := os.ReadFile(adminDocs)
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for _, heading := range regexp.MustCompile("(?m)^### `([A-Z]+) /rate_limit/([a-z]+)").FindAllStringSubmatch(string(text), -1) {
		documented[heading[1]+" "+heading[2]] = true
		if adminRoutes()[heading[2]][heading[1]] == nil {
			t.Errorf("%s has %s %s, which is no route", adminDocs, heading[1], heading[2])
		}
	}
	for path, methods := range adminRoutes() {
		for method := range methods {
			if !documented[method+" "+path] {
				t.Errorf("%s does not say what %s %s does", adminDocs, method, path)
			}
		}
	}
}

// The commands of docs/admin.md, typed one after the other, print what it says.
func TestAdminDocsTranscript(t *testing.T) {
	caddyfile := strings.Replace(snippets(t, adminDocs, "caddyfile")[0], "\n:8080 {", "\nhttp://:{$PORT} {", 1)
	redis := redistest.Start(t)
	n := node.Start(t, caddyfile, node.Env("REDIS_URL", redis.URL()), node.Env("KEY_SECRET", "secret"))
	proc.Eventually(t, "Redis is up", func() bool { return n.LogLines("redis is up") == 1 })
	addresses := strings.NewReplacer("localhost:8080", n.Addr(), "localhost:2019", n.AdminAddr())
	here := strings.NewReplacer("127.0.0.1:6379", redis.Addr())
	for _, snippet := range snippets(t, adminDocs, "console") {
		for command, want := range transcript(snippet) {
			output, err := exec.Command("sh", "-c", addresses.Replace(command)).CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v\n%s", command, err, output)
			}
			if got := withoutChange(string(output)); got != withoutChange(here.Replace(want)) {
				t.Errorf("%s\nprints\n%s\nand the docs say\n%s", command, output, want)
			}
			if strings.Contains(command, "429") {
				awaitBlocks(t, n, 1) // a block is listed a moment after its answer
			}
		}
	}
}

var changing = regexp.MustCompile(`("[a-z_]*(?:until|reset|strike|at|since|probe|node)":)"[^"]*"|("remaining":[0-9]+)\.[0-9]+`)

// withoutChange makes answers comparable that hold times, or tokens that flow in meanwhile.
func withoutChange(output string) string {
	return changing.ReplaceAllString(strings.TrimSpace(output), "$1$2…")
}
