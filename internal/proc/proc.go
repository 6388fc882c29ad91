// Package proc runs other programs for tests: it starts and ends them, finds them ports that nobody else takes, and
// waits for what they do. It keeps no goroutine of its own, so that leak tests see only what they are about.
package proc

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for something that should happen at once. It only ends tests that have failed, so
// it is long enough for a slow machine under the race detector.
const patience = 30 * time.Second

// Process is a program that a test may start, end and start again. When the test ends it is killed, and if the test
// failed, what it wrote is printed.
type Process struct {
	t    testing.TB
	name string
	log  string // path of the file that takes its output, of all starts

	mu   sync.Mutex
	pid  int // 0 before the first start
	gone bool
	code int
}

// New returns a process that is not started yet. The name is for messages.
func New(t testing.TB, name string) *Process {
	p := &Process{t: t, name: name, log: filepath.Join(t.TempDir(), name+".log"), gone: true}
	t.Cleanup(p.end)
	return p
}

// Start starts the program. Its output goes to the log.
func (p *Process) Start(cmd *exec.Cmd) {
	p.t.Helper()
	if !p.Exited() {
		p.t.Fatalf("%s runs already", p.name)
	}
	// A file, not a buffer: that would need a goroutine, and the program would hang when the test binary dies.
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	dieWithParent(cmd)
	if err := cmd.Start(); err != nil {
		p.t.Fatalf("starting %s: %v", p.name, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pid, p.gone, p.code = cmd.Process.Pid, false, 0
}

// Exited says whether the program does not run: not started, or ended by itself or by a signal.
func (p *Process) Exited() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exitedLocked()
}

func (p *Process) exitedLocked() bool {
	if p.gone {
		return true
	}
	var status syscall.WaitStatus
	pid, err := syscall.Wait4(p.pid, &status, syscall.WNOHANG, nil)
	if err == nil && pid == 0 || err == syscall.EINTR {
		return false
	}
	p.gone, p.code = true, status.ExitStatus()
	return true
}

// Signal sends a signal to the program, if it still runs.
func (p *Process) Signal(sig syscall.Signal) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.exitedLocked() {
		return
	}
	if err := syscall.Kill(p.pid, sig); err != nil {
		p.t.Errorf("sending %v to %s: %v", sig, p.name, err)
	}
}

// Wait waits until the program has ended and returns its exit code, -1 if a signal ended it.
func (p *Process) Wait() int {
	p.t.Helper()
	Eventually(p.t, p.name+" ends", p.Exited)
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.code
}

// Kill ends the program at once, without a chance to clean up, and waits until it is gone.
func (p *Process) Kill() {
	p.t.Helper()
	p.Signal(syscall.SIGKILL)
	p.Wait()
}

// Output returns what the program has written so far, over all its starts.
func (p *Process) Output() string {
	p.t.Helper()
	output, err := os.ReadFile(p.log)
	if err != nil && !os.IsNotExist(err) {
		p.t.Errorf("reading what %s wrote: %v", p.name, err)
	}
	return string(output)
}

func (p *Process) end() {
	p.Kill()
	if p.t.Failed() {
		p.t.Logf("%s wrote:\n%s", p.name, p.Output())
	}
}

// Ready waits until the program that was just started is ready, and fails the test at once if it ends instead.
func (p *Process) Ready(ready func() bool) {
	p.t.Helper()
	Eventually(p.t, p.name+" is ready", func() bool {
		if p.Exited() {
			p.t.Fatalf("%s ended before it was ready", p.name)
		}
		return ready()
	})
}

// Eventually waits until the condition holds, and fails the test if that takes too long.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	if err := eventually(patience, condition); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

func eventually(limit time.Duration, condition func() bool) error {
	deadline := time.Now().Add(limit)
	for !condition() {
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v", limit)
		}
		time.Sleep(2 * time.Millisecond)
	}
	return nil
}
