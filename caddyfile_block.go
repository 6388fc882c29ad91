package ratelimit

// This file holds the tools for reading a block of a Caddyfile by a table of its options. caddyfile_value.go reads their
// values.

import (
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// blockReader reads one block. Its methods that return a function make the reader of one option: it is called with the
// cursor at the option's name.
type blockReader struct {
	httpcaddyfile.Helper
	subject string        // what errors begin with
	global  bool          // in the global option, where there are no named matchers
	shared  *globalOption // nil if there is none, or this is it
}

// option is one line of a block.
type option struct {
	read       func() error // nil: of a later version
	repeatable bool
	hint       string // what to write until then
}

type optionTable map[string]option

func once(read func() error) option       { return option{read: read} }
func repeatable(read func() error) option { return option{read: read, repeatable: true} }
func notYet(hint string) option           { return option{hint: hint} }

// known lists the options that can be written.
func (t optionTable) known() []string {
	words := slices.Sorted(maps.Keys(t))
	return slices.DeleteFunc(words, func(word string) bool { return t[word].read == nil })
}

// block reads the block that may follow, and says whether there was one.
func (b blockReader) block(table optionTable) (found bool, err error) {
	places := map[string]string{}
	for nesting := b.Nesting(); b.NextBlock(nesting); {
		word := b.Val()
		o, known := table[word]
		switch first := places[word]; {
		case !known:
			return true, b.unknown(word, table.known())
		case o.read == nil:
			return true, b.unsupported(word, o.hint)
		case first != "" && !o.repeatable:
			return true, b.errorf("%s is set already at %s", word, first)
		}
		places[word] = b.place()
		if err := o.read(); err != nil {
			return true, err
		}
		if err := b.end(word); err != nil {
			return true, err
		}
		found = true
	}
	return found || b.atBrace(), nil
}

// end makes sure that nothing of a line is left unread.
func (b blockReader) end(word string) error {
	if err := b.lastArgument(word); err != nil {
		return err
	}
	start, hadBlock := b.here(), b.atBrace()
	if b.NextBlock(b.Nesting()) || !hadBlock && b.atBrace() {
		return start.errorf("%s takes no block", word)
	}
	return nil
}

// atBrace says whether the cursor is at the end of a block.
func (b blockReader) atBrace() bool { return b.Val() == "}" && !b.Token().Quoted() }

func (b blockReader) lastArgument(word string) error {
	if b.NextArg() {
		return b.errorf("%s: unexpected argument %q", word, b.Val())
	}
	return nil
}

// in is the reader of a block within this one.
func (b blockReader) in(subject string) blockReader {
	b.subject = subject
	return b
}

// here is a reader that stays at the current token, for errors about it that show later.
func (b blockReader) here() blockReader {
	b.Helper = b.WithDispenser(caddyfile.NewDispenser([]caddyfile.Token{b.Token()}))
	b.Next()
	return b
}

// place is the file and line of the current token, and the imports that led there.
func (b blockReader) place() string { return strings.TrimPrefix(b.Err("").Error(), ", at ") }

func (b blockReader) errorf(format string, args ...any) error {
	return b.Errf(b.subject+": "+format, args...)
}

func (b blockReader) unsupported(word, hint string) error {
	if hint != "" {
		hint = ": " + hint
	}
	return b.errorf("%s is not supported yet%s", word, hint)
}
