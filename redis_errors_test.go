package ratelimit

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/redis/go-redis/v9"
)

// replyError is an error that Redis answers with.
type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

// What servers say, and what it means. The texts are those of Redis 6.2 to 7.2.
var errorReplies = []struct {
	text string
	want errorClass
}{
	{"ASK 3999 127.0.0.1:6381", classUnavailable},
	{"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", classUnavailable},
	{"CLUSTERDOWN The cluster is down", classUnavailable},
	{"CLUSTERDOWN Hash slot not served", classMistake},
	{"CROSSSLOT Keys in request don't hash to the same slot", classMistake},
	{"LOADING Redis is loading the dataset in memory", classUnavailable},
	{"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", classUnavailable},
	{"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", classUnavailable},
	{"MOVED 3999 127.0.0.1:6381", classUnavailable},
	{"NOAUTH Authentication required.", classUnavailable},
	{"NOPERM this user has no permissions to run the 'evalsha' command", classUnavailable},
	{"NOPERM this user has no permissions to access one of the keys used as arguments", classUnavailable},
	{"NOREPLICAS Not enough good replicas to write.", classUnavailable},
	{"OOM command not allowed when used memory > 'maxmemory'.", classUnavailable},
	{"READONLY You can't write against a read only replica.", classUnavailable},
	{"READONLY You can't write against a read only replica. script: 3f, on @user_script:9.", classUnavailable},
	{"TRYAGAIN Multiple keys request during rehashing of slot", classUnavailable},
	{"WRONGPASS invalid username-password pair or user is disabled.", classUnavailable},
	{"WRONGTYPE Operation against a key holding the wrong kind of value", classMistake},

	{"ERR max number of clients reached", classUnavailable},
	{"ERR DB index is out of range", classUnavailable},
	{"ERR unknown command 'evalsha', with args beginning with: ", classUnavailable},
	{"ERR This instance has cluster support disabled", classUnavailable},
	{"ERR The user executing the script can't run this command or subcommand script: 3f", classUnavailable},
	{"ERR user_script:12: attempt to index a nil value script: 3f, on @user_script:12.", classMistake},
	{"ERR Error compiling script (new function): user_script:1: '=' expected", classMistake},
	{"ERR Error running script (call to f_3f): @user_script:12: attempt to index", classMistake},
	{"ERR Error running script (call to f_3f): @user_script:9: -OOM command not allowed", classUnavailable},
	{"ERR Error running script (call to f_3f): @user_script:9: -READONLY You can't write against a read only replica.", classUnavailable},
	{"ERR Error running script (call to f_3f): @user_script:9: -MISCONF Redis is configured to save RDB snapshots", classUnavailable},
	{"ERR Error running script (call to f_3f): @user_script:9: -NOREPLICAS Not enough good replicas to write.", classUnavailable},

	{"SOMETHINGNEW that no version says yet", classUnavailable},
	{"", classUnavailable},
}

func TestWhatErrorRepliesMean(t *testing.T) {
	named := map[string]bool{}
	for _, reply := range errorReplies {
		if got := classify(fmt.Errorf("wrapped: %w", replyError(reply.text))); got != reply.want {
			t.Errorf("%q is of class %d, want %d", reply.text, got, reply.want)
		}
		code, _, _ := strings.Cut(reply.text, " ")
		named[code] = true
	}
	for code := range repliesOf {
		if !named[code] {
			t.Errorf("no row is about %s", code)
		}
	}
}

// What ends a call without a reply.
func TestWhatOtherErrorsMean(t *testing.T) {
	for _, row := range []struct {
		err  error
		want errorClass
	}{
		{nil, classAnswer},
		{context.Canceled, classGone},
		{context.DeadlineExceeded, classUnavailable},
		{os.ErrDeadlineExceeded, classUnavailable},
		{io.EOF, classUnavailable},
		{io.ErrUnexpectedEOF, classUnavailable},
		{net.ErrClosed, classUnavailable},
		{&net.DNSError{Err: "no such host", Name: "redis.invalid", IsNotFound: true}, classUnavailable},
		{&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}, classUnavailable},
		{&net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}, classUnavailable},
		{&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}, classUnavailable},
		{x509.UnknownAuthorityError{}, classUnavailable},
		{redis.ErrClosed, classUnavailable},
		{redis.ErrPoolTimeout, classUnavailable},
		{redis.Nil, classUnavailable}, // Sentinels that do not know the master
		{errDown, classUnavailable},
		{errTimeout, classUnavailable},
		{errReply, classMistake},
	} {
		err := row.err
		if err != nil {
			err = fmt.Errorf("wrapped: %w", err)
		}
		if got := classify(err); got != row.want {
			t.Errorf("%v is of class %d, want %d", err, got, row.want)
		}
	}
}
