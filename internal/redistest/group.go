// What Sentinels and clusters have in common: several servers that name each other.

package redistest

import (
	"net"
	"slices"
	"strconv"
)

// answeringOf returns the servers that were neither killed nor stopped.
func answeringOf(servers []*Server) []*Server {
	return slices.DeleteFunc(slices.Clone(servers), func(s *Server) bool { return !s.answering() })
}

func all(servers []*Server, holds func(*Server) bool) bool {
	return !slices.ContainsFunc(servers, func(s *Server) bool { return !holds(s) })
}

// announcedAddrs returns the addresses that clients are told.
func announcedAddrs(servers []*Server) []string {
	addrs := make([]string, len(servers))
	for i, s := range servers {
		addrs[i] = s.announced()
	}
	return addrs
}

// inSync says whether a replica has everything that its master has executed until now.
func inSync(replica *Server) bool {
	replica.t.Helper()
	return replica.Info("replication", "master_link_status") == "up"
}

func isMaster(s *Server) bool {
	s.t.Helper()
	return s.answering() && s.Info("replication", "role") == "master"
}

func splitAddr(addr string) (host, port string) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		panic(err) // it was joined here
	}
	return host, port
}

// announcedAs returns the server that clients are told to find at an address, given as Redis does: host, port, and what
// does not matter here.
func announcedAs(servers []*Server, address []any) *Server {
	if len(address) < 2 {
		return nil
	}
	host, _ := address[0].(string)
	port, isText := address[1].(string)
	if number, isNumber := address[1].(int64); !isText && isNumber {
		port = strconv.FormatInt(number, 10)
	}
	for _, s := range servers {
		if s.announced() == net.JoinHostPort(host, port) {
			return s
		}
	}
	return nil
}
