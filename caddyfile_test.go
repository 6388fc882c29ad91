package ratelimit

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddytest"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// adapted turns a Caddyfile into JSON.
func adapted(caddyfile string) ([]byte, error) {
	config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), map[string]any{"filename": "Caddyfile"})
	return config, err
}

// golden returns the Caddyfiles of the golden tests, and what they adapt to, by the name of the file.
func golden(t testing.TB) map[string][2]string {
	t.Helper()
	names, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	if err != nil || len(names) == 0 {
		t.Fatalf("no golden files: %v", err)
	}
	files := map[string][2]string{}
	for _, name := range names {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		caddyfile, want, found := strings.Cut(string(content), "----------\n")
		if !found {
			t.Fatalf("%s has no line of ten dashes", name)
		}
		files[filepath.Base(name)] = [2]string{caddyfile, strings.TrimSpace(want)}
	}
	return files
}

func TestCaddyfileAdapts(t *testing.T) {
	for name, file := range golden(t) {
		t.Run(name, func(t *testing.T) {
			caddytest.AssertAdapt(t, file[0], "caddyfile", file[1])
			checkSurvives(t, file[0])
		})
	}
}

// Every option stands in a golden file: whatever is dropped on the way to JSON shows there.
func TestCaddyfileOptionsAreInGoldenFiles(t *testing.T) {
	var all strings.Builder
	for _, file := range golden(t) {
		all.WriteString(file[0])
	}
	for _, room := range (blockReader{}).rooms() {
		for _, word := range room.table.known() {
			if !regexp.MustCompile(`(?m)^\t+` + word + `\b`).MatchString(all.String()) {
				t.Errorf("%s, which belongs in %s, is in no golden file", word, room.name)
			}
		}
	}
}

// Every field of the configuration can be reached from a Caddyfile.
func TestCaddyfileReachesAllFields(t *testing.T) {
	var all strings.Builder
	for _, file := range golden(t) {
		all.WriteString(file[1])
	}
	for _, part := range []any{Handler{}, App{}, Zone{}, Cost{}, Redis{}, Penalty{}, Shed{}} {
		for _, field := range reflect.VisibleFields(reflect.TypeOf(part)) {
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if field.IsExported() && !strings.Contains(all.String(), `"`+name+`":`) {
				t.Errorf("%T.%s (%s) is in no golden file", part, field.Name, name)
			}
		}
	}
}

// checkSurvives checks that what a Caddyfile adapts to is read by Caddy as it was written.
func checkSurvives(t *testing.T, caddyfile string) {
	t.Helper()
	config, err := adapted(caddyfile)
	if err != nil {
		return
	}
	var parsed struct {
		Apps map[string]any `json:"apps"`
	}
	if err := json.Unmarshal(config, &parsed); err != nil {
		t.Fatalf("%v in:\n%s", err, config)
	}
	if app, ok := parsed.Apps["rate_limit"]; ok {
		checkRoundTrip(t, app, new(App))
	}
	for _, handler := range handlersIn(parsed.Apps) {
		delete(handler, "handler")
		checkRoundTrip(t, handler, new(Handler))
	}
}

// handlersIn returns all rate_limit handlers in a configuration.
func handlersIn(config any) (handlers []map[string]any) {
	switch config := config.(type) {
	case []any:
		for _, part := range config {
			handlers = append(handlers, handlersIn(part)...)
		}
	case map[string]any:
		if config["handler"] == "rate_limit" {
			return []map[string]any{config}
		}
		for _, part := range config {
			handlers = append(handlers, handlersIn(part)...)
		}
	}
	return handlers
}

func checkRoundTrip(t *testing.T, config, to any) {
	t.Helper()
	written, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.StrictUnmarshalJSON(written, to); err != nil {
		t.Fatalf("reading %s: %v", written, err)
	}
	again, err := json.Marshal(to)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(sorted(t, written), sorted(t, again)) {
		t.Fatalf("written as %s\nread as %s", written, again)
	}
}

// sorted returns JSON with the keys of objects in order.
func sorted(t *testing.T, text []byte) []byte {
	t.Helper()
	var value any
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func FuzzCaddyfile(f *testing.F) {
	for _, file := range golden(f) {
		f.Add(file[0])
	}
	for _, row := range wrongFiles {
		f.Add(row.text)
	}
	f.Fuzz(func(t *testing.T, caddyfile string) {
		if strings.Contains(caddyfile, "import") {
			return // reads files
		}
		checkSurvives(t, caddyfile)
	})
}

// FuzzZone spends its time inside of a zone.
func FuzzZone(f *testing.F) {
	f.Add("rate 10/s\nburst 20\ncost 5 /search\nsensitive @api\nkey {client_ip}")
	f.Add("rate 1/s\nmatch @api\nmatch path /a /b\nmatch {\nmethod GET\n}\nmatch `{path} == \"/\"`")
	for _, row := range wrongInZone {
		f.Add(row.text)
	}
	f.Fuzz(func(t *testing.T, lines string) {
		if strings.Contains(lines, "import") {
			return // reads files
		}
		checkSurvives(t, ":80 {\n\t@api path /api/*\n\trate_limit {\n\t\tzone z {\n"+lines+"\n\t\t}\n\t}\n}\n")
		checkSurvives(t, "{\n\trate_limit {\n\t\tzone z {\n"+lines+"\n\t\t}\n\t}\n}\n")
	})
}

// A file that is imported is named in errors, with the line that imports it.
func TestCaddyfileErrorInImport(t *testing.T) {
	name := filepath.Join(t.TempDir(), "zones")
	if err := os.WriteFile(name, []byte("rate_limit {\n\tzone api {\n\t\trate 1/s\n\t\tbrust 1\n\t}\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := adapted(":80 {\n\timport " + name + "\n}\n")
	want := ", at " + name + ":4 import chain ['Caddyfile:2 (import)']"
	if err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("got %v, want an error that ends with %s", err, want)
	}
}

// Adapting leaves nothing behind.
func TestGlobalOptionsAreForgotten(t *testing.T) {
	for range 100 {
		if _, err := adapted("{\n\trate_limit {\n\t\tzone web {\n\t\t\trate 1/s\n\t\t}\n\t}\n}\n"); err != nil {
			t.Fatal(err)
		}
	}
	left := 0
	for range 1000 {
		runtime.GC()
		left = 0
		globalOptions.Range(func(any, any) bool { left++; return true })
		if left == 0 {
			return
		}
	}
	t.Errorf("%d global options are remembered after their adaptation", left)
}
