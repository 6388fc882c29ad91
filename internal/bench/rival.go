package bench

import (
	"net"
	"net/url"
	"os"
	"os/exec"
	"syscall"

	"github.com/caddy-tollgate/ratelimit/internal/proc"
)

// startRival starts a server of somebody else. Its command runs in a shell, where $BENCH_REDIS is host and port of the
// scenario's Redis and $BENCH_BACKEND of what a reverse proxy leads to.
func (r *rig) startRival(v *rival, status int) *server {
	r.t.Helper()
	u, err := url.Parse(v.url)
	if err != nil {
		r.t.Fatalf("the URL of the rival: %v", err)
	}
	cmd := exec.Command("sh", "-c", v.command)
	cmd.Env = append(os.Environ(), "BENCH_REDIS="+r.env["REDIS"], "BENCH_BACKEND="+r.env["BACKEND"])
	p := proc.New(r.t, "rival")
	p.Start(cmd)
	r.t.Cleanup(func() { killChildren(p) })
	p.Ready(func() bool {
		conn, err := net.Dial("tcp", u.Host)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return &server{
		subject: subject{name: v.name}, pids: p.Pids,
		site: site{addr: u.Host, path: u.RequestURI(), status: status},
	}
}

// killChildren ends what the shell has started, since the end of the shell alone does not.
func killChildren(p *proc.Process) {
	if p.Exited() {
		return
	}
	for _, pid := range p.Pids()[1:] {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
}
