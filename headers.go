package ratelimit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// This file holds the headers and bodies of all answers that are ours.

// The headers, in the form in which net/http keeps them. They are set, never added, and no two answers share a slice of
// values: Caddy's header directive edits values in place.
const (
	headerLimit     = "X-Ratelimit-Limit"
	headerRemaining = "X-Ratelimit-Remaining"
	headerReset     = "X-Ratelimit-Reset"
	headerReason    = "X-Ratelimit-Reason"
	headerRetry     = "Retry-After"
	headerCache     = "Cache-Control"
	headerType      = "Content-Type"
)

// What error routes see in `{http.error.message}`, which pages show to the public.
var (
	// errLimited is for requests that a bucket refuses.
	errLimited = errors.New("rate limited")
	// errBlocked is for requests of clients that a penalty blocks.
	errBlocked = errors.New("blocked")
	// errUnavailable is for requests to sensitive routes while nobody can decide about them.
	errUnavailable = errors.New("limiter unavailable")
	// errOverloaded is for requests that find no free slot.
	errOverloaded = errors.New("overloaded")
	// errNoIdentity is for requests without the key that a zone demands.
	errNoIdentity = errors.New("identity required")
)

// answerKind is what all answers of one kind have in common.
type answerKind struct {
	status int
	err    error
	body   string // up to the seconds, where there are any
}

var (
	kindLimited     = answerKind{http.StatusTooManyRequests, errLimited, `{"error":"rate_limited","retry_after":`}
	kindBlocked     = answerKind{http.StatusTooManyRequests, errBlocked, `{"error":"rate_limited","retry_after":`}
	kindUnavailable = answerKind{http.StatusServiceUnavailable, errUnavailable, `{"error":"limiter_unavailable","retry_after":`}
	kindOverloaded  = answerKind{http.StatusServiceUnavailable, errOverloaded, `{"error":"overloaded","retry_after":`}
	kindNoIdentity  = answerKind{http.StatusBadRequest, errNoIdentity, `{"error":"identity_required"}`}
	kindTooEarly    = answerKind{http.StatusTooEarly, errEarlyData, `{"error":"too_early"}`}
)

func kindOf(reason Reason) *answerKind {
	switch reason {
	case ReasonBlocked:
		return &kindBlocked
	case ReasonUnavailable:
		return &kindUnavailable
	case ReasonOverloaded:
		return &kindOverloaded
	default:
		return &kindLimited
	}
}

// answerMode says who writes the answer to a refused request.
type answerMode uint8

const (
	// answerAuto leaves it to the error routes if one of them would, and overload never.
	answerAuto answerMode = iota
	// answerJSON writes it here.
	answerJSON
	// answerError leaves it to the error routes, and to Caddy if there are none.
	answerError
)

// answerer shows decisions to clients.
type answerer struct {
	mode    answerMode
	numbers bool // whether there are X-RateLimit-Limit, -Remaining and -Reset
	delta   bool // whether X-RateLimit-Reset counts from now instead of from 1970
	jitter  float64

	// nested is where Caddy takes errors of this handler before the server's error routes, nil if nowhere.
	nested *caddyhttp.HTTPErrorConfig
}

// newAnswerer reads the settings; empty ones are the defaults.
func newAnswerer(answer, headers, reset string, jitter float64) (answerer, error) {
	a := answerer{numbers: headers != "off", delta: reset == "delta", jitter: jitter}
	switch answer {
	case "", "auto":
		a.mode = answerAuto
	case "json":
		a.mode = answerJSON
	case "error":
		a.mode = answerError
	default:
		return answerer{}, fmt.Errorf("answer: must be auto, json or error, got %q", answer)
	}
	switch {
	case headers != "" && headers != "on" && headers != "off":
		return answerer{}, fmt.Errorf("headers: must be on or off, got %q", headers)
	case reset != "" && reset != "epoch" && reset != "delta":
		return answerer{}, fmt.Errorf("reset: must be epoch or delta, got %q", reset)
	case !(jitter >= 0 && jitter <= 1): // NaN is neither
		return answerer{}, fmt.Errorf("jitter: must be from 0 to 1, got %v", jitter)
	}
	return a, nil
}

// headerNumbers are the values of the three headers of a request. Each answer has its own.
type headerNumbers [3]string

// show sets the numbers of a decision, if it has some that may be seen.
func (a *answerer) show(h http.Header, d *Decision, values *headerNumbers) {
	if !a.numbers || d.Quiet || !hasNumbers(d) {
		return
	}
	// This is on every answer: one string holds all three.
	var room [3 * 20]byte
	text := strconv.AppendInt(room[:0], d.Limit, 10)
	limit := len(text)
	text = strconv.AppendInt(text, max(d.Remaining, 0), 10)
	remaining := len(text)
	text = strconv.AppendInt(text, a.resetOf(d), 10)
	all := string(text)
	*values = headerNumbers{all[:limit], all[limit:remaining], all[remaining:]}
	h[headerLimit], h[headerRemaining], h[headerReset] = values[0:1:1], values[1:2:2], values[2:3:3]
}

// hasNumbers says whether a decision says something about a bucket.
func hasNumbers(d *Decision) bool {
	return d.Zone != "" && d.Reason != ReasonUnavailable && d.Reason != ReasonOverloaded
}

// refuse answers a refused request, or returns the error that makes the error routes do it. The numbers are show's.
func (a *answerer) refuse(w http.ResponseWriter, r *http.Request, d *Decision) error {
	kind, seconds := kindOf(d.Reason), a.retryAfter(d)
	h := w.Header()
	values := []string{"no-store", strconv.FormatInt(seconds, 10), string(d.Reason), "application/json"}
	h[headerCache], h[headerRetry], h[headerReason] = values[0:1:1], values[1:2:2], values[2:3:3]
	if a.numbers && (d.Quiet || !hasNumbers(d)) {
		// An earlier handler's numbers say nothing about this refusal.
		delete(h, headerLimit)
		delete(h, headerRemaining)
		delete(h, headerReset)
	}
	if err := a.thrown(w, r, kind, d, seconds); err != nil {
		return err
	}
	body := append(make([]byte, 0, 64), kind.body...)
	body = append(strconv.AppendInt(body, seconds, 10), '}')
	writeAnswer(w, r, kind.status, values[3:4:4], body)
	return nil
}

// missingIdentity answers a request without the key that a zone demands.
func (a *answerer) missingIdentity(w http.ResponseWriter, r *http.Request) error {
	return a.unclaimed(w, r, &kindNoIdentity)
}

// unclaimed answers a request that cannot be charged.
func (a *answerer) unclaimed(w http.ResponseWriter, r *http.Request, kind *answerKind) error {
	w.Header().Set(headerCache, "no-store")
	if err := a.thrown(w, r, kind, &Decision{}, 0); err != nil {
		return err
	}
	writeAnswer(w, r, kind.status, []string{"application/json"}, []byte(kind.body))
	return nil
}

// thrown returns the error with which the error routes shall answer, nil if the answer is to be written here.
//
// An error is not free: without error routes Caddy logs each of status 500 and above at level ERROR, and where none of
// them matches it sends no body. So by default it is returned only where a page comes of it. Overload is the moment to
// do as little as possible, whatever pages there are.
func (a *answerer) thrown(w http.ResponseWriter, r *http.Request, kind *answerKind, d *Decision, seconds int64) error {
	if a.mode == answerJSON || a.mode == answerAuto && d.Reason == ReasonOverloaded {
		return nil
	}
	flow := a.errorFlow(r)
	if a.mode == answerAuto && flow.passes(r) {
		return nil
	}
	placeholders := a.placeholders(*d, seconds)
	if a.mode == answerAuto || flow.nested {
		if !flow.answers(flow.view(w, r, caddyhttp.HandlerError{StatusCode: kind.status, Err: kind.err}, placeholders)) {
			return nil
		}
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(placeholders)
	}
	return caddyhttp.Error(kind.status, kind.err)
}

// placeholders tells error routes about a refusal. All are known, if only as nothing: an unknown placeholder would stand
// in the page as it is written.
func (a *answerer) placeholders(d Decision, seconds int64) caddy.ReplacerFunc {
	return func(name string) (any, bool) {
		var number int64
		known := hasNumbers(&d)
		switch name {
		case "http.rate_limit.zone", "http.rate_limit.exceeded.name":
			return d.Zone, true
		case "http.rate_limit.reason":
			return string(d.Reason), true
		case "http.rate_limit.retry_after":
			number, known = seconds, seconds > 0
		case "http.rate_limit.limit":
			number = d.Limit
		case "http.rate_limit.remaining":
			number = max(d.Remaining, 0)
		case "http.rate_limit.reset":
			number = a.resetOf(&d)
		default:
			return nil, false
		}
		if !known {
			return "", true
		}
		return number, true
	}
}

// writeAnswer writes one of our bodies. What outer handlers have said about the one that they expected is taken back,
// as http.Error does; their other headers stay: without those of CORS, scripts cannot read the answer.
func writeAnswer(w http.ResponseWriter, r *http.Request, status int, contentType []string, body []byte) {
	h := w.Header()
	delete(h, "Content-Length")
	delete(h, "Content-Encoding")
	delete(h, "Etag")
	delete(h, "Last-Modified")
	h[headerType] = contentType
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // the client has gone, which concerns nobody any more
	}
}

// resetOf returns when the bucket is full, rounded up: the second since 1970 by the clock that decided, so that all
// nodes say the same, or the seconds from now.
func (a *answerer) resetOf(d *Decision) int64 {
	after := int64(max(d.ResetAfter, 0))
	if a.delta {
		return ceilDiv(after, int64(time.Second))
	}
	full := d.Now + ceilDiv(after, int64(time.Microsecond))
	return ceilDiv(full, time.Second.Microseconds())
}

// retryAfter returns how many seconds a refused client is told to wait: never less than it must, at least 1, and up to
// the part jitter more. A wait that is too short for a whole second more stays as it is.
func (a *answerer) retryAfter(d *Decision) int64 {
	seconds := max(ceilDiv(int64(d.RetryAfter), int64(time.Second)), 1)
	if more := int64(float64(seconds) * a.jitter); more > 0 {
		seconds += rand.Int64N(more + 1)
	}
	return seconds
}

// ceilDiv returns n ÷ d rounded up, for d above 0.
func ceilDiv(n, d int64) int64 {
	q := n / d
	if n%d > 0 {
		q++
	}
	return q
}
