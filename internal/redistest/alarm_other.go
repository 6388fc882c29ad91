//go:build !linux

package redistest

import "time"

// alarm waits to a millisecond or two.
type alarm struct{}

func newAlarm() (*alarm, error) { return new(alarm), nil }

func (*alarm) wait(d time.Duration) error {
	time.Sleep(d)
	return nil
}

func (*alarm) close() {}
