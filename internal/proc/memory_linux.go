package proc

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// Resident returns how many bytes of memory the processes occupy now, what they share counted for each.
func Resident(pids []int) (bytes int64, err error) {
	for _, pid := range pids {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
		kilobytes, err := parseResident(status)
		if err != nil {
			return 0, fmt.Errorf("reading the memory of process %d: %w", pid, err)
		}
		bytes += kilobytes << 10
	}
	return bytes, nil
}

// parseResident finds a line like "VmRSS:	    1234 kB".
func parseResident(status []byte) (kilobytes int64, err error) {
	_, rest, found := bytes.Cut(status, []byte("VmRSS:"))
	if !found {
		return 0, fmt.Errorf("no VmRSS in %q", status)
	}
	line, _, _ := bytes.Cut(rest, []byte{'\n'})
	return strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(string(line)), " kB"), 10, 64)
}
