package proc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Pids returns the program's process and those that descend from it now.
func (p *Process) Pids() []int {
	p.t.Helper()
	if p.Exited() {
		p.t.Fatalf("%s does not run", p.name)
	}
	parents, err := parents()
	if err != nil {
		p.t.Fatalf("finding the processes of %s: %v", p.name, err)
	}
	pids := []int{p.pid}
	for i := 0; i < len(pids); i++ {
		for pid, parent := range parents {
			if parent == pids[i] {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids[1:])
	return pids
}

// parents returns the parent of each process.
func parents() (map[int]int, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	all := make(map[int]int, len(paths))
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		pid, parent, err := parseStat(stat)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", path, err)
		}
		all[pid] = parent
	}
	return all, nil
}

// parseStat reads the beginning of a stat file: number, name in parentheses, state, parent. The name may hold anything.
func parseStat(stat []byte) (pid, parent int, err error) {
	number, _, _ := bytes.Cut(stat, []byte{' '})
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 2 {
		return 0, 0, fmt.Errorf("too few fields: %q", stat)
	}
	if pid, err = strconv.Atoi(string(number)); err != nil {
		return 0, 0, err
	}
	parent, err = strconv.Atoi(string(fields[1]))
	return pid, parent, err
}

// CPU returns how long the processes have run on processors so far, in user and kernel mode, all threads together: what the
// kernel has accounted, to the nanosecond, where /proc only tells hundredths of a second.
func CPU(pids []int) (time.Duration, error) {
	var sum time.Duration
	for _, pid := range pids {
		// The clock of a process has its number, inverted, above three bits; 2 stands for what the scheduler has counted.
		const scheduled = 2
		var used unix.Timespec
		if err := unix.ClockGettime(int32(^pid<<3|scheduled), &used); err != nil {
			return 0, fmt.Errorf("reading the CPU time of process %d: %w", pid, err)
		}
		sum += time.Duration(used.Nano())
	}
	return sum, nil
}
