package proc

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// The processor time of a program includes what its children use, and not what the test uses.
func TestCPUOfAFamily(t *testing.T) {
	p := New(t, "sh")
	p.Start(exec.Command("sh", "-c", "sh -c 'while :; do :; done' & wait"))
	p.Ready(func() bool { return len(p.Pids()) == 2 })
	family, parent := p.Pids(), p.Pids()[:1]
	before, idle := used(t, family), used(t, parent)
	Eventually(t, "the child has used 50 ms", func() bool { return used(t, family)-before > 50*time.Millisecond })
	if got := used(t, parent) - idle; got > 20*time.Millisecond {
		t.Errorf("the parent, which only waits, used %s", got)
	}
	pids := p.Pids()
	p.Kill()
	Eventually(t, "the kernel knows the process no longer", func() bool {
		_, err := CPU(pids[:1])
		return err != nil
	})
	if child, err := os.FindProcess(pids[1]); err == nil {
		_ = child.Kill() // an orphan by now
	}
}

func used(t *testing.T, pids []int) time.Duration {
	t.Helper()
	used, err := CPU(pids)
	if err != nil {
		t.Fatal(err)
	}
	return used
}

func TestParseStat(t *testing.T) {
	for _, row := range []struct {
		stat        string
		pid, parent int
		fails       bool
	}{
		{stat: "12 (redis-server) S 7 12 12 0 -1", pid: 12, parent: 7},
		{stat: "12 (a) b) (c) R 7 12", pid: 12, parent: 7},
		{stat: "12 (sh) S", fails: true},
		{stat: "x (sh) S 7", fails: true},
		{stat: "", fails: true},
	} {
		pid, parent, err := parseStat([]byte(row.stat))
		if row.fails {
			if err == nil {
				t.Errorf("%q: no error", row.stat)
			}
			continue
		}
		if pid != row.pid || parent != row.parent || err != nil {
			t.Errorf("%q: got %d, %d, %v", row.stat, pid, parent, err)
		}
	}
}
