package ratelimit

import "time"

// processStart anchors the clock of this process: wall time to begin with, monotonic from then on, so that buckets in memory
// do not jump when the system's clock is set.
var processStart = time.Now()

// processMicros returns the time in microseconds by the clock of this process.
func processMicros() int64 {
	return processStart.UnixMicro() + time.Since(processStart).Microseconds()
}
