package ratelimit

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"
)

// This file writes what people read: tables, times, and texts from elsewhere that must not act on a terminal.

// page is the output of a command. Whatever is written to it is cleaned.
type page struct {
	table *tabwriter.Writer
	now   time.Time
	err   error // why something could not be written
}

func newPage(out io.Writer, now time.Time) *page {
	return &page{table: tabwriter.NewWriter(out, 0, 8, 2, ' ', 0), now: now}
}

// row writes a row of a table. Rows that follow each other are aligned.
func (p *page) row(cells ...string) {
	for i := range cells {
		if i > 0 {
			fmt.Fprint(p.table, "\t")
		}
		fmt.Fprint(p.table, clean(cells[i]))
	}
	fmt.Fprintln(p.table)
}

// line writes a line that stands outside of tables.
func (p *page) line(format string, args ...any) {
	p.end()
	for i := range args {
		if s, ok := args[i].(string); ok {
			args[i] = clean(s)
		}
	}
	fmt.Fprintf(p.table, format+"\n", args...)
	p.end()
}

// title begins another table.
func (p *page) title(cells ...string) {
	p.end()
	fmt.Fprintln(p.table)
	p.row(cells...)
}

// end ends a table.
func (p *page) end() {
	if err := p.table.Flush(); err != nil {
		p.err = err
	}
}

// flush writes what is left, and returns why something could not be written.
func (p *page) flush() error {
	p.end()
	return p.err
}

// at says a time of day here, and how far off it is.
func (p *page) at(t time.Time) string {
	t, now := t.Local(), p.now.Local()
	layout := time.TimeOnly
	if t.Year() != now.Year() || t.YearDay() != now.YearDay() {
		layout = "2006-01-02 " + time.TimeOnly
	}
	distance := "in " + roughly(t.Sub(now))
	if t.Before(now) {
		distance = roughly(now.Sub(t)) + " ago"
	}
	return t.Format(layout) + " (" + distance + ")"
}

// maybe is at for a time that may be absent.
func (p *page) maybe(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return p.at(*t)
}

// roughly says a duration as people do, rounded up.
func roughly(d time.Duration) string {
	for _, unit := range []struct {
		length time.Duration
		name   string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}} {
		if d >= 2*unit.length {
			return units(d, unit.length) + unit.name
		}
	}
	return units(d, time.Second) + "s"
}

func units(d, unit time.Duration) string {
	return strconv.FormatInt(int64(math.Ceil(float64(d)/float64(unit))), 10)
}

// portion says how much of a burst is left.
func portion(remaining float64, burst int64) string {
	if burst == 0 {
		return "-"
	}
	tokens := int64(remaining)
	return fmt.Sprintf("%d of %d (%d %%)", tokens, burst, 100*tokens/burst)
}

// groupName says a penalty group.
func groupName(group *string) string {
	switch {
	case group == nil:
		return "-"
	case *group == "":
		return "default"
	}
	return *group
}

// mark returns the word if it applies.
func mark(applies bool, word string) string {
	if applies {
		return word
	}
	return "-"
}

// clean returns a text as it can be shown on a terminal: keys, addresses and messages come from clients. What a terminal would
// obey, or the reader would not see, is escaped as in Go: control characters, those that turn the direction of writing or have no
// width, other spaces than the usual one, a second space behind one, which could look like another column, and bytes that are no
// UTF-8. A backslash is escaped too, so that no text looks like an escape.
func clean(s string) string {
	if !strings.ContainsFunc(s, suspicious) && !strings.Contains(s, "  ") {
		return s
	}
	var b strings.Builder
	for at := 0; at < len(s); {
		r, size := utf8.DecodeRuneInString(s[at:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[at])
		case r == ' ' && at > 0 && s[at-1] == ' ':
			b.WriteString(`\x20`)
		case suspicious(r):
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		default:
			b.WriteRune(r)
		}
		at += size
	}
	return b.String()
}

// suspicious says whether a character may not be shown as it is.
func suspicious(r rune) bool {
	switch {
	case r == ' ':
		return false
	case r == '\\', r == utf8.RuneError, !unicode.IsGraphic(r), unicode.Is(unicode.Zs, r):
		return true
	}
	return unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}
