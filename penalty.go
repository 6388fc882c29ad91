package ratelimit

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// maxStrikes is where counting stops: long before that every block has the longest length.
const maxStrikes = 1<<16 - 1

// Penalty blocks clients that keep running into limits. Every refusal by a bucket is a strike; a client
// with more than `after` strikes is blocked for `base` × 2^(strikes − after), at most `max`: by default 2, 4,
// 8, 16, 32, 60, 60 … minutes. Strikes are forgotten after `window` without a new one, where the time of a
// block does not count. A blocked request takes no tokens and adds no strike.
type Penalty struct {
	// Group is whose strikes are counted together: all blocks with the same group, for the same identity.
	// Default: one group for the whole configuration. The same group must have the same numbers everywhere.
	Group string `json:"group,omitempty"`
	// After is the number of strikes that are forgiven: one more starts the first block. Default 3.
	After *int64 `json:"after,omitempty"`
	// Base is the unit of a block's length; the first block lasts twice as long. Default 1m.
	Base caddy.Duration `json:"base,omitempty"`
	// Max is the longest block. Default 1h.
	Max caddy.Duration `json:"max,omitempty"`
	// Window is how long after the last strike, or after the end of the last block, strikes are forgotten.
	// Default 1h.
	Window caddy.Duration `json:"window,omitempty"`

	// At most one strike per identity in this time. For browsers behind one address: 10s. Default 0: every refusal is a
	// strike.
	Every caddy.Duration `json:"every,omitempty"`
	// Requests that neither strike nor are blocked.
	ExceptRaw caddyhttp.RawMatcherSets `json:"except,omitempty" caddy:"namespace=http.matchers"`
	// Whether strikes are only counted, and nobody is blocked.
	DryRun bool `json:"dry_run,omitempty"`

	rules  penaltyRules
	except caddyhttp.MatcherSets
}

// penaltyRules are the numbers of a Penalty as the stores calculate with them; times in microseconds.
type penaltyRules struct {
	group                           string
	after, base, max, window, every int64
}

// strikeRecord is what is stored of an identity's strikes in a group, and of what an operator did about it. The zero value is
// nothing of both. All times are in microseconds.
type strikeRecord struct {
	strikes int64
	until   int64 // end of the block; 0 if none was ever set
	last    int64 // time of the last strike, or of the lifting of all
	// hand is what an operator did: above 0 he blocks the client until then, whatever the strikes say; below 0 he grants an
	// amnesty until −hand, in which refusals are no strikes.
	hand int64
}

// maxByHand is the longest block that an operator can set, and how long a lifted block is remembered to be lifted.
const maxByHand = 30 * 24 * 3600 * 1_000_000 // µs

// penaltyNumbers are the numbers of a Penalty with their defaults.
type penaltyNumbers struct {
	after                    int64
	base, max, window, every caddy.Duration
}

func (p *Penalty) numbers() penaltyNumbers {
	return penaltyNumbers{
		after:  orDefault(p.After, 3),
		base:   cmp.Or(p.Base, caddy.Duration(time.Minute)),
		max:    cmp.Or(p.Max, caddy.Duration(time.Hour)),
		window: cmp.Or(p.Window, caddy.Duration(time.Hour)),
		every:  p.Every,
	}
}

// differs returns the names of the fields in which two definitions of one group disagree, defaults applied.
func (p *Penalty) differs(other *Penalty) []string {
	var fields fieldNames
	a, b := p.numbers(), other.numbers()
	fields.unless(a.after == b.after, "after")
	fields.unless(a.base == b.base, "base")
	fields.unless(a.max == b.max, "max")
	fields.unless(a.window == b.window, "window")
	fields.unless(a.every == b.every, "every")
	fields.unless(p.DryRun == other.DryRun, "dry_run")
	return fields
}

var groupForm = regexp.MustCompile(`^[A-Za-z0-9_.-]*$`)

func (p *Penalty) provision(ctx caddy.Context) (err error) {
	n := p.numbers()
	switch {
	case !groupForm.MatchString(p.Group):
		return fmt.Errorf("penalty: group must be letters, digits and -_. only, got %q", p.Group)
	case len(p.Group) > maxName:
		return fmt.Errorf("penalty: group must have at most %d bytes, got %q", maxName, p.Group)
	case n.after < 0 || n.after >= maxStrikes:
		return fmt.Errorf("penalty: after must be from 0 to %d, got %d", maxStrikes-1, n.after)
	case micros(n.base) < 1 || n.max < n.base || n.window < 0 || n.every < 0:
		return errors.New("penalty: base, max, window and every must be durations above 0, and max at least base")
	case micros(n.max) > maxFill.Microseconds() || micros(n.window) > maxFill.Microseconds():
		return errors.New("penalty: max and window must be below ten years")
	}
	p.rules = penaltyRules{
		group: p.Group, after: n.after,
		base: micros(n.base), max: micros(n.max), window: micros(n.window), every: micros(n.every),
	}
	if p.DryRun { // counted apart, so that nobody is blocked for it when the dry run ends
		p.rules.group, p.rules.after = p.Group+"~dry_run", maxStrikes
	}
	if p.except, err = loadMatchers(ctx, p, "ExceptRaw", p.ExceptRaw); err != nil {
		return fmt.Errorf("penalty: loading matchers of except: %w", err)
	}
	return nil
}

// forgotten returns the time from which on the strikes do not count any more.
func (s strikeRecord) forgotten(p *penaltyRules) int64 {
	return max(s.last, s.until) + p.window
}

// useless returns the time from which on nothing of the record counts any more.
func (s strikeRecord) useless(p *penaltyRules) int64 {
	return max(s.forgotten(p), s.hand, -s.hand)
}

// ends returns when the block of the record ends, if there is one: that for strikes or the one by hand, whichever is longer.
func (s strikeRecord) ends() int64 { return max(s.until, s.hand) }

// written returns the latest time that the record speaks of. Who was told of a block at a later one knows more than it does.
func (s strikeRecord) written() int64 { return max(s.last, s.ends()) }

// settled returns the record as it is now, and whether the stored one holds times that had to be repaired:
// a strike in the future, a block longer than any block can be.
func (s strikeRecord) settled(p *penaltyRules, now int64) (_ strikeRecord, stale bool) {
	hand, overlong := s.settledHand(p, now)
	if s.last > now {
		s.last, stale = now, true
	}
	if s.until > now+p.max {
		s.until, stale = now+p.max, true
	}
	switch forgotten := now >= s.forgotten(p); {
	case forgotten && hand == 0:
		return strikeRecord{}, false
	case forgotten: // the time stays: by it, a block that was lifted is told from one that was lost
		return strikeRecord{last: max(s.last, s.until), hand: hand}, overlong
	}
	s.hand = hand
	return s, stale || overlong
}

// settledHand returns what an operator did, as far as it still holds, and whether it had to be repaired. Two clocks that a
// failover puts in place of each other may differ by as much as the longest block for strikes.
func (s strikeRecord) settledHand(p *penaltyRules, now int64) (hand int64, stale bool) {
	most := now + maxByHand + p.max
	hand = min(max(s.hand, -most), most)
	if max(hand, -hand) <= now {
		return 0, false
	}
	return hand, hand != s.hand
}

// restored returns the record with a block that was lost and lasts for so many microseconds more. How many strikes led to it is
// lost too.
func (s strikeRecord) restored(p *penaltyRules, now, rest int64, byHand bool) strikeRecord {
	if byHand {
		s.hand = now + min(rest, maxByHand)
		return s
	}
	s.strikes, s.until, s.last = max(s.strikes, p.after+1), now+min(rest, p.max), now
	return s
}

// struck returns the record after a refusal, and whether the refusal counted: at most one in `every`.
func (s strikeRecord) struck(p *penaltyRules, now int64) (strikeRecord, bool) {
	if s.strikes > 0 && now-s.last < p.every {
		return s, false
	}
	s.strikes = min(s.strikes+1, maxStrikes)
	s.last = now
	if s.strikes > p.after {
		s.until = now + p.length(s.strikes)
	}
	return s, true
}

// length returns how long the block after so many strikes is, in microseconds.
func (p *penaltyRules) length(strikes int64) int64 {
	length := p.base
	for range strikes - p.after {
		if length >= p.max {
			break
		}
		length *= 2
	}
	return min(length, p.max)
}

func micros(d caddy.Duration) int64 { return time.Duration(d).Microseconds() }
