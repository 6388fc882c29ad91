package ratelimit

import (
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var mapped = regexp.MustCompile(`\b[a-z_]+(\*|)\.(go|lua)\b`)

// The map in the comment of the package leads to each file, and to none that is gone.
func TestFileMap(t *testing.T) {
	text, err := os.ReadFile("module.go")
	if err != nil {
		t.Fatal(err)
	}
	comment, _, _ := strings.Cut(string(text), "\npackage ")
	patterns := mapped.FindAllString(comment, -1)
	leads := map[string]bool{}
	here, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range here {
		name := file.Name()
		if ext := path.Ext(name); ext != ".go" && ext != ".lua" || strings.HasSuffix(name, "_test.go") {
			continue
		}
		if !slices.ContainsFunc(patterns, func(pattern string) bool {
			matched, _ := path.Match(pattern, name) // the patterns are well-formed
			leads[pattern] = leads[pattern] || matched
			return matched
		}) {
			t.Errorf("the map does not lead to %s", name)
		}
	}
	for _, pattern := range patterns {
		if !leads[pattern] {
			t.Errorf("the map leads to %s, which is not there or is mapped before", pattern)
		}
	}
}
