package ratelimit

import (
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
)

// patienceWithKeys is how many requests may come without their key until that looks like a mistake in the configuration.
const patienceWithKeys = 100

// missingKeys watches whether the key of a zone is ever there. It says once that it is not, which no check at load can tell:
// what a key names may come from other handlers.
type missingKeys struct {
	logger *zap.Logger
	found  atomic.Bool
	missed atomic.Int64
	noIP   sync.Once
}

// note takes notice of a request with or without the key. Nobody does of a zone that is only asked what it would do.
func (m *missingKeys) note(z *Zone, known bool) {
	if m == nil {
		return
	}
	if !known {
		z.charge.counts.missing.Add(1)
	}
	if m.found.Load() {
		return
	}
	if known {
		m.found.Store(true)
		return
	}
	if m.missed.Add(1) == patienceWithKeys {
		m.logger.Warn("the key of a zone was missing in its first 100 requests: is what sets it ordered after rate_limit, like auth? write both into a route, in their order",
			zap.String("zone", z.charge.Zone), zap.Strings("key", z.key.names()))
	}
}

// noAddress takes notice of a request of which not even the client address is known.
func (m *missingKeys) noAddress(z *Zone) {
	if m == nil {
		return
	}
	m.noIP.Do(func() {
		m.logger.Warn("a request has no client address, as on a unix socket without trusted_proxies_unix: a sensitive zone refuses it, others do not count it",
			zap.String("zone", z.charge.Zone))
	})
}
