package ratelimit

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// limit reads a limit the way a zone is configured.
func limit(t rapid.TB, rate string, burst int64) Limit {
	t.Helper()
	r, err := ParseRate(rate)
	if err != nil {
		t.Fatal(err)
	}
	return Limit{Num: r.num, Den: r.den, Burst: burst * Token}
}

// us is a time or a duration in microseconds.
func us(d time.Duration) int64 { return d.Microseconds() }

func TestRefilled(t *testing.T) {
	const none = maxExact - 1
	for _, c := range []struct {
		elapsed, num, den, room, want int64
		why                           string
	}{
		{0, 1, 1, none, 0, "no time, no tokens"},
		{1, 1, 1, none, 1, "one microsecond at one token a second"},
		{6, 1, 7, none, 0, "a part of a period rounds down to nothing"},
		{7, 1, 7, none, 1, "a whole period"},
		{20, 3, 7, none, 8, "60/7 rounds down"},
		{20, 3, 7, 5, 5, "at most what there is room for"},
		{20, 3, 7, 8, 8, "exactly the room"},
		{1 << 40, 1, 1, 0, 0, "no room"},
		{maxExact - 1, 1, 1, none, maxExact - 1, "285 years at one token a second"},
		{maxExact - 1, 1<<32 - 1, 1, none, maxExact - 1, "the product is far above 2^53: the room bounds it first"},
		{maxExact - 1, 1, 1<<32 - 1, none, 2097152, "the slowest rate for 285 years"},
		{maxExact - 1, 1<<21 - 1, 1<<32 - 1, 1 << 50, 4398044414975, "a large rest times a large numerator stays below 2^53"},
		{math.MaxInt64, 1<<21 - 1, 1<<32 - 1, none, 4503597480935423, "garbage as the time of a stored bucket does not overflow"},
		{us(24 * time.Hour), 15625, 135, none, 1e13, "10M/day for a day"},
		{us(24*time.Hour) - 1, 15625, 135, none, 1e13 - 116, "and one microsecond less: 115.7 millionths"},
		{us(24 * time.Hour), 1, 86400, none, Token, "1/day for a day"},
		{us(24*time.Hour) - 1, 1, 86400, none, Token - 1, "and one microsecond less"},
		{us(time.Second), 30000, 1, none, 30000 * Token, "30000/s for a second"},
	} {
		if got := refilled(c.elapsed, c.num, c.den, c.room); got != c.want {
			t.Errorf("refilled(%d, %d/%d, room %d) = %d, want %d: %s", c.elapsed, c.num, c.den, c.room, got, c.want, c.why)
		}
	}
}

func TestWait(t *testing.T) {
	for _, c := range []struct {
		rate    string
		missing int64
		want    int64
		why     string
	}{
		{"1/s", 0, 0, "nothing is missing"},
		{"1/s", 1, 1, "a millionth of a token"},
		{"1/s", Token, us(time.Second), "a token"},
		{"3/s", Token, 333334, "a third of a second, rounded up"},
		{"30000/s", Token, 34, "33.3 microseconds, rounded up"},
		{"10000000/day", Token, 8640, "exactly: no rounding"},
		{"10000000/day", 1, 1, "less than a microsecond is one"},
		{"1/day", Token, us(24 * time.Hour), "a day"},
		{"1/day", Token - 1, us(24*time.Hour) - 86400, "a millionth of a token takes 86.4 ms"},
		{"1/day", 100000 * Token, us(100000 * 24 * time.Hour), "274 years, just below 2^53"},
	} {
		l := limit(t, c.rate, 1)
		if got := l.wait(c.missing); got != c.want {
			t.Errorf("wait(%d) at %s = %d, want %d: %s", c.missing, c.rate, got, c.want, c.why)
		}
	}
}

var anyLimit = rapid.Custom(func(t *rapid.T) Limit {
	den := rapid.Int64Range(1, 1<<32-1).Draw(t, "den")
	num := rapid.Int64Range(1, min(1<<32-1, (maxExact-1)/den)).Draw(t, "num")
	most := int64(maxExact - 1)
	if num < den {
		// The time in which a bucket fills is below 2^53 too.
		slow := new(big.Int).Mul(big.NewInt(most), big.NewInt(num))
		most = max(slow.Div(slow, big.NewInt(den)).Int64(), 1)
	}
	return Limit{Num: num, Den: den, Burst: rapid.Int64Range(1, most).Draw(t, "burst")}
})

// Whatever the numbers: what is calculated in 64 bits is what it would be in any number of bits.
func TestRefilledIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLimit.Draw(t, "limit")
		elapsed := rapid.Int64Range(0, maxExact-1).Draw(t, "elapsed")
		room := rapid.Int64Range(0, l.Burst).Draw(t, "room")
		want := new(big.Int).Mul(big.NewInt(elapsed), big.NewInt(l.Num))
		want.Div(want, big.NewInt(l.Den))
		if want.Cmp(big.NewInt(room)) > 0 {
			want.SetInt64(room)
		}
		if got := refilled(elapsed, l.Num, l.Den, room); got != want.Int64() {
			t.Fatalf("refilled %d, want %d", got, want)
		}
	})
}

// A client that waits as long as it is told has what was missing, and one microsecond less is too short.
func TestWaitIsTrue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := anyLimit.Draw(t, "limit")
		missing := rapid.Int64Range(1, l.Burst).Draw(t, "missing")
		w := l.wait(missing)
		if w < 1 || refilled(w, l.Num, l.Den, l.Burst) < missing {
			t.Fatalf("after wait(%d) = %d only %d flowed in", missing, w, refilled(w, l.Num, l.Den, l.Burst))
		}
		if early := refilled(w-1, l.Num, l.Den, l.Burst); early >= missing {
			t.Fatalf("wait(%d) = %d, but one microsecond less is enough", missing, w)
		}
	})
}

func TestSettled(t *testing.T) {
	slow, fast := limit(t, "1/s", 10), limit(t, "5/s", 10)
	large, small := limit(t, "1/s", 100), limit(t, "1/s", 3)
	const now = 1_000_000_000
	bucket := func(tokens float64, ago time.Duration, l Limit) Bucket {
		return Bucket{Tokens: int64(tokens * Token), At: now - us(ago), Num: l.Num, Den: l.Den}
	}
	for _, c := range []struct {
		stored Bucket
		limit  Limit
		tokens float64
		stale  bool
		why    string
	}{
		{Bucket{}, slow, 10, false, "nothing stored is a full bucket, and nothing to repair"},
		{bucket(2, 0, slow), slow, 2, false, "no time"},
		{bucket(2, 3*time.Second, slow), slow, 5, false, "refill"},
		{bucket(2, time.Hour, slow), slow, 10, false, "never more than the burst"},
		{bucket(0, 0, slow), fast, 0, true, "a faster rate gives no token by itself"},
		{bucket(0, 2*time.Second, slow), fast, 2, true, "time before a change counts at the old rate: faster"},
		{bucket(0, time.Second, fast), slow, 5, true, "time before a change counts at the old rate: slower"},
		{bucket(2, 0, slow), large, 2, false, "a larger burst gives no token"},
		{bucket(2, time.Minute, slow), large, 62, false, "but holds more of what flows in"},
		{bucket(2, 0, large), small, 2, false, "a smaller burst takes no token that it can hold"},
		{bucket(50, 0, large), small, 3, false, "what it cannot hold is gone"},
		{bucket(50, time.Hour, large), small, 3, false, "and nothing flows in on top"},
		{bucket(2, -time.Hour, slow), slow, 2, true, "a time in the future is rewritten as now: the clock went back"},
		{bucket(2, -time.Hour, slow), fast, 2, true, "also if the rate changed"},
		{bucket(-7, 0, slow), slow, 0, false, "garbage: fewer tokens than none"},
		{bucket(1e9, 0, slow), slow, 10, false, "garbage: more tokens than fit"},
		{Bucket{Tokens: Token, At: now - us(time.Second)}, slow, 2, true, "garbage: no rate counts as the rate of the limit"},
		{Bucket{Tokens: Token, At: now - us(time.Second), Num: 1 << 40, Den: 1 << 40}, slow, 2, true, "garbage: a rate too large to calculate with"},
		{Bucket{Tokens: Token, At: now - us(time.Second), Num: -1, Den: 1}, slow, 2, true, "garbage: a negative rate"},
		{Bucket{Tokens: 0, At: 0, Num: 1, Den: 1}, slow, 10, false, "empty since the clock began is not the zero value"},
	} {
		got, stale := c.stored.settled(c.limit, now)
		want := Bucket{Tokens: int64(c.tokens * Token), At: now, Num: c.limit.Num, Den: c.limit.Den}
		if got != want || stale != c.stale {
			t.Errorf("%+v settled: %+v, stale %v; want %+v, %v: %s", c.stored, got, stale, want, c.stale, c.why)
		}
	}
}

func TestFull(t *testing.T) {
	l := limit(t, "3/s", 10)
	for _, c := range []struct {
		tokens, want int64
	}{
		{10 * Token, 0},
		{10*Token - 1, 1},
		{9 * Token, 333334},
		{0, 3333334},
	} {
		b := Bucket{Tokens: c.tokens, At: 5, Num: l.Num, Den: l.Den}
		if got := b.full(l); got != c.want {
			t.Errorf("full with %d left: %d µs, want %d", c.tokens, got, c.want)
		}
	}
}

// Over a long time exactly rate × time + burst requests are admitted, however the rate divides.
func TestLongRunAdmitsRateTimesTime(t *testing.T) {
	for _, c := range []struct {
		rate  string
		burst int64
		run   time.Duration
		every time.Duration
		want  int64
		why   string
	}{
		{"7/s", 5, 7000 * time.Second, 13 * time.Millisecond, 49000 + 5, "7/s in steps that divide nothing"},
		{"7/m", 7, 7000 * time.Minute, 997 * time.Millisecond, 49000 + 6, "a repeating fraction: rounding loses below a millionth of a token a request"},
		{"7/m", 7, 7000*time.Minute + 420*time.Millisecond, 997 * time.Millisecond, 49000 + 7, "of 49 000 requests, 0.42 s of refill"},
		{"30000/s", 1000, 10 * time.Second, 11 * time.Microsecond, 300000 + 1000, "more than one token every 34 µs"},
		{"10000000/day", 100, time.Hour, time.Millisecond, 416666 + 100, "10M a day for an hour: 416 666.7"},
		{"1/day", 1, 10 * 24 * time.Hour, time.Hour, 10 + 1, "the tenth token arrives with the last microsecond"},
		{"1/day", 1, 10*24*time.Hour - time.Microsecond, time.Hour, 9 + 1, "and not one before"},
	} {
		l, b, admitted := limit(t, c.rate, c.burst), Bucket{}, int64(0)
		poll := func(now int64) {
			settled, _ := b.settled(l, now)
			for ; settled.Tokens >= Token; admitted++ {
				settled.Tokens -= Token
				b = settled
			}
		}
		const start = 1_700_000_000_000_000
		for at := int64(0); at < us(c.run); at += us(c.every) {
			poll(start + at)
		}
		poll(start + us(c.run))
		if admitted != c.want {
			t.Errorf("%s for %v: admitted %d, want %d: %s", c.rate, c.run, admitted, c.want, c.why)
		}
	}
}
