package ratelimit

import (
	"context"
	"net/http"
	"strconv"
)

// This file shows who asks for most, for GET /rate_limit/top.

// usualTop is how many clients are shown to whoever does not say how many.
const usualTop = 20

func showTop(_ context.Context, a *App, r *http.Request) (any, error) {
	given, err := query(r, "limit")
	if err != nil {
		return nil, err
	}
	limit := usualTop
	if text, ok := given["limit"]; ok {
		if limit, err = strconv.Atoi(text); err != nil || limit < 1 || limit > maxTop {
			return nil, adminError(http.StatusBadRequest, "limit must be a number from 1 to %d, got %q", maxTop, text)
		}
	}
	if a.topClients == nil {
		return topInfo{Clients: []topClient{}}, nil
	}
	info := topInfo{Enabled: true}
	most, since := a.top(min(limit, int(a.Top)))
	info.Clients, info.Since = most, &since
	return info, nil
}
