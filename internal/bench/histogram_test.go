package bench

import (
	"math"
	"testing"
	"time"
)

// Every time is in a bucket whose middle is at most 1/128 away, and buckets are in the order of times.
func TestBucketsCoverAllTimes(t *testing.T) {
	last := -1
	for d := time.Duration(0); d < 1<<20; d++ {
		b := bucketOf(d)
		if b != last && b != last+1 {
			t.Fatalf("%d is in bucket %d, after %d", d, b, last)
		}
		last = b
		if off := math.Abs(float64(middle(b) - d)); off > max(float64(d)/128, 0.5) {
			t.Fatalf("%d stands as %d", d, middle(b))
		}
	}
	for d := time.Duration(1 << 20); d > 0; d *= 2 {
		if off := math.Abs(float64(middle(bucketOf(d-1)) - d)); off > float64(d)/64 {
			t.Errorf("%d stands as %d", d-1, middle(bucketOf(d-1)))
		}
	}
	new(histogram).record(math.MaxInt64) // the last bucket is there
}

func TestQuantiles(t *testing.T) {
	var h histogram
	if got := h.quantile(0.5); got != 0 {
		t.Errorf("of nothing: got %s", got)
	}
	h.record(-time.Second) // a clock that went back counts as no time
	for ms := range 99 {
		h.record(time.Duration(ms+1) * time.Millisecond)
	}
	for q, want := range map[float64]time.Duration{0: 0, 0.01: 0, 0.5: 49 * time.Millisecond, 0.99: 98 * time.Millisecond, 1: 99 * time.Millisecond} {
		if got := h.quantile(q); math.Abs(float64(got-want)) > float64(want)/128 {
			t.Errorf("%v: got %s, want about %s", q, got, want)
		}
	}
}
