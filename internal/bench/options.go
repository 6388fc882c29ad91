package bench

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// options are what `make bench` can be told, all by the environment.
type options struct {
	rounds   int            // ROUNDS
	duration time.Duration  // DURATION of a round
	only     *regexp.Regexp // SCENARIO
	rival    *rival         // BENCH_RIVAL
	docs     string         // BENCH_DOCS, the folder for the report; empty: it is only printed
}

// rival is a server of somebody else: BENCH_RIVAL="name=command url".
type rival struct{ name, command, url string }

func parseOptions(getenv func(string) string) (o options, err error) {
	if o.rounds, err = strconv.Atoi(or(getenv("ROUNDS"), "7")); err != nil || o.rounds < 1 {
		return o, fmt.Errorf("ROUNDS must be a number from 1, got %q", getenv("ROUNDS"))
	}
	if o.duration, err = time.ParseDuration(or(getenv("DURATION"), "2s")); err != nil || o.duration <= 0 {
		return o, fmt.Errorf("DURATION must be like 2s, got %q", getenv("DURATION"))
	}
	if o.only, err = regexp.Compile(getenv("SCENARIO")); err != nil {
		return o, fmt.Errorf("reading SCENARIO: %w", err)
	}
	o.docs = getenv("BENCH_DOCS")
	if text := getenv("BENCH_RIVAL"); text != "" {
		o.rival, err = parseRival(text)
	}
	return o, err
}

func or(value, otherwise string) string {
	if value == "" {
		return otherwise
	}
	return value
}

func parseRival(text string) (*rival, error) {
	name, rest, named := strings.Cut(strings.TrimSpace(text), "=")
	split := strings.LastIndexByte(rest, ' ')
	if !named || name == "" || split < 1 || !strings.HasPrefix(rest[split+1:], "http://") {
		return nil, fmt.Errorf("BENCH_RIVAL must be like %q, got %q", "name=command http://127.0.0.1:8080/", text)
	}
	return &rival{name: name, command: strings.TrimSpace(rest[:split]), url: rest[split+1:]}, nil
}

// selected returns the scenarios that SCENARIO names.
func (o options) selected() (all []scenario) {
	for _, sc := range scenarios() {
		if o.only.MatchString(sc.name) {
			all = append(all, sc)
		}
	}
	return all
}

// command returns what to type to measure the same again.
func (o options) command() string {
	text := fmt.Sprintf("make bench ROUNDS=%d DURATION=%s", o.rounds, o.duration)
	if o.only.String() != "" {
		text += " SCENARIO='" + o.only.String() + "'"
	}
	if o.rival != nil {
		text += fmt.Sprintf(" BENCH_RIVAL='%s=…'", o.rival.name) // a command can name paths of this machine
	}
	return text
}
