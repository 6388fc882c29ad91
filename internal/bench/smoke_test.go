package bench

import (
	"strings"
	"testing"
	"time"
)

// A short run of a scenario: nothing about speed, but that everything is counted and every server answers as it should.
func TestRun(t *testing.T) {
	o := options{rounds: 2, duration: 200 * time.Millisecond}
	sc := find(t, "redis")
	sc.fill, sc.load.conns = false, 4
	r := run(t, sc, o)
	if len(r.servers) != 3 || len(r.servers[0].all) != 3 || len(r.servers[1].all) != 2 {
		t.Fatalf("got %+v, want three servers with 3, 2 and 2 rounds", r.servers)
	}
	for i, s := range r.servers {
		for _, round := range s.all {
			if round.perSecond < 10 || round.p50 <= 0 || round.p99 < round.p50 || round.server <= 0 || round.own <= 0 {
				t.Errorf("%s: implausible: %+v", s.name, round)
			}
			if i == 0 && round.calls > 0.5 || i == 1 && round.calls == 0 || i == 2 && (round.calls < 0.5 || round.calls > 1.5) {
				t.Errorf("%s: %v calls a request", s.name, round.calls)
			}
		}
	}
}

// The flood scenarios answer with their own status: run fails the test otherwise.
func TestRunFloods(t *testing.T) {
	for _, sc := range floods() {
		t.Run(sc.name, func(t *testing.T) {
			sc.load.conns, sc.subjects = 4, sc.subjects[:2]
			run(t, sc, options{rounds: 1, duration: 100 * time.Millisecond})
		})
	}
}

func TestRival(t *testing.T) {
	backend := newRig(t, &scenario{}).env["BACKEND"]
	sc := find(t, "memory")
	sc.fill, sc.load.conns = false, 2
	o := options{rounds: 1, duration: 100 * time.Millisecond, rival: &rival{name: "sleep", command: "sleep 600", url: "http://" + backend + "/"}}
	r := run(t, sc, o)
	if len(r.servers) != 3 || r.servers[2].name != "sleep" || r.servers[2].all[0].perSecond < 10 {
		t.Errorf("got %+v", r.servers)
	}
	if table := speedTable([]result{r}); !strings.Contains(table, "| sleep |") {
		t.Errorf("the rival is no row of\n%s", table)
	}
}

func find(t *testing.T, name string) scenario {
	t.Helper()
	for _, sc := range scenarios() {
		if sc.name == name {
			return sc
		}
	}
	t.Fatalf("no scenario %q", name)
	return scenario{}
}
