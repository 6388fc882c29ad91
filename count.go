package ratelimit

import (
	"encoding/json"
	"fmt"
)

// Count is a whole number from 1. In JSON, 0 is an error rather than the default that a missing field has: who writes
// "burst": 0 means something else.
type Count int64

// UnmarshalJSON implements json.Unmarshaler.
func (c *Count) UnmarshalJSON(raw []byte) error {
	var n int64
	if err := json.Unmarshal(raw, &n); err != nil || n < 1 {
		return fmt.Errorf("must be a whole number from 1, got %s; leave it out for the default", raw)
	}
	*c = Count(n)
	return nil
}
