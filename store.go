package ratelimit

import (
	"context"
	"encoding/base64"
	"time"
)

// Store is where buckets and strikes live.
type Store interface {
	// Take decides about all charges of one request at once: either every one of them is paid, or none is.
	// A refusal debits nothing, in no zone; it may add strikes. All charges have a zone name of their own.
	//
	// Take MUST be one atomic step to everybody who uses the same state, and MUST NOT let the caller's
	// clock into the decision if that state is shared between nodes. An error means that the store did not
	// answer: the charges may have been debited, but at most once.
	Take(ctx context.Context, charges []Charge) (Decision, error)
}

// ID is a hashed identity: what a key expression and its values are known by outside of the process.
type ID [16]byte

// String returns the ID as it stands in Redis keys, logs and lists: 22 letters, digits, - and _.
func (id ID) String() string { return base64.RawURLEncoding.EncodeToString(id[:]) }

// Charge is one zone's claim on a request.
type Charge struct {
	Zone  string
	ID    ID
	Limit Limit
	// Cost is what the request takes, in millionths of a token, at least 1. Less than 0 gives back what an earlier charge
	// took, at most up to the burst.
	Cost int64
	// Floor is the largest cost of the zone: a share's burst is never below it, or what looks like a fallback
	// would refuse such requests for good.
	Floor int64
	// OnStoreError is what happens if the store does not answer.
	OnStoreError Policy
	// Local says that the zone is kept in this process, whatever store the others use.
	Local bool
	// Patient says that the decision may take sensitive_timeout instead of timeout.
	Patient bool
	// Penalty is nil where the request is neither struck nor blocked.
	Penalty *penaltyRules
	// Ask is what this process would like to lease beside what the request takes, in millionths of a token.
	Ask int64
	// Leases says that the zone may be served from tokens that were leased.
	Leases bool
	// BlockedFor is how long, in microseconds, a block still lasts that this process knows of. Where the store has lost it, as
	// at a failover, it is set again; where somebody has lifted it, it is not. 0: none is known.
	BlockedFor int64
	// BlockTold is when the store told of that block, in microseconds by its clock, and BlockByHand whether an operator set it.
	BlockTold   int64
	BlockByHand bool
	// NoStrike says that a block holds but a refusal is no strike (early data).
	NoStrike bool
	// DryRun says that the charge is evaluated, and paid where it can be, but never refuses.
	DryRun bool
	// Quiet says that the zone never shows its numbers in headers.
	Quiet bool
	// place is the charge's among all charges of the request, which are sorted by store while they are decided.
	place uint8
	// counts are those of the zone: its own, until an app claims it.
	counts *zoneCounts
}

// chargeSet is a set of charges of one request, by their places.
type chargeSet [(maxZones + 63) / 64]uint64

func (s *chargeSet) add(place uint8)        { s[place/64] |= 1 << (place % 64) }
func (s *chargeSet) holds(place uint8) bool { return s[place/64]&(1<<(place%64)) != 0 }

func (s *chargeSet) addAll(other *chargeSet) {
	for i := range s {
		s[i] |= other[i]
	}
}

// Policy is what a zone does while its store does not answer.
type Policy uint8

const (
	// PolicyShare uses an in-process bucket with this node's share of the limit.
	PolicyShare Policy = iota
	// PolicyFull uses an in-process bucket with the whole limit.
	PolicyFull
	// PolicyDeny refuses the request.
	PolicyDeny
	// PolicyAllow lets the request through uncounted.
	PolicyAllow
)

// String returns the policy as on_store_error names it.
func (p Policy) String() string { return [...]string{"local", "full", "deny", "allow"}[p] }

// Reason says why a request was refused. The words are those of the header X-RateLimit-Reason.
type Reason string

const (
	// ReasonNone is the reason of a request that was allowed.
	ReasonNone Reason = ""
	// ReasonLimited is a bucket with too few tokens.
	ReasonLimited Reason = "limited"
	// ReasonBlocked is a penalty.
	ReasonBlocked Reason = "blocked"
	// ReasonUnavailable is a store that does not answer, on a route that must not be open then.
	ReasonUnavailable Reason = "unavailable"
	// ReasonOverloaded is a pool of slots without a free one.
	ReasonOverloaded Reason = "overloaded"
)

// Source says who decided.
type Source uint8

const (
	// SourceNone is nobody: no charge, or no store that answered.
	SourceNone Source = iota
	// SourceMemory is the store of this process.
	SourceMemory
	// SourceRedis is Redis.
	SourceRedis
	// SourceShare is this process in place of Redis.
	SourceShare
	// SourceCache is this process, by what Redis said a moment ago.
	SourceCache
	// SourceLease is this process, from tokens that it took ahead.
	SourceLease
)

// String returns the source as operators see it.
func (s Source) String() string {
	return [...]string{"none", "memory", "redis", "share", "cache", "lease"}[s]
}

// Decision is the answer to all charges of a request, described by the zone that binds: the one with the
// least remaining part of its burst if allowed, the one that makes the client wait longest if not.
type Decision struct {
	Allowed bool
	Reason  Reason
	Source  Source
	// Zone is empty if no zone supplies numbers.
	Zone string
	// Quiet says that the numbers of the zone must not be shown.
	Quiet bool
	// Limit is the burst and Remaining what is left of it, both in whole tokens, rounded down.
	Limit, Remaining int64
	// RetryAfter is when a request of the same cost can succeed. 0 if allowed.
	RetryAfter time.Duration
	// ResetAfter is when the bucket is full again.
	ResetAfter time.Duration
	// Now is the time of the decision in microseconds since 1970, by the clock that decided.
	Now int64

	// WouldDeny says why a charge in a dry run would have refused the request, and WouldDenyZone whose charge that is: the one that
	// would make the client wait longest. A request that others refuse can have both.
	WouldDeny     Reason
	WouldDenyZone string
	// short holds every charge that would have refused the request, and near those that a request that was allowed left near their
	// limit.
	short, near chargeSet
	// closed are those of short that would have refused because the store does not answer.
	closed chargeSet

	// tokens is what is left in the bucket of each charge, in millionths and marked as in an outcome, if a remote store decided and the client is not blocked.
	tokens []int64
	// grants is what was leased for each charge, in millionths; nil if nothing was.
	grants []int64
	// fraction is the remaining part of the burst, by which the decisions of two stores are compared.
	fraction float64

	// Strikes counts the strikes of the client after a refusal that was one, else 0.
	Strikes int64
	// BlockStarted says that this refusal started a block.
	BlockStarted bool
	// ByHand says that an operator set the block.
	ByHand bool
}
