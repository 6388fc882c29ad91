package ratelimit

// This file reads the values of options in a Caddyfile.

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// value reads the first argument of an option. An option without one needs what; read also gets the option's name, for
// errors.
func (b blockReader) value(what string, read func(word, text string) error) func() error {
	return func() error {
		word := b.Val()
		if !b.NextArg() {
			return b.errorf("%s needs %s", word, what)
		}
		if b.atBrace() { // behind other text on its line it is an argument, whatever was meant
			return b.errorf("the closing brace needs a line of its own")
		}
		return read(word, b.Val())
	}
}

// notYet refuses arguments that are for a later version.
func (b blockReader) notYet(read func() error, later ...string) func() error {
	return func() error {
		word := b.Val()
		if b.NextArg() {
			if slices.Contains(later, b.Val()) {
				return b.unsupported(word+" "+b.Val(), "")
			}
			b.Prev()
		}
		return read()
	}
}

// oneOf reads one of some words.
func (b blockReader) oneOf(to *string, words ...string) func() error {
	return b.value("a value: "+either(words), func(word, text string) error {
		if !slices.Contains(words, text) {
			return b.errorf("%s %q: write %s", word, text, either(words))
		}
		*to = text
		return nil
	})
}

// either joins words for an error.
func either(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

var nameForm = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// name reads a name.
func (b blockReader) name(to *string) func() error {
	return b.value("a name", func(word, text string) error {
		if !nameForm.MatchString(text) {
			return b.errorf("%s %q: a name is 1 to 64 letters, digits and any of -_.", word, text)
		}
		*to = text
		return nil
	})
}

// flag reads an option that is set by its name alone.
func (b blockReader) flag(to *bool) func() error {
	return func() error {
		*to = true
		return nil
	}
}

// toggle reads on or off; nothing is on.
func (b blockReader) toggle(to *bool) func() error {
	return func() error {
		text := "on"
		if b.CountRemainingArgs() > 0 {
			if err := b.oneOf(&text, "on", "off")(); err != nil {
				return err
			}
		}
		*to = text == "on"
		return nil
	}
}

// whole reads a whole number.
func whole[T ~int | ~int64](b blockReader, to *T, lowest, highest T) func() error {
	return b.value("a whole number", func(word, text string) error {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < int64(lowest) || n > int64(highest) {
			return b.errorf("%s %q: write a whole number from %d to %d", word, text, lowest, highest)
		}
		*to = T(n)
		return nil
	})
}

// optional reads a whole number of which 0 is not the same as nothing.
func optional[T ~int | ~int64](b blockReader, to **T, lowest, highest T) func() error {
	return func() error {
		*to = new(T)
		return whole(b, *to, lowest, highest)()
	}
}

// part reads a number from 0 to 1.
func (b blockReader) part(to *float64) func() error {
	return b.value("a number", func(word, text string) error {
		n, err := strconv.ParseFloat(text, 64)
		if err != nil || !(n >= 0 && n <= 1) { // n < 0 || n > 1 would let NaN through
			return b.errorf("%s %q: write a number from 0 to 1, like 0.1", word, text)
		}
		*to = n
		return nil
	})
}

// longestDuration keeps every time within the numbers that the stores can calculate with.
const longestDuration = 10 * 366 * 24 * time.Hour

// duration reads a duration, at least lowest.
func (b blockReader) duration(to *caddy.Duration, lowest time.Duration) func() error {
	bound := "above 0"
	if lowest == 0 {
		bound = "of 0 or more"
	}
	return b.value("a duration", func(word, text string) error {
		d, err := caddy.ParseDuration(text)
		if err != nil || d < lowest || d > longestDuration {
			return b.errorf("%s %q: write a duration %s and below 10 years, like 50ms, 10s or 1h", word, text, bound)
		}
		*to = caddy.Duration(d)
		return nil
	})
}

// secret reads text that no error may repeat.
func (b blockReader) secret(to *string) func() error {
	return b.value("an argument: perhaps an environment variable is empty", func(word, text string) error {
		if text == "" {
			return b.errorf("%s is empty: perhaps an environment variable is; leave %s out to do without", word, word)
		}
		if b.NextArg() {
			return b.errorf("%s has more than one argument: text with spaces needs quotes", word)
		}
		*to = text
		return nil
	})
}

var keyPrefixForm = regexp.MustCompile(`^[A-Za-z0-9._:/-]+$`)

// keyPrefix reads what all keys in Redis begin with. Braces would move the hash tag.
func (b blockReader) keyPrefix(to *string) func() error {
	return b.value("a word", func(word, text string) error {
		if !keyPrefixForm.MatchString(text) {
			return b.errorf("%s %q: write letters, digits and any of -_.:/", word, text)
		}
		*to = text
		return nil
	})
}

// markName reads the name of a header for marks.
func (b blockReader) markName(to *string) func() error {
	return b.value("the name of a request header", func(word, text string) error {
		if err := checkMarkName(text); err != nil {
			return b.errorf("%s %q: %w", word, text, err)
		}
		*to = text
		return nil
	})
}
