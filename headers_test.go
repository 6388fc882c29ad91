package ratelimit

import (
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"testing"
	"time"
)

// answerNow is in microseconds since 1970, on a whole second.
const answerNow = 1_800_000_000_000_000

// answering returns an answerer that writes all answers itself, changed by change.
func answering(change ...func(*answerer)) *answerer {
	a := &answerer{mode: answerJSON, numbers: true}
	for _, c := range change {
		c(a)
	}
	return a
}

func headersOff(a *answerer) { a.numbers = false }
func delta(a *answerer)      { a.delta = true }

// numbers are the values of the trio, one each, in order; nil if there is none.
func numbers(t *testing.T, h http.Header) []string {
	t.Helper()
	var got []string
	for _, name := range []string{"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"} {
		switch values := h.Values(name); len(values) {
		case 0:
		case 1:
			got = append(got, values[0])
		default:
			t.Errorf("%s is there %d times: %q", name, len(values), values)
		}
	}
	if len(got) != 0 && len(got) != 3 {
		t.Errorf("%d of the three headers: %v", len(got), h)
	}
	return got
}

func TestNumbers(t *testing.T) {
	const second = 1_800_000_000
	full := func(after time.Duration) Decision {
		return Decision{Allowed: true, Zone: "api", Limit: 20, Remaining: 19, ResetAfter: after, Now: answerNow}
	}
	for _, row := range []struct {
		why  string
		a    *answerer
		d    Decision
		want []string
	}{
		{"allowed", answering(), full(3 * time.Second), []string{"20", "19", strconv.Itoa(second + 3)}},
		{"the last token", answering(), Decision{Allowed: true, Zone: "api", Limit: 1, Now: answerNow}, []string{"1", "0", "1800000000"}},
		{"in debt, which is nobody's business", answering(), Decision{Zone: "api", Limit: 5, Remaining: -3, Now: answerNow}, []string{"5", "0", "1800000000"}},
		{"the largest numbers", answering(), Decision{Zone: "api", Limit: math.MaxInt64, Remaining: math.MaxInt64 - 1, Now: answerNow},
			[]string{"9223372036854775807", "9223372036854775806", "1800000000"}},
		{"limited", answering(), Decision{Reason: ReasonLimited, Zone: "api", Limit: 20, Now: answerNow}, []string{"20", "0", "1800000000"}},
		{"blocked", answering(), Decision{Reason: ReasonBlocked, Zone: "api", Limit: 20, Now: answerNow}, []string{"20", "0", "1800000000"}},

		{"full now", answering(), full(0), []string{"20", "19", strconv.Itoa(second)}},
		{"full a nanosecond after the second", answering(), full(1), []string{"20", "19", strconv.Itoa(second + 1)}},
		{"full a microsecond before the next second", answering(), full(time.Second - time.Microsecond), []string{"20", "19", strconv.Itoa(second + 1)}},
		{"full on the next second", answering(), full(time.Second), []string{"20", "19", strconv.Itoa(second + 1)}},
		{"full a microsecond after it", answering(), full(time.Second + time.Microsecond), []string{"20", "19", strconv.Itoa(second + 2)}},
		{"no time runs backwards", answering(), full(-time.Minute), []string{"20", "19", strconv.Itoa(second)}},

		{"delta: full now", answering(delta), full(0), []string{"20", "19", "0"}},
		{"delta: not quite full", answering(delta), full(1), []string{"20", "19", "1"}},
		{"delta: a second", answering(delta), full(time.Second), []string{"20", "19", "1"}},
		{"delta: a microsecond more", answering(delta), full(time.Second + time.Microsecond), []string{"20", "19", "2"}},
		{"delta: no time runs backwards", answering(delta), full(-time.Minute), []string{"20", "19", "0"}},

		{"headers off", answering(headersOff), full(0), nil},
		{"a zone with headers off", answering(), Decision{Allowed: true, Zone: "login", Quiet: true, Limit: 5}, nil},
		{"no zone", answering(), Decision{Allowed: true, Limit: 5}, nil},
		{"unavailable", answering(), Decision{Reason: ReasonUnavailable, Zone: "login", Limit: 5}, nil},
		{"overloaded", answering(), Decision{Reason: ReasonOverloaded, Zone: "login", Limit: 5}, nil},
	} {
		h := http.Header{}
		row.a.show(h, &row.d, new(headerNumbers))
		if got := numbers(t, h); !slices.Equal(got, row.want) {
			t.Errorf("%s: got %q, want %q", row.why, got, row.want)
		}
	}
}

func TestResetIsTheSameOnAllNodes(t *testing.T) {
	a := answering()
	for ms := range 1000 {
		since := time.Duration(ms) * time.Millisecond
		h := http.Header{}
		a.show(h, &Decision{Zone: "api", Now: answerNow + since.Microseconds(), ResetAfter: 2500*time.Millisecond - since}, new(headerNumbers))
		if got := h.Get("X-RateLimit-Reset"); got != "1800000003" {
			t.Fatalf("asked %v later the bucket is full at %s, want 1800000003", since, got)
		}
	}
}

func TestNumbersAreSetAndTheRestStays(t *testing.T) {
	h := http.Header{"Vary": {"Origin"}}
	h.Add("X-RateLimit-Limit", "1")
	h.Add("X-RateLimit-Limit", "2")
	answering().show(h, &Decision{Zone: "api", Limit: 7, Now: answerNow}, new(headerNumbers))
	if got, want := numbers(t, h), []string{"7", "0", "1800000000"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if h.Get("Vary") != "Origin" {
		t.Errorf("another header is gone: %v", h)
	}
}

// refused runs refuse without error routes.
func refused(t *testing.T, a *answerer, method string, h http.Header, d Decision) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	maps.Copy(w.Header(), h)
	if err := a.refuse(w, httptest.NewRequest(method, "/", nil), &d); err != nil {
		t.Fatalf("returned an error: %v", err)
	}
	return w
}

func isAnswer(t *testing.T, why string, w *httptest.ResponseRecorder, status int, headers http.Header, body string) {
	t.Helper()
	if w.Code != status {
		t.Errorf("%s: status %d, want %d", why, w.Code, status)
	}
	if got := w.Body.String(); got != body {
		t.Errorf("%s: body\n%s, want\n%s", why, got, body)
	}
	if got := w.Result().Header; !maps.EqualFunc(got, headers, slices.Equal) {
		t.Errorf("%s: headers\n%v, want\n%v", why, got, headers)
	}
}

func TestRefusals(t *testing.T) {
	limited := func(wait time.Duration) Decision {
		return Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: wait}
	}
	for _, row := range []struct {
		why        string
		d          Decision
		status     int
		reason     string
		retryAfter string
		body       string
	}{
		{"limited", limited(7 * time.Second), 429, "limited", "7", `{"error":"rate_limited","retry_after":7}`},
		{"no wait at all", limited(0), 429, "limited", "1", `{"error":"rate_limited","retry_after":1}`},
		{"a wait in the past", limited(-time.Hour), 429, "limited", "1", `{"error":"rate_limited","retry_after":1}`},
		{"a nanosecond", limited(1), 429, "limited", "1", `{"error":"rate_limited","retry_after":1}`},
		{"a second", limited(time.Second), 429, "limited", "1", `{"error":"rate_limited","retry_after":1}`},
		{"a microsecond more", limited(time.Second + time.Microsecond), 429, "limited", "2", `{"error":"rate_limited","retry_after":2}`},
		{"the longest", limited(math.MaxInt64), 429, "limited", "9223372037", `{"error":"rate_limited","retry_after":9223372037}`},
		{"blocked", Decision{Reason: ReasonBlocked, Zone: "api", RetryAfter: 2 * time.Minute},
			429, "blocked", "120", `{"error":"rate_limited","retry_after":120}`},
		{"unavailable", Decision{Reason: ReasonUnavailable, Zone: "login", RetryAfter: 300 * time.Millisecond},
			503, "unavailable", "1", `{"error":"limiter_unavailable","retry_after":1}`},
		{"overloaded", Decision{Reason: ReasonOverloaded, RetryAfter: 5 * time.Second},
			503, "overloaded", "5", `{"error":"overloaded","retry_after":5}`},
	} {
		w := refused(t, answering(), "GET", nil, row.d)
		isAnswer(t, row.why, w, row.status, http.Header{
			"Content-Type": {"application/json"}, "Cache-Control": {"no-store"},
			"Retry-After": {row.retryAfter}, "X-Ratelimit-Reason": {row.reason},
		}, row.body)
	}
}

func TestRefusalWithHeadersOff(t *testing.T) {
	w := refused(t, answering(headersOff), "GET", nil, Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: time.Second})
	isAnswer(t, "headers off", w, 429, http.Header{
		"Content-Type": {"application/json"}, "Cache-Control": {"no-store"},
		"Retry-After": {"1"}, "X-Ratelimit-Reason": {"limited"},
	}, `{"error":"rate_limited","retry_after":1}`)
}

func TestHeadHasNoBody(t *testing.T) {
	w := refused(t, answering(), "HEAD", nil, Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: time.Second})
	isAnswer(t, "HEAD", w, 429, http.Header{
		"Content-Type": {"application/json"}, "Cache-Control": {"no-store"},
		"Retry-After": {"1"}, "X-Ratelimit-Reason": {"limited"},
	}, "")
}

func TestHeadersOfOuterHandlers(t *testing.T) {
	outer := http.Header{
		"Access-Control-Allow-Origin": {"https://app.example"}, "Vary": {"Origin", "Accept"}, "Set-Cookie": {"a=1"},
		"Cache-Control": {"public, max-age=3600"}, "Content-Type": {"text/html"}, "Retry-After": {"1", "2"},
		"Content-Length": {"9000"}, "Content-Encoding": {"br"}, "Etag": {`"x"`}, "Last-Modified": {"yesterday"},
	}
	w := refused(t, answering(), "GET", outer, Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: 3 * time.Second})
	isAnswer(t, "all but what describes another body", w, 429, http.Header{
		"Access-Control-Allow-Origin": {"https://app.example"}, "Vary": {"Origin", "Accept"}, "Set-Cookie": {"a=1"},
		"Content-Type": {"application/json"}, "Cache-Control": {"no-store"},
		"Retry-After": {"3"}, "X-Ratelimit-Reason": {"limited"},
	}, `{"error":"rate_limited","retry_after":3}`)
}

func TestNumbersOfAnEarlierHandler(t *testing.T) {
	earlier := func() http.Header {
		h := http.Header{}
		answering().show(h, &Decision{Allowed: true, Zone: "coarse", Limit: 100, Remaining: 40, Now: answerNow}, new(headerNumbers))
		return h
	}
	shown := []string{"100", "40", "1800000000"}
	for _, row := range []struct {
		why  string
		a    *answerer
		d    Decision
		want []string
	}{
		{"limited: whether they stay is not for refuse to say", answering(), Decision{Reason: ReasonLimited, Zone: "fine"}, shown},
		{"unavailable carries none", answering(), Decision{Reason: ReasonUnavailable, Zone: "login"}, nil},
		{"overloaded carries none", answering(), Decision{Reason: ReasonOverloaded}, nil},
		{"a zone that shows none: 40 left and refused says neither", answering(), Decision{Reason: ReasonLimited, Zone: "login", Quiet: true}, nil},
		{"headers off does not touch them", answering(headersOff), Decision{Reason: ReasonOverloaded}, shown},
	} {
		w := refused(t, row.a, "GET", earlier(), row.d)
		if got := numbers(t, w.Result().Header); !slices.Equal(got, row.want) {
			t.Errorf("%s: got %q, want %q", row.why, got, row.want)
		}
	}
}

func TestMissingIdentity(t *testing.T) {
	for method, body := range map[string]string{"GET": `{"error":"identity_required"}`, "HEAD": ""} {
		w := httptest.NewRecorder()
		if err := answering().missingIdentity(w, httptest.NewRequest(method, "/", nil)); err != nil {
			t.Fatal(err)
		}
		isAnswer(t, method, w, 400, http.Header{"Content-Type": {"application/json"}, "Cache-Control": {"no-store"}}, body)
	}
}

func TestJitterOnlyAdds(t *testing.T) {
	for _, row := range []struct {
		wait      time.Duration
		jitter    float64
		low, high int64
	}{
		{100 * time.Second, 0, 100, 100},
		{100 * time.Second, 0.1, 100, 110},
		{99*time.Second + 1, 0.1, 100, 110},
		{10 * time.Second, 0.1, 10, 11},
		{9 * time.Second, 0.1, 9, 9}, // a whole second more would be more than 10 %
		{5 * time.Second, 1, 5, 10},
		{0, 1, 1, 2},
	} {
		a := answering(func(a *answerer) { a.jitter = row.jitter })
		seen := map[int64]bool{}
		for range 2000 {
			w := refused(t, a, "GET", nil, Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: row.wait})
			text := w.Result().Header.Get("Retry-After")
			seconds, err := strconv.ParseInt(text, 10, 64)
			if err != nil || seconds < row.low || seconds > row.high {
				t.Fatalf("Retry-After %q for %v with jitter %v, want %d to %d", text, row.wait, row.jitter, row.low, row.high)
			}
			if want := `{"error":"rate_limited","retry_after":` + text + `}`; w.Body.String() != want {
				t.Fatalf("body %s, want the number of Retry-After: %s", w.Body, want)
			}
			seen[seconds] = true
		}
		if want := int(row.high - row.low + 1); len(seen) != want {
			t.Errorf("%d different waits for %v with jitter %v, want all %d", len(seen), row.wait, row.jitter, want)
		}
	}
}

func TestAnswersShareNoValues(t *testing.T) {
	d := Decision{Reason: ReasonLimited, Zone: "api", Limit: 5, RetryAfter: time.Second, Now: answerNow}
	shown := func() http.Header {
		w := httptest.NewRecorder()
		a := answering()
		a.show(w.Header(), &d, new(headerNumbers))
		if err := a.refuse(w, httptest.NewRequest("GET", "/", nil), &d); err != nil {
			t.Fatal(err)
		}
		return w.Header()
	}
	first := shown()
	want := shown()
	for name, values := range first {
		first[name] = append(values, "added") // must not reach the next value of this answer
		values[0] = "edited"
	}
	if got := shown(); !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("what was done to one answer shows in the next: %v", got)
	}
	for name, values := range first {
		if !slices.Equal(values, []string{want.Get(name), "added"}) {
			t.Errorf("what was done to one header shows in %s: %q", name, values)
		}
	}
}

func TestSettings(t *testing.T) {
	for _, row := range []struct {
		answer, headers, reset string
		jitter                 float64
		want                   answerer
	}{
		{"", "", "", 0, answerer{mode: answerAuto, numbers: true}},
		{"auto", "on", "epoch", 0, answerer{mode: answerAuto, numbers: true}},
		{"json", "off", "delta", 1, answerer{mode: answerJSON, delta: true, jitter: 1}},
		{"error", "", "", 0.1, answerer{mode: answerError, numbers: true, jitter: 0.1}},
	} {
		got, err := newAnswerer(row.answer, row.headers, row.reset, row.jitter)
		if err != nil || got != row.want {
			t.Errorf("%+v: got %+v, %v", row, got, err)
		}
	}
}

func TestSettingsThatCannotBe(t *testing.T) {
	for _, row := range []struct {
		answer, headers, reset string
		jitter                 float64
		want                   string
	}{
		{"html", "", "", 0, `answer: must be auto, json or error, got "html"`},
		{"", "draft", "", 0, `headers: must be on or off, got "draft"`},
		{"", "", "seconds", 0, `reset: must be epoch or delta, got "seconds"`},
		{"", "", "", -0.1, `jitter: must be from 0 to 1, got -0.1`},
		{"", "", "", 1.5, `jitter: must be from 0 to 1, got 1.5`},
		{"", "", "", math.NaN(), `jitter: must be from 0 to 1, got NaN`},
	} {
		if _, err := newAnswerer(row.answer, row.headers, row.reset, row.jitter); err == nil || err.Error() != row.want {
			t.Errorf("got  %v\nwant %s", err, row.want)
		}
	}
}

// sink is a ResponseWriter that keeps nothing.
type sink http.Header

func (s sink) Header() http.Header         { return http.Header(s) }
func (s sink) WriteHeader(int)             {}
func (s sink) Write(p []byte) (int, error) { return len(p), nil }

func TestAnswersAllocateLittle(t *testing.T) {
	a := answering(func(a *answerer) { a.mode, a.jitter = answerAuto, 0.1 })
	r := httptest.NewRequest("GET", "/", nil)
	w := sink{}
	d := Decision{Reason: ReasonLimited, Zone: "api", Limit: 1000, Remaining: 500, RetryAfter: 40 * time.Second, Now: answerNow}
	if n := testing.AllocsPerRun(100, func() { a.show(w.Header(), &d, new(headerNumbers)) }); n > 2 {
		t.Errorf("show allocates %v times, want at most 2", n)
	}
	if n := testing.AllocsPerRun(100, func() { _ = a.refuse(w, r, &d) }); n > 2 {
		t.Errorf("refuse allocates %v times, want at most 2", n)
	}
	overloaded := Decision{Reason: ReasonOverloaded, RetryAfter: 5 * time.Second}
	if n := testing.AllocsPerRun(100, func() { _ = a.refuse(w, r, &overloaded) }); n > 2 {
		t.Errorf("refuse under overload allocates %v times, want at most 2", n)
	}
}

func BenchmarkShow(b *testing.B) {
	a, w := answering(), sink{}
	d := Decision{Allowed: true, Zone: "api", Limit: 1000, Remaining: 500, ResetAfter: time.Second, Now: answerNow}
	b.ReportAllocs()
	for b.Loop() {
		a.show(w.Header(), &d, new(headerNumbers))
	}
}

func BenchmarkRefuse(b *testing.B) {
	a, w, r := answering(), sink{}, httptest.NewRequest("GET", "/", nil)
	d := Decision{Reason: ReasonLimited, Zone: "api", RetryAfter: 40 * time.Second}
	b.ReportAllocs()
	for b.Loop() {
		_ = a.refuse(w, r, &d)
	}
}
