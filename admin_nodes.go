package ratelimit

import (
	"context"
	"net/http"
	"slices"
	"strings"
)

// This file shows who shares the limits, for GET /rate_limit/nodes.

// nodesInfo is what one Redis tells about the nodes, for a configuration with `nodes auto`.
type nodesInfo struct {
	// Redis and Prefix say where the nodes announce themselves.
	Redis  string `json:"redis"`
	Prefix string `json:"prefix"`
	// Count is how many nodes this one believes there are; 0 until Redis has told. Handlers with a larger `nodes` use that.
	Count int64 `json:"count"`
	// Reachable says whether Redis has just answered; Nodes is empty if not.
	Reachable bool       `json:"reachable"`
	Nodes     []nodeInfo `json:"nodes"`
}

func listNodes(ctx context.Context, a *App, _ *http.Request) (any, error) {
	list := []nodesInfo{}
	for _, s := range a.remotes {
		if !s.counted {
			continue
		}
		info := nodesInfo{Redis: s.client.settings.String(), Prefix: s.prefix, Nodes: []nodeInfo{}}
		// That Redis does not answer is what somebody may want to know who asks.
		if nodes, err := s.nodes(ctx); err == nil {
			info.Nodes, info.Reachable = nodes, true
		}
		info.Count = s.client.census.believed.Load()
		slices.SortFunc(info.Nodes, func(x, y nodeInfo) int { return strings.Compare(x.ID, y.ID) })
		list = append(list, info)
	}
	return list, nil
}
