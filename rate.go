package ratelimit

import (
	"fmt"
	"math/big"
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// Rate is how fast a bucket refills, written as a count, a slash and a unit: 100/m, 5/10s, 0.5/s, 1000/day. The
// unit is s, m, h, d or day, or a duration such as 10s or 1h30m.
type Rate struct {
	text     string
	num, den int64   // as in Limit
	count    float64 // the number before the slash
}

var rateForm = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)/([0-9a-zµ.]+)$`)

const rateHelp = "write a count and a unit, like 100/m, 5/10s, 0.5/s or 1000/day"

// ParseRate reads a rate.
func ParseRate(text string) (Rate, error) {
	parts := rateForm.FindStringSubmatch(text)
	if parts == nil {
		return Rate{}, fmt.Errorf("rate %q: %s", text, rateHelp)
	}
	count, ok := new(big.Rat).SetString(parts[1])
	if !ok || count.Sign() <= 0 {
		return Rate{}, fmt.Errorf("rate %q: the count must be above 0; to refuse everything, use the directive error", text)
	}
	unit := strings.Replace(parts[2], "day", "d", 1)
	if unit[0] < '0' || unit[0] > '9' {
		unit = "1" + unit
	}
	period, err := caddy.ParseDuration(unit)
	if err != nil || period.Microseconds() < 1 {
		return Rate{}, fmt.Errorf("rate %q: the unit %q is no duration; %s", text, parts[2], rateHelp)
	}
	r := Rate{text: text}
	r.count, _ = count.Float64()
	perMicro := count.Mul(count, big.NewRat(Token, period.Microseconds()))
	if !fits32(perMicro.Num()) || !fits32(perMicro.Denom()) || !exact(perMicro.Num().Int64(), perMicro.Denom().Int64()) {
		return Rate{}, fmt.Errorf("rate %q cannot be calculated exactly: use a rounder count or unit, and at most 4 billion a second", text)
	}
	r.num, r.den = perMicro.Num().Int64(), perMicro.Denom().Int64()
	return r, nil
}

func fits32(n *big.Int) bool { return n.BitLen() <= 32 }

// burst is the default burst of the rate, in tokens.
func (r Rate) burst() int64 { return max(int64(r.count), 1) }

// String returns the rate as it was written.
func (r Rate) String() string { return r.text }

// IsZero says whether there is no rate.
func (r Rate) IsZero() bool { return r.text == "" }

// MarshalText implements encoding.TextMarshaler.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.text), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Rate) UnmarshalText(text []byte) (err error) {
	*r, err = ParseRate(string(text))
	return err
}
