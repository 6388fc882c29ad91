package ratelimit

import (
	"math"
	"testing"
	"time"
)

// rules are the default numbers of a penalty.
func rules() *penaltyRules {
	return &penaltyRules{after: 3, base: us(time.Minute), max: us(time.Hour), window: us(time.Hour)}
}

func TestBlockLength(t *testing.T) {
	odd := &penaltyRules{after: 0, base: us(time.Second), max: us(5 * time.Second), window: us(time.Minute)}
	short := &penaltyRules{after: 1, base: us(time.Hour), max: us(time.Minute), window: us(time.Minute)}
	long := &penaltyRules{after: 3, base: 1, max: maxExact - 1, window: 1}
	for _, c := range []struct {
		rules   *penaltyRules
		strikes int64
		want    time.Duration
		why     string
	}{
		{rules(), 4, 2 * time.Minute, "the first block"},
		{rules(), 5, 4 * time.Minute, ""},
		{rules(), 6, 8 * time.Minute, ""},
		{rules(), 7, 16 * time.Minute, ""},
		{rules(), 8, 32 * time.Minute, ""},
		{rules(), 9, time.Hour, "64 minutes are cut to the longest"},
		{rules(), 10, time.Hour, "and stay there"},
		{rules(), maxStrikes, time.Hour, "doubling does not overflow"},
		{odd, 1, 2 * time.Second, "nothing is forgiven"},
		{odd, 3, 5 * time.Second, "a longest that is no power of two"},
		{short, 2, time.Minute, "a longest below the base"},
		{long, 3 + 52, 1 << 52 * time.Microsecond, "the largest power below 2^53"},
		{long, 3 + 53, (maxExact - 1) * time.Microsecond, "never above the longest"},
	} {
		if got := c.rules.length(c.strikes); got != us(c.want) {
			t.Errorf("%d strikes block for %d µs, want %d: %s", c.strikes, got, us(c.want), c.why)
		}
	}
}

func TestStruck(t *testing.T) {
	const now = 1_000_000_000_000
	browsers := rules()
	browsers.every = us(10 * time.Second)
	ago := func(d time.Duration) int64 { return now - us(d) }
	for _, c := range []struct {
		rules   *penaltyRules
		record  strikeRecord
		want    strikeRecord
		counted bool
		why     string
	}{
		{rules(), strikeRecord{}, strikeRecord{1, 0, now, 0}, true, "the first strike"},
		{rules(), strikeRecord{2, 0, ago(time.Minute), 0}, strikeRecord{3, 0, now, 0}, true, "the last that is forgiven"},
		{rules(), strikeRecord{3, 0, now, 0}, strikeRecord{4, now + us(2*time.Minute), now, 0}, true, "one more blocks, even in the same microsecond"},
		{rules(), strikeRecord{4, now, ago(2 * time.Minute), 0}, strikeRecord{5, now + us(4*time.Minute), now, 0}, true, "the next block is longer"},
		{rules(), strikeRecord{maxStrikes, now, ago(time.Hour), 0}, strikeRecord{maxStrikes, now + us(time.Hour), now, 0}, true, "counting stops, blocking does not"},
		{browsers, strikeRecord{}, strikeRecord{1, 0, now, 0}, true, "`every` spares no first strike"},
		{browsers, strikeRecord{1, 0, ago(10 * time.Second), 0}, strikeRecord{2, 0, now, 0}, true, "`every` is over"},
		{browsers, strikeRecord{1, 0, ago(10*time.Second) + 1, 0}, strikeRecord{1, 0, ago(10*time.Second) + 1, 0}, false, "one microsecond too early is no strike"},
	} {
		got, counted := c.record.struck(c.rules, now)
		if got != c.want || counted != c.counted {
			t.Errorf("%+v struck: %+v, %v; want %+v, %v: %s", c.record, got, counted, c.want, c.counted, c.why)
		}
	}
}

func TestSettledRecord(t *testing.T) {
	const now = 1_000_000_000_000
	hour, minute := us(time.Hour), us(time.Minute)
	for _, c := range []struct {
		record strikeRecord
		want   strikeRecord
		stale  bool
		why    string
	}{
		{strikeRecord{}, strikeRecord{}, false, "nothing stored"},
		{strikeRecord{2, 0, now - hour + 1, 0}, strikeRecord{2, 0, now - hour + 1, 0}, false, "a microsecond before the window ends"},
		{strikeRecord{2, 0, now - hour, 0}, strikeRecord{}, false, "the window is over"},
		{strikeRecord{4, now + minute, now - minute, 0}, strikeRecord{4, now + minute, now - minute, 0}, false, "a live block"},
		{strikeRecord{9, now - hour + 1, now - 2*hour, 0}, strikeRecord{9, now - hour + 1, now - 2*hour, 0}, false, "the window begins with the end of the block"},
		{strikeRecord{9, now - hour, now - 2*hour, 0}, strikeRecord{}, false, "window and block are over"},
		{strikeRecord{2, 0, now + 1, 0}, strikeRecord{2, 0, now, 0}, true, "a strike in the future was now: the clock went back"},
		{strikeRecord{9, now + hour, now, 0}, strikeRecord{9, now + hour, now, 0}, false, "the longest block"},
		{strikeRecord{9, now + hour + 1, now, 0}, strikeRecord{9, now + hour, now, 0}, true, "no block ends later than the longest from now"},
		{strikeRecord{9, maxExact, maxExact, 0}, strikeRecord{9, now + hour, now, 0}, true, "garbage heals by itself"},
		{strikeRecord{math.MinInt64, 0, 0, 0}, strikeRecord{}, false, "garbage that is over"},
	} {
		got, stale := c.record.settled(rules(), now)
		if got != c.want || stale != c.stale {
			t.Errorf("%+v settled: %+v, stale %v; want %+v, %v: %s", c.record, got, stale, c.want, c.stale, c.why)
		}
	}
}
