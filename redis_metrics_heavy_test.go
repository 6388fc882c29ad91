//go:build redis

package ratelimit

import "testing"

// What TestMetricsAreExact holds for few clients of Redis holds for many.
func TestHeavyMetricsAreExact(t *testing.T) { metricsAreExactWithRedis(t, 100_000) }
