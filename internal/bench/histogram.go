package bench

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

// perDoubling is how many buckets share a doubling of the time: what is read is at most 1/128 off.
const perDoubling = 64

// histogram counts how long requests took, from many goroutines, without allocating. Its buckets have the width of a
// nanosecond at first, and twice that after each doubling.
type histogram struct {
	counts [perDoubling * 59]atomic.Uint64
}

func (h *histogram) record(d time.Duration) { h.counts[bucketOf(max(d, 0))].Add(1) }

func bucketOf(d time.Duration) int {
	shift := max(bits.Len64(uint64(d))-bits.Len(perDoubling), 0)
	return shift*perDoubling + int(d>>shift)
}

// middle returns what stands for all times of a bucket.
func middle(bucket int) time.Duration {
	shift := max(bucket/perDoubling-1, 0)
	low := time.Duration(bucket-shift*perDoubling) << shift
	return low + time.Duration(1)<<shift/2
}

// quantile returns the time that a part q of all requests did not exceed, 0 if there were none.
func (h *histogram) quantile(q float64) time.Duration {
	var total uint64
	for i := range h.counts {
		total += h.counts[i].Load()
	}
	rank := max(uint64(math.Ceil(q*float64(total))), 1)
	var seen uint64
	for i := range h.counts {
		if seen += h.counts[i].Load(); seen >= rank {
			return middle(i)
		}
	}
	return 0
}
