package ratelimit

import "time"

// This file decides about all charges of a request on what is stored for them. It is the executable
// specification of bucket.lua: the same steps in the same order, pure, with the time passed in. The memory
// store runs it; a property test holds the script to it.

// state is what is stored for one charge.
type state struct {
	bucket Bucket
	record strikeRecord
	// leased is what was leased of the bucket. The memory store leases nothing.
	leased leaseSums
	// wroteBucket and wroteRecord say that take changed them.
	wroteBucket, wroteRecord bool
	// considered says that the record was struck by this refusal, or was spared by every.
	considered bool
}

type verdict uint8

const (
	verdictAllowed verdict = iota
	verdictLimited
	verdictBlocked
)

// outcome is what a store found, in numbers that the decision is made of.
type outcome struct {
	verdict verdict
	now     int64
	// charge is the index of the charge that blocks, until the end of that block.
	charge int
	until  int64
	// byHand says that an operator set that block.
	byHand bool
	// strikes is the highest count among the records that this refusal struck, 0 if none.
	strikes int64
	// blockStarted says that one of those strikes started a block.
	blockStarted bool
	// tokens is what is left in the bucket of each charge; it says nothing where the client is blocked. A charge in a dry run that
	// could not be paid is marked: its tokens stand here as ^tokens, which is below 0.
	tokens []int64
	// grants is what was leased for each charge, beside what is left; nil if nothing was.
	grants []int64
}

// take decides at time now, in microseconds, and changes states where it has to. Charges of one identity in
// one penalty group share the record of the first of them. The outcome keeps tokens, which has room for each charge.
func take(now int64, charges []Charge, states []state, tokens []int64) outcome {
	out := outcome{now: now, tokens: tokens}
	settleRecords(now, charges, states)
	if i, blocked := longestBlock(now, charges, states); blocked {
		record := &states[recordOf(charges, i)].record
		out.verdict, out.charge, out.until, out.byHand = verdictBlocked, i, record.ends(), record.ends() == record.hand
		return out
	}
	settleBuckets(now, charges, states, &out)
	if out.verdict == verdictLimited {
		strike(charges, states, &out)
	} else {
		pay(charges, states, &out)
	}
	return out
}

// recordOf returns the index of the charge whose state holds the strikes that count for charge i.
func recordOf(charges []Charge, i int) int {
	for j := range i {
		if charges[j].Penalty != nil && charges[j].ID == charges[i].ID && charges[j].Penalty.group == charges[i].Penalty.group {
			return j
		}
	}
	return i
}

func settleRecords(now int64, charges []Charge, states []state) {
	for i := range charges {
		if p := charges[i].Penalty; p != nil && recordOf(charges, i) == i {
			s := &states[i]
			stored := s.record
			s.record, s.wroteRecord = stored.settled(p, now)
			if charges[i].knowsBetter(now, stored) && s.record.ends() <= now {
				s.record, s.wroteRecord = s.record.restored(p, now, charges[i].BlockedFor, charges[i].BlockByHand), true
			}
			s.considered = false
		}
	}
}

// knowsBetter says whether the store has lost the block that the caller knows of: it was told after everything that is stored. One
// that was lifted is stored as that, for as long as anybody may restore it. Where the store's clock went back, at a failover, times
// before and after cannot be compared: what is stored then holds.
func (c *Charge) knowsBetter(now int64, stored strikeRecord) bool {
	written := stored.written()
	return c.BlockedFor > 0 && c.BlockTold > max(written, now-maxByHand) && (c.BlockTold <= now || written == 0)
}

// settleBuckets refills every bucket; one that cannot pay its charge refuses the request.
func settleBuckets(now int64, charges []Charge, states []state, out *outcome) {
	for i := range charges {
		c, s := &charges[i], &states[i]
		s.bucket, s.leased, s.wroteBucket = s.bucket.settledBeside(s.leased, c.Limit, now)
		out.found(i, c, s.bucket.Tokens)
	}
}

// found notes the tokens that a charge finds in its bucket: with too few, it refuses the request, or in a dry run would.
func (out *outcome) found(i int, c *Charge, tokens int64) {
	out.tokens[i] = tokens
	switch {
	case tokens >= c.Cost:
	case c.DryRun:
		out.tokens[i] = ^tokens
	default:
		out.verdict = verdictLimited
	}
}

// unmarked returns the tokens of a charge that may be marked as one that could not be paid.
func unmarked(tokens int64) int64 {
	if tokens < 0 {
		return ^tokens
	}
	return tokens
}

// pay debits every charge. Only one in a dry run can find too few tokens; it then takes none.
func pay(charges []Charge, states []state, out *outcome) {
	for i := range charges {
		c, s := &charges[i], &states[i]
		if s.bucket.Tokens < c.Cost {
			continue
		}
		s.bucket.Tokens = min(s.bucket.Tokens-c.Cost, max(c.Limit.Burst-s.leased.total(), 0))
		s.wroteBucket = true
		if grant := s.lease(c.Ask); grant > 0 {
			out.grant(i, grant, len(charges))
		}
		out.tokens[i] = s.bucket.Tokens
	}
}

func (out *outcome) grant(i int, tokens int64, charges int) {
	if out.grants == nil {
		out.grants = make([]int64, charges)
	}
	out.grants[i] = tokens
}

// longestBlock returns the charge whose block ends last, if there is one.
func longestBlock(now int64, charges []Charge, states []state) (int, bool) {
	longest, until := 0, now
	for i := range charges {
		if charges[i].Penalty == nil || charges[i].DryRun {
			continue
		}
		if u := states[recordOf(charges, i)].record.ends(); u > until {
			longest, until = i, u
		}
	}
	return longest, until > now
}

// strike counts a refusal, once for each record, and turns the outcome into a block where one starts.
func strike(charges []Charge, states []state, out *outcome) {
	for i := range charges {
		c := &charges[i]
		if c.Penalty == nil || c.NoStrike || c.DryRun || states[i].bucket.Tokens >= c.Cost {
			continue
		}
		s := &states[recordOf(charges, i)]
		if s.considered || s.record.hand < 0 {
			continue
		}
		s.considered = true
		record, counted := s.record.struck(c.Penalty, out.now)
		if !counted {
			continue
		}
		s.record, s.wroteRecord = record, true
		out.strikes = max(out.strikes, record.strikes)
		if record.until > out.now {
			out.blockStarted = true
			if record.until > out.until {
				out.verdict, out.charge, out.until = verdictBlocked, i, record.until
			}
		}
	}
}

// decision puts an outcome into the words of the zone that binds.
func (out *outcome) decision(charges []Charge, source Source) Decision {
	d := Decision{Source: source, Now: out.now, Strikes: out.strikes, BlockStarted: out.blockStarted, ByHand: out.byHand}
	switch out.verdict {
	case verdictBlocked:
		out.describeBlock(&d, &charges[out.charge])
	case verdictLimited:
		d.Reason = ReasonLimited
		i := out.slowest(charges)
		d.RetryAfter = micro(charges[i].Limit.wait(charges[i].Cost - out.tokens[i]))
		out.describe(&d, &charges[i], out.tokens[i])
	case verdictAllowed:
		d.Allowed = true
		if i, ok := out.tightest(charges); ok {
			out.describe(&d, &charges[i], out.tokens[i])
		}
	}
	if out.verdict != verdictBlocked {
		out.mark(&d, charges)
	}
	return d
}

// nearPart is the part of a burst of which no more is left near the limit: one in so many, 80 % are used.
const nearPart = 5

// mark says which charges would have refused the request without their dry run, and which are near their limit after it.
func (out *outcome) mark(d *Decision, charges []Charge) {
	longest := int64(-1)
	for i := range charges {
		c := &charges[i]
		switch tokens := out.tokens[i]; {
		case tokens < 0:
			d.short.add(c.place)
			if w := c.Limit.wait(c.Cost - ^tokens); w > longest {
				d.WouldDeny, d.WouldDenyZone, longest = ReasonLimited, c.Zone, w
			}
		case d.Allowed && c.nearLimit(tokens):
			d.near.add(c.place)
		}
	}
}

// nearLimit says whether so many tokens are few after the charge was paid. They are not where a full bucket comes to that by one
// request: with a burst of 1 each request that is allowed would be near the limit.
func (c *Charge) nearLimit(tokens int64) bool {
	few := c.Limit.Burst / nearPart
	return tokens <= few && c.Limit.Burst-c.Cost > few
}

// describeBlock says what a blocked client may have: nothing until the block ends. The tokens in the bucket
// are not looked at, so that the answer is the same where the block is known without asking the store.
func (out *outcome) describeBlock(d *Decision, c *Charge) {
	d.Reason = ReasonBlocked
	d.Zone, d.Quiet, d.Limit = c.Zone, c.Quiet, c.Limit.Burst/Token
	d.RetryAfter = micro(out.until - out.now)
	d.ResetAfter = d.RetryAfter
}

func (out *outcome) describe(d *Decision, c *Charge, tokens int64) {
	tokens = unmarked(tokens)
	d.Zone, d.Quiet = c.Zone, c.Quiet
	d.Limit, d.Remaining = c.Limit.Burst/Token, tokens/Token
	d.ResetAfter = micro(c.Limit.wait(c.Limit.Burst - tokens))
	d.fraction = float64(tokens) / float64(c.Limit.Burst)
}

// slowest returns the charge that makes the client wait longest.
func (out *outcome) slowest(charges []Charge) int {
	slowest, longest := 0, int64(0)
	for i := range charges {
		c := &charges[i]
		if c.DryRun || out.tokens[i] >= c.Cost {
			continue
		}
		if w := c.Limit.wait(c.Cost - out.tokens[i]); w > longest {
			slowest, longest = i, w
		}
	}
	return slowest
}

// tightest returns the charge with the least remaining part of its burst among those that show it.
func (out *outcome) tightest(charges []Charge) (int, bool) {
	tightest, least := -1, 0.0
	for i := range charges {
		c := &charges[i]
		if c.Quiet || c.DryRun {
			continue
		}
		if f := float64(out.tokens[i]) / float64(c.Limit.Burst); tightest < 0 || f < least {
			tightest, least = i, f
		}
	}
	return tightest, tightest >= 0
}

func micro(us int64) time.Duration { return time.Duration(us) * time.Microsecond }
