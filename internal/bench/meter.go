package bench

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
	"github.com/caddy-tollgate/ratelimit/internal/redistest"
)

// meter reads what the processes have used, before and after.
type meter struct {
	t                     testing.TB
	redis                 *redistest.Server
	serverPids, redisPids []int
	before, after         reading
	begun                 bool
}

// reading is what was used so far.
type reading struct {
	server, redis, own time.Duration
	commands           map[string]int64 // that Redis has executed, by name
}

// mark is called when the measured time begins and when it ends. What it asks Redis itself is outside of the CPU times.
func (m *meter) mark() {
	m.t.Helper()
	if !m.begun {
		m.begun = true
		m.before.commands = commands(m.redis)
		m.before.times(m)
		return
	}
	m.after.times(m)
	m.after.commands = commands(m.redis)
}

func (r *reading) times(m *meter) {
	m.t.Helper()
	r.server, r.redis, r.own = m.cpu(m.serverPids), m.cpu(m.redisPids), m.cpu([]int{os.Getpid()})
}

func (m *meter) cpu(pids []int) time.Duration {
	m.t.Helper()
	used, err := proc.CPU(pids)
	if err != nil {
		m.t.Fatal(err)
	}
	return used
}

func commands(redis *redistest.Server) map[string]int64 {
	info, _ := redis.Do("info", "commandstats").(string)
	return parseCommands(info)
}

// parseCommands reads lines like cmdstat_evalsha:calls=12,usec=…
func parseCommands(info string) map[string]int64 {
	counts := make(map[string]int64)
	for line := range strings.Lines(info) {
		name, rest, _ := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":")
		var calls int64
		if _, err := fmt.Sscanf(rest, "calls=%d,", &calls); err == nil && name != "info" {
			counts[name] = calls
		}
	}
	return counts
}

// scripts are the commands that run other commands, which Redis counts as well.
var scripts = []string{"eval", "evalsha", "eval_ro", "evalsha_ro", "fcall", "fcall_ro"}

// calls returns how many commands clients have sent between two readings, and how many were executed, those inside of scripts
// among them. Redis does not tell the two apart: where there are scripts, only they are taken for sent.
func calls(before, after map[string]int64) (sent, executed int64) {
	for name, count := range after {
		executed += count - before[name]
	}
	for _, name := range scripts {
		sent += after[name] - before[name]
	}
	if sent == 0 {
		sent = executed
	}
	return sent, executed
}
