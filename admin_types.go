package ratelimit

import "time"

// This file holds what the admin endpoint takes and returns, for those who serve it and for the commands that ask it. Times are
// RFC 3339 in UTC by the clock of the store; durations are in seconds.

// statusInfo is the answer to GET /rate_limit/status.
type statusInfo struct {
	// Version is that of this module.
	Version string `json:"version"`
	// Node is what this process is called in the lists of nodes, empty if none of its Redis counts them.
	Node string `json:"node,omitempty"`
	// Stores are the Redis in use; none means that everything is in this process.
	Stores    []storeInfo    `json:"stores"`
	Memory    memoryInfo     `json:"memory"`
	Pools     []poolInfo     `json:"pools"`
	Overrides []overrideInfo `json:"overrides"`
	Zones     []zoneInfo     `json:"zones"`
}

// storeInfo is one Redis.
type storeInfo struct {
	// Redis and Prefix say which, without credentials.
	Redis  string `json:"redis"`
	Prefix string `json:"prefix"`
	// Up says whether every one of its servers answers.
	Up      bool         `json:"up"`
	Servers []serverInfo `json:"servers"`
	// Nodes is by how many the limits are divided while Redis is down, and Share one part in so many.
	Nodes int64   `json:"nodes"`
	Share float64 `json:"share"`
	// Counted says whether the nodes are counted in Redis (nodes auto).
	Counted bool `json:"counted"`
}

// serverInfo is one server of a Redis, with the breaker in front of it.
type serverInfo struct {
	Server string `json:"server"`
	// State is up, down, or connecting before the first connection.
	State string `json:"state"`
	// Since is when it went down, and NextProbe when it is tried again. Both are absent while it is up.
	Since     *time.Time `json:"since,omitempty"`
	NextProbe *time.Time `json:"next_probe,omitempty"`
}

// memoryInfo is what this process keeps: for zones of its own, and, apart from them, in place of a store that is down. Each of the
// two has room for MaxKeys.
type memoryInfo struct {
	Buckets int    `json:"buckets"`
	Strikes int    `json:"strikes"`
	MaxKeys int64  `json:"max_keys"`
	Evicted uint64 `json:"evicted"`
	// KnownBlocks are those that the Redis in use told this node of.
	KnownBlocks int64 `json:"known_blocks"`
}

// poolInfo is a pool of slots.
type poolInfo struct {
	Pool        string `json:"pool"`
	InFlight    int64  `json:"in_flight"`
	MaxInFlight int64  `json:"max_in_flight"`
}

// zoneInfo is a zone with its effective numbers, and what became of its requests since this process started.
type zoneInfo struct {
	Zone string `json:"zone"`
	Key  string `json:"key"`
	// Rate is as it is written, like 100/m; Burst in tokens.
	Rate  string `json:"rate"`
	Burst int64  `json:"burst"`
	// Store is memory or redis, empty for a shared zone that no handler uses.
	Store string `json:"store"`
	// ShareRate and ShareBurst hold on this node while Redis is down; absent in memory.
	ShareRate  string `json:"share_rate,omitempty"`
	ShareBurst int64  `json:"share_burst,omitempty"`
	// OnStoreError is local, full, deny or allow, or sensitive if that depends on the request; absent in memory.
	OnStoreError string `json:"on_store_error,omitempty"`
	// Override is what holds instead for the moment.
	Override string `json:"override,omitempty"`
	// Penalty is the group in which refusals strike, nil if they do not; the default group is "".
	Penalty *string `json:"penalty,omitempty"`
	DryRun  bool    `json:"dry_run,omitempty"`
	// Requests counts those that the zone charged, Refused those of them that it refused, and WouldDeny those that it would have
	// refused without dry_run.
	Requests  uint64 `json:"requests"`
	Refused   uint64 `json:"refused"`
	WouldDeny uint64 `json:"would_deny"`
}

// zonesInfo is the answer to GET /rate_limit/zones.
type zonesInfo struct {
	Zones []zoneInfo `json:"zones"`
}

// who names a client: by id, or by a zone and the values of its key's placeholders in their order.
type who struct {
	ID   string `json:"id,omitempty"`
	Zone string `json:"zone,omitempty"`
	Key  words  `json:"key,omitempty"`
}

// inspectRequest is the body of POST /rate_limit/inspect. The zone is needed also with an id.
type inspectRequest struct{ who }

// clientInfo is the state of a client in a zone.
type clientInfo struct {
	Zone string `json:"zone"`
	ID   string `json:"id"`
	// Source is where the state was read: memory, redis, or share while Redis does not answer.
	Source string `json:"source"`
	// Limit is the burst and Remaining what is left of it, in tokens; Remaining may have a fraction.
	Rate      string  `json:"rate"`
	Limit     int64   `json:"limit"`
	Remaining float64 `json:"remaining"`
	// Reset is when the bucket is full, absent if it is.
	Reset *time.Time `json:"reset,omitempty"`
	// Group is the penalty group, nil if the zone has no penalty; what follows is then absent.
	Group      *string    `json:"group,omitempty"`
	Strikes    int64      `json:"strikes"`
	LastStrike *time.Time `json:"last_strike,omitempty"`
	// ForgottenAt is when the strikes are forgotten.
	ForgottenAt  *time.Time `json:"forgotten_at,omitempty"`
	BlockedUntil *time.Time `json:"blocked_until,omitempty"`
	// ByHand says that an operator set the block.
	ByHand bool `json:"by_hand,omitempty"`
	// AmnestyUntil is until when refusals are no strikes.
	AmnestyUntil *time.Time `json:"amnesty_until,omitempty"`
	// KnownUntil is until when this node remembers a block of which Redis told it. It holds while Redis does not answer; while it
	// does, this node asks it again every 5 s.
	KnownUntil *time.Time `json:"known_until,omitempty"`
}

// blocksInfo is the answer to GET /rate_limit/blocks?limit=…&after=…
type blocksInfo struct {
	Blocks []blockInfo `json:"blocks"`
	// More says that there are more than were asked for. Next is what to give as after to see them.
	More bool   `json:"more"`
	Next string `json:"next,omitempty"`
	// Errors name the stores that did not answer, with the reason. Blocks of theirs that this node remembers are listed as share.
	Errors []string `json:"errors,omitempty"`
}

// blockInfo is a block as the admin endpoint shows it.
type blockInfo struct {
	// ID is the hashed identity.
	ID string `json:"id"`
	// Group is the penalty group, empty for the default one.
	Group string `json:"group,omitempty"`
	// Key is what the identity was before it was hashed, with log_key on.
	Key string `json:"key,omitempty"`
	// Until is the end of the block.
	Until time.Time `json:"until"`
	// Store is where the block is known: memory, redis, or share for one that this node remembers while Redis does not answer.
	Store string `json:"store"`
	// ByHand says that an operator set it.
	ByHand bool `json:"by_hand,omitempty"`
}

// blockRequest is the body of POST /rate_limit/block.
type blockRequest struct {
	who
	// For is how long, like 90s, 30m, 24h; at most 30 days.
	For string `json:"for"`
	// Group is the penalty group. Default: that of the zone; needed with an id where there are several.
	Group *string `json:"group,omitempty"`
}

// blockResult says what was blocked.
type blockResult struct {
	ID    string    `json:"id"`
	Group string    `json:"group,omitempty"`
	Until time.Time `json:"until"`
	// Stores are where: memory, redis.
	Stores []string `json:"stores"`
}

// unblockRequest is the body of POST /rate_limit/unblock.
type unblockRequest struct {
	who
	// Group limits it to one penalty group. Default: all.
	Group *string `json:"group,omitempty"`
	// Amnesty is how long refusals are no strikes from now on, like 10m; at most 24h. Default: they are at once.
	Amnesty string `json:"amnesty,omitempty"`
}

// unblockResult says how many records of strikes were forgotten.
type unblockResult struct {
	ID        string `json:"id"`
	Forgotten int    `json:"forgotten"`
	// Amnesty is until when refusals are no strikes.
	Amnesty *time.Time `json:"amnesty_until,omitempty"`
}

// resetRequest is the body of POST /rate_limit/reset: the bucket of a client is full again. The zone is needed also with an id.
type resetRequest struct{ who }

// resetResult says where there was a bucket.
type resetResult struct {
	Zone string `json:"zone"`
	ID   string `json:"id"`
	// Reset is the stores that kept one: memory, redis, share.
	Reset []string `json:"reset"`
}

// overrideRequest is the body of POST /rate_limit/override: what this node does about a zone while its store is down.
type overrideRequest struct {
	Zone   string `json:"zone"`
	Action string `json:"action"` // local, deny or allow
	For    string `json:"for"`    // above 0, at most 1h
}

// overrideInfo is an override that holds, and the answer to POST /rate_limit/override.
type overrideInfo struct {
	Zone   string    `json:"zone"`
	Action string    `json:"action"`
	Until  time.Time `json:"until"`
}

// overridesInfo is the answer to GET /rate_limit/override. That to DELETE /rate_limit/override?zone=… is the one that ended.
type overridesInfo struct {
	Overrides []overrideInfo `json:"overrides"`
}

// topInfo is the answer to GET /rate_limit/top: who takes most, of a sketch with a bounded number of clients.
type topInfo struct {
	// Enabled says whether the app option top is on; Clients is empty if not.
	Enabled bool `json:"enabled"`
	// Since is from when on tokens are counted, ten to twenty minutes ago.
	Since   *time.Time  `json:"since,omitempty"`
	Clients []topClient `json:"clients"`
}

type topClient struct {
	Zone string `json:"zone"`
	ID   string `json:"id"`
	Key  string `json:"key,omitempty"` // with log_key on
	// Tokens is what the client asked for, refused requests too; the truth is from Tokens − Error to Tokens.
	Tokens float64 `json:"tokens"`
	Error  float64 `json:"error"`
	// Refused counts its refused requests since it was noticed.
	Refused uint64 `json:"refused"`
}

// explainRequest is the body of POST /rate_limit/explain.
type explainRequest struct {
	Method  string              `json:"method"`
	URL     string              `json:"url"`
	Headers map[string][]string `json:"headers,omitempty"`
	// ClientIP is who sends the request. Default 127.0.0.1.
	ClientIP string `json:"client_ip,omitempty"`
}

// explainInfo says what would become of a request. Nothing is charged for it.
type explainInfo struct {
	Server   string             `json:"server"`
	Handlers []explainedHandler `json:"handlers"`
	// Unsure names what stands before a handler and may change the request, such as auth.
	Unsure []string `json:"unsure,omitempty"`
	// AnsweredBy is the handler that answers a request which no limit refuses, empty if that is not known.
	AnsweredBy string `json:"answered_by,omitempty"`
}

// explainedHandler is one rate_limit that the request meets.
type explainedHandler struct {
	Exempt bool `json:"exempt,omitempty"`
	// Verdict is allowed, limited, blocked, unavailable, overloaded, exempt, or rejected with its Error.
	Verdict string          `json:"verdict"`
	Error   string          `json:"error,omitempty"`
	Pool    *poolInfo       `json:"pool,omitempty"`
	Zones   []explainedZone `json:"zones"`
}

// explainedZone is one zone of a handler.
type explainedZone struct {
	Zone string `json:"zone"`
	// Matched says whether the zone counts the request; what follows says nothing if not.
	Matched bool `json:"matched"`
	// Charged is false where a handler before has charged the zone already, and where the zone is in a dry run and would refuse a
	// request that it cannot charge; then there is a verdict.
	Charged    bool   `json:"charged"`
	Key        string `json:"key,omitempty"`       // the expression
	KeyValue   string `json:"key_value,omitempty"` // what it is for this request
	Cost       int64  `json:"cost,omitempty"`
	Sensitive  bool   `json:"sensitive,omitempty"`
	DryRun     bool   `json:"dry_run,omitempty"`
	Verdict    string `json:"verdict,omitempty"` // allowed, limited, blocked, unavailable or rejected, of this zone alone
	RetryAfter int64  `json:"retry_after,omitempty"`
	clientInfo
}
