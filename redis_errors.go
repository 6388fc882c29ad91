package ratelimit

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// This file says what the end of a call to Redis means.

var (
	// errDown says that nothing was sent, because Redis is known not to answer.
	errDown = errors.New("redis is down")
	// errTimeout says that there was no answer in time. The command may still be executed, once.
	errTimeout = errors.New("redis did not answer in time")
	// errReply is an answer of the script that this version cannot read.
	errReply = errors.New("redis: unexpected reply of the script")
	// errHealed is a key under our prefix that holds something else.
	errHealed = errors.New("it was of another type")
)

// errorClass is what the end of a call means for the server that was asked. NOSCRIPT, MOVED and ASK are no end: the call goes
// on.
type errorClass uint8

const (
	// classAnswer is a decision.
	classAnswer errorClass = iota
	// classUnavailable is no answer, or one that everybody gets who asks: three in a row and the server is down.
	classUnavailable
	// classMistake is our own: it is loud, but no reason to stop asking, since other requests may have an answer.
	classMistake
	// classGone is a caller who did not wait; it says nothing about the server.
	classGone
)

// repliesOf sorts what a server refuses with by the first word. What is not here is classUnavailable: a new reason to refuse
// must not make every request wait for its refusal.
var repliesOf = map[string]errorClass{
	"BUSY":        classUnavailable, // another script runs for too long
	"CLUSTERDOWN": classUnavailable, // nobody serves the slot
	"LOADING":     classUnavailable, // it reads its data set
	"MASTERDOWN":  classUnavailable, // a replica without a master
	"MISCONF":     classUnavailable, // it cannot save, and so takes no writes
	"NOAUTH":      classUnavailable,
	"NOPERM":      classUnavailable,
	"NOREPLICAS":  classUnavailable, // too few to take writes
	"OOM":         classUnavailable, // no memory, and nothing that may be evicted
	"READONLY":    classUnavailable, // a replica
	"TRYAGAIN":    classUnavailable, // some keys of the call have moved and others have not
	"WRONGPASS":   classUnavailable,

	"ASK":   classUnavailable, // followed before; still redirected means that nobody serves the slot
	"MOVED": classUnavailable,

	"CROSSSLOT": classMistake,
	"WRONGTYPE": classMistake,
}

// slotUnserved is what a master of a Cluster that lives without some of its slots says about those. Of the keys that it keeps, it
// says nothing.
const slotUnserved = "Hash slot not served"

// classify says what an error means.
func classify(err error) errorClass {
	var reply redis.Error
	switch {
	case err == nil:
		return classAnswer
	case errors.Is(err, context.Canceled):
		return classGone
	case errors.Is(err, errReply):
		return classMistake
	case !errors.As(err, &reply): // no connection, no name, no certificate, closed, timed out
		return classUnavailable
	}
	code, text, _ := strings.Cut(reply.Error(), " ")
	switch {
	case code == "ERR":
		return classifyScript(text)
	case code == "CLUSTERDOWN" && text == slotUnserved:
		return classMistake
	}
	if class, known := repliesOf[code]; known {
		return class
	}
	return classUnavailable
}

// classifyScript tells an error in the script, which is ours, from a refusal of one of its commands, which everybody gets.
func classifyScript(text string) errorClass {
	inScript := strings.Contains(text, "user_script") || strings.Contains(text, "Error running script")
	if inScript && !slices.ContainsFunc(refusals, func(r string) bool { return strings.Contains(text, r) }) {
		return classMistake
	}
	return classUnavailable
}

// refusals are what a command in the script can be refused for, whoever asks. Before Redis 7 they stand inside of an error of the
// script.
var refusals = []string{"-READONLY ", "-OOM ", "-MISCONF ", "-NOREPLICAS ", "can't run this command"}

// errorNames are the words for errors in metrics.
var errorNames = append([]string{"connection", "other", "reply", "script", "timeout"}, replyNames()...)

// replyNames returns what servers refuse with, in lower case.
func replyNames() (names []string) {
	for _, code := range sortedNames(repliesOf) {
		names = append(names, strings.ToLower(code))
	}
	return names
}

// errorName returns the word for an error in metrics: one of few, whatever a server says.
func errorName(err error) string {
	var reply redis.Error
	var network net.Error
	switch {
	case errors.Is(err, errReply):
		return "reply"
	case errors.As(err, &reply):
		code, text, _ := strings.Cut(reply.Error(), " ")
		if _, known := repliesOf[code]; known {
			return strings.ToLower(code)
		}
		if code == "ERR" && classifyScript(text) == classMistake {
			return "script"
		}
		return "other"
	case errors.Is(err, errTimeout), errors.As(err, &network) && network.Timeout():
		return "timeout"
	}
	return "connection"
}

// isReadOnly says whether a server refused to write because it is a replica.
func isReadOnly(err error) bool {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	return strings.HasPrefix(reply.Error(), "READONLY ") || strings.Contains(reply.Error(), "-READONLY ")
}

// isForgotten says whether a server does not know the script, or not any more.
func isForgotten(err error) bool { return redis.HasErrorPrefix(err, "NOSCRIPT") }

// isRedirect says whether another node of the Cluster keeps the key.
func isRedirect(err error) bool {
	return redis.HasErrorPrefix(err, "MOVED ") || redis.HasErrorPrefix(err, "ASK ")
}
