package ratelimit

import (
	_ "embed"
	"encoding/binary"

	"github.com/redis/go-redis/v9"
)

// This file speaks with bucket.lua: a batch of requests out, an outcome for each of them back.

//go:embed bucket.lua
var bucketScript string

var bucketSHA = redis.NewScript(bucketScript).Hash()

// batch is what one call of the script decides about. The zero value is an empty one.
type batch struct {
	keys     []string
	uses     []keyUse // of each key
	indices  map[ID]uint16
	policies map[policy]uint16
	groups   []*penaltyRules
	buckets  []bucketSlot
	records  []recordSlot

	// Packed, without their counts.
	groupHead, policyHead, requests []byte

	count uint16
}

// keyUse is what of a key's state the batch is about: the numbers of its last bucket and its last record, 0 for none.
type keyUse struct{ bucket, record uint16 }

// bucketSlot is a bucket that requests of the batch share.
type bucketSlot struct {
	zone        string
	key, policy uint16
	before      uint16 // the number of another bucket of the same key
}

// recordSlot is a record of strikes that requests of the batch share.
type recordSlot struct {
	group  string
	key    uint16
	rules  uint8
	before uint16 // the number of another record of the same key
}

// policy is what the charges of a zone have in common.
type policy struct {
	zone    string
	limit   Limit
	cost    int64
	flags   uint8
	penalty *penaltyRules
}

// Flags of a policy.
const (
	flagStrikes = 1 << iota
	flagDryRun
	flagLeases
)

// add puts a request into the batch. Its keys get the prefix.
func (b *batch) add(prefix string, charges []Charge) {
	if b.indices == nil {
		b.indices, b.policies = map[ID]uint16{}, map[policy]uint16{}
	}
	b.count++
	b.requests = append(b.requests, uint8(len(charges)))
	for i := range charges {
		c := &charges[i]
		key, policy := b.key(prefix, c.ID), b.policy(c)
		b.requests = binary.BigEndian.AppendUint16(b.requests, b.bucket(key, policy, c.Zone))
		b.requests = binary.BigEndian.AppendUint16(b.requests, policy)
		b.requests = binary.BigEndian.AppendUint16(b.requests, b.record(key, c.Penalty))
		b.knownBlock(c)
		if c.Ask > 0 {
			b.requests = appendInt7(b.requests, c.Ask)
		}
	}
}

// knownBlock packs what the caller knows of a block.
func (b *batch) knownBlock(c *Charge) {
	known := c.BlockedFor
	if c.BlockByHand {
		known = -known
	}
	b.requests = appendInt7(b.requests, known)
	if known != 0 {
		b.requests = appendInt7(b.requests, c.BlockTold)
	}
}

// key returns the number of an identity's key.
func (b *batch) key(prefix string, id ID) uint16 {
	n, known := b.indices[id]
	if !known {
		b.keys, b.uses = append(b.keys, identityKey(prefix, id)), append(b.uses, keyUse{})
		n = uint16(len(b.keys))
		b.indices[id] = n
	}
	return n
}

// bucket returns the number of a zone's bucket in a key. The policy names its field.
func (b *batch) bucket(key, policy uint16, zone string) uint16 {
	use := &b.uses[key-1]
	for n := use.bucket; n > 0; n = b.buckets[n-1].before {
		if b.buckets[n-1].zone == zone {
			return n
		}
	}
	b.buckets = append(b.buckets, bucketSlot{zone: zone, key: key, policy: policy, before: use.bucket})
	use.bucket = uint16(len(b.buckets))
	return use.bucket
}

// record returns the number of the record of strikes in a key, 0 where nobody is struck.
func (b *batch) record(key uint16, p *penaltyRules) uint16 {
	if p == nil {
		return 0
	}
	use := &b.uses[key-1]
	for n := use.record; n > 0; n = b.records[n-1].before {
		if b.records[n-1].group == p.group {
			return n
		}
	}
	b.records = append(b.records, recordSlot{group: p.group, key: key, rules: b.group(p), before: use.record})
	use.record = uint16(len(b.records))
	return use.record
}

// identityKey is where the state of an identity lives. The braces make it one slot of a Redis Cluster.
func identityKey(prefix string, id ID) string { return prefix + ":{" + id.String() + "}" }

// policy returns the number of a charge's policy.
func (b *batch) policy(c *Charge) uint16 {
	p := policy{zone: c.Zone, limit: c.Limit, cost: c.Cost, penalty: c.Penalty}
	if !c.NoStrike {
		p.flags |= flagStrikes
	}
	if c.DryRun {
		p.flags |= flagDryRun
	}
	if c.Ask > 0 {
		p.flags |= flagLeases
	}
	n, known := b.policies[p]
	if !known {
		n = uint16(len(b.policies) + 1)
		b.policies[p] = n
		b.describe(&p)
	}
	return n
}

func (b *batch) describe(p *policy) {
	b.policyHead = binary.BigEndian.AppendUint32(b.policyHead, uint32(p.limit.Num))
	b.policyHead = binary.BigEndian.AppendUint32(b.policyHead, uint32(p.limit.Den))
	b.policyHead = appendInt7(b.policyHead, p.limit.Burst)
	b.policyHead = appendInt7(b.policyHead, p.cost)
	b.policyHead = append(b.policyHead, p.flags, b.group(p.penalty))
	b.policyHead = appendField(b.policyHead, 'z', p.zone)
}

// group returns the number of a penalty group, 0 for none.
func (b *batch) group(p *penaltyRules) uint8 {
	if p == nil {
		return 0
	}
	for i, g := range b.groups {
		if *g == *p {
			return uint8(i + 1)
		}
	}
	b.groups = append(b.groups, p)
	b.groupHead = binary.BigEndian.AppendUint16(b.groupHead, uint16(p.after))
	for _, n := range [...]int64{p.base, p.max, p.window, p.every} {
		b.groupHead = appendInt7(b.groupHead, n)
	}
	b.groupHead = appendField(b.groupHead, 'p', p.group)
	return uint8(len(b.groups))
}

// packed returns the batch as the script reads it.
func (b *batch) packed() []byte {
	all := make([]byte, 0, 9+len(b.groupHead)+len(b.policyHead)+4*len(b.buckets)+3*len(b.records)+len(b.requests))
	all = append(all, uint8(len(b.groups)))
	for _, n := range [...]int{len(b.policies), len(b.buckets), len(b.records), int(b.count)} {
		all = binary.BigEndian.AppendUint16(all, uint16(n))
	}
	all = append(all, b.groupHead...)
	all = append(all, b.policyHead...)
	for i := range b.buckets {
		all = binary.BigEndian.AppendUint16(all, b.buckets[i].key)
		all = binary.BigEndian.AppendUint16(all, b.buckets[i].policy)
	}
	for i := range b.records {
		all = binary.BigEndian.AppendUint16(all, b.records[i].key)
		all = append(all, b.records[i].rules)
	}
	return append(all, b.requests...)
}

// appendInt7 appends the lower seven bytes of a number, which is below 2^53 either way.
func appendInt7(to []byte, n int64) []byte {
	var eight [8]byte
	binary.BigEndian.PutUint64(eight[:], uint64(n))
	return append(to, eight[1:]...)
}

// appendField appends the name of a hash field, after its length.
func appendField(to []byte, kind byte, name string) []byte {
	to = append(to, uint8(len(name)+1), kind)
	return append(to, name...)
}

// command returns the call of the script, by its hash or by its text. clock is a test clock in microseconds; it is empty in
// production, where Redis TIME is the only clock.
func (b *batch) command(verb, script, clock string) onceCmd {
	args := make([]any, 0, 5+len(b.keys))
	args = append(args, verb, script, len(b.keys))
	for _, key := range b.keys {
		args = append(args, key)
	}
	return newOnceCmd(append(args, clock, b.packed())...)
}

// replyLeased is the verdict of a request that is allowed, and for which tokens were leased.
const replyLeased = 3

// replyReader reads the reply of the script, a request at a time.
type replyReader struct {
	rest []int64
	now  int64
	// healed counts keys of a wrong type that were deleted.
	healed int64
}

func newReplyReader(reply []int64) (*replyReader, error) {
	if len(reply) < 2 {
		return nil, errReply
	}
	return &replyReader{now: reply[0], healed: reply[1], rest: reply[2:]}, nil
}

// next returns the next so many numbers.
func (r *replyReader) next(n int) ([]int64, error) {
	if len(r.rest) < n {
		return nil, errReply
	}
	numbers := r.rest[:n]
	r.rest = r.rest[n:]
	return numbers, nil
}

// outcome reads what became of a request with these charges.
func (r *replyReader) outcome(charges []Charge) (outcome, error) {
	out, err := r.read(len(charges))
	if err == nil && !out.fits(charges) {
		err = errReply
	}
	return out, err
}

func (r *replyReader) read(charges int) (outcome, error) {
	kind, err := r.next(1)
	if err != nil {
		return outcome{}, err
	}
	out := outcome{now: r.now}
	switch kind[0] {
	case int64(verdictAllowed):
		out.tokens, err = r.next(charges)
	case int64(verdictLimited):
		out.verdict = verdictLimited
		var strikes []int64
		if strikes, err = r.next(1); err == nil {
			out.strikes = strikes[0]
			out.tokens, err = r.next(charges)
		}
	case replyLeased:
		if out.tokens, err = r.next(charges); err == nil {
			out.grants, err = r.next(charges)
		}
	case int64(verdictBlocked):
		err = r.block(&out, charges)
	default:
		err = errReply
	}
	return out, err
}

// fits says whether an outcome can be one of the charges. What comes over the network may be anything, and the answers to clients are
// made of it.
func (out *outcome) fits(charges []Charge) bool {
	if out.verdict == verdictBlocked {
		c := &charges[out.charge]
		return c.Penalty != nil && !c.DryRun && out.now > 0 && out.until > out.now && out.until-out.now <= maxFill.Microseconds()
	}
	for i, tokens := range out.tokens {
		c := &charges[i]
		if tokens < 0 && (!c.DryRun || unmarked(tokens) >= c.Cost) || unmarked(tokens) > c.Limit.Burst {
			return false
		}
	}
	for i, leased := range out.grants {
		if leased < 0 || leased > charges[i].Ask {
			return false
		}
	}
	return true
}

func (r *replyReader) block(out *outcome, charges int) error {
	n, err := r.next(4)
	if err != nil || n[0] < 1 || n[0] > int64(charges) {
		return errReply
	}
	out.verdict, out.charge, out.until, out.strikes = verdictBlocked, int(n[0])-1, n[1], n[2]
	out.blockStarted, out.byHand = n[3] == 1, n[3] == 2
	return nil
}
