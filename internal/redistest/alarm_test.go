package redistest

import (
	"testing"
	"time"
)

// An alarm never rings early, and waits again after that.
func TestAlarm(t *testing.T) {
	bell, err := newAlarm()
	if err != nil {
		t.Fatal(err)
	}
	defer bell.close()
	for _, d := range []time.Duration{-time.Second, 0, time.Nanosecond, 500 * time.Microsecond, 3 * time.Millisecond} {
		begin := time.Now()
		if err := bell.wait(d); err != nil {
			t.Fatal(err)
		}
		if got := time.Since(begin); got < d || got > d+10*time.Second {
			t.Errorf("waited %s, want %s", got, d)
		}
	}
}
