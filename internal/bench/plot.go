package bench

import (
	"fmt"
	"html"
	"strings"
)

// The plot has a bar for each comparison, as long as the part of the bare throughput that is left.
const (
	plotWidth           = 760
	plotLeft, plotUnit  = 230, 420 // where the bars begin, and how long 1.0 is
	barHeight, barPitch = 14, 20
	plotTop             = 40
	longest             = 1.2 // times bare; what is longer is cut
)

// style has colours that can be read on white and on black; text takes the better one where the reader's choice is known.
const style = `<style>
text { font: 12px system-ui, sans-serif; fill: #57606a }
.rule { stroke: #8b949e; stroke-dasharray: 3 3 }
.spread { stroke: #8b949e; stroke-width: 2 }
.ours { fill: #2f81f7 }
.other { fill: #8b949e; fill-opacity: .6 }
@media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }
</style>
`

// plot draws the throughput of all scenarios that were not paced as SVG.
func plot(results []result) string {
	var bars strings.Builder
	y := plotTop
	for _, r := range results {
		if r.load.pace > 0 {
			continue // as much was answered as was sent
		}
		for i, c := range r.comparisons() {
			label := c.name
			if i == 0 {
				label = r.name + ": " + label
			}
			bar(&bars, y, label, c)
			y += barPitch
		}
		y += barPitch / 2
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img">`+"\n", plotWidth, y, plotWidth, y)
	b.WriteString("<title>Throughput as a part of the same Caddy without a limiter</title>\n" + style)
	b.WriteString(`<text x="8" y="14">throughput ÷ that of the same Caddy without a limiter; median and extremes of all rounds</text>` + "\n")
	for _, at := range []float64{0.5, 1} {
		fmt.Fprintf(&b, `<line class="rule" x1="%[1]d" x2="%[1]d" y1="34" y2="%[2]d"/><text x="%[1]d" y="30" text-anchor="middle">%.1[3]f</text>`+"\n", across(at), y, at)
	}
	return b.String() + bars.String() + "</svg>\n"
}

// across returns where a value is.
func across(value float64) int { return plotLeft + int(plotUnit*min(max(value, 0), longest)) }

func bar(b *strings.Builder, y int, label string, c comparison) {
	class, s := "other", c.throughput
	if c.name == oursName {
		class = "ours"
	}
	middle, base := y+barHeight/2, y+barHeight-3
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="end">%s</text>`, plotLeft-8, base, html.EscapeString(label))
	fmt.Fprintf(b, `<rect class="%s" x="%d" y="%d" width="%d" height="%d"/>`, class, plotLeft, y, across(s.median)-plotLeft, barHeight)
	fmt.Fprintf(b, `<line class="spread" x1="%d" x2="%d" y1="%d" y2="%d"/>`, across(s.low), across(s.high), middle, middle)
	fmt.Fprintf(b, `<text x="%d" y="%d">%.2f</text>`+"\n", across(max(s.high, s.median))+6, base, s.median)
}
