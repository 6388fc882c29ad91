package proc

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestProcessStartsAgainAndKeepsItsOutput(t *testing.T) {
	p := New(t, "sh")
	if !p.Exited() {
		t.Error("runs before it was started")
	}
	p.Start(exec.Command("sh", "-c", "echo first; exit 3"))
	if code := p.Wait(); code != 3 {
		t.Errorf("exit code: got %d, want 3", code)
	}
	p.Start(exec.Command("sh", "-c", "echo second; sleep 600"))
	p.Ready(func() bool { return strings.Contains(p.Output(), "second") })
	p.Kill()
	if code := p.Wait(); code != -1 {
		t.Errorf("exit code after a kill: got %d, want -1", code)
	}
	if got, want := p.Output(), "first\nsecond\n"; got != want {
		t.Errorf("output: got %q, want %q", got, want)
	}
	p.Signal(syscall.SIGTERM) // to nobody: the pid may be another's by now
}

func TestKillReachesAStoppedProcess(t *testing.T) {
	p := New(t, "sleep")
	p.Start(exec.Command("sleep", "600"))
	p.Signal(syscall.SIGSTOP)
	p.Kill()
	if !p.Exited() {
		t.Error("still runs")
	}
}

func TestProcessIsKilledWhenTheTestEnds(t *testing.T) {
	var p *Process
	t.Run("inner", func(t *testing.T) {
		p = New(t, "sleep")
		p.Start(exec.Command("sleep", "600"))
	})
	if !p.Exited() {
		t.Error("outlived its test")
	}
}

func TestEventuallyGivesUp(t *testing.T) {
	if err := eventually(time.Millisecond, func() bool { return false }); err == nil {
		t.Error("no error for a condition that never holds")
	}
	tries := 0
	if err := eventually(time.Minute, func() bool { tries++; return tries == 3 }); err != nil {
		t.Error(err)
	}
}
