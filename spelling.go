package ratelimit

// editDistance counts the insertions, deletions and substitutions of a byte that make a into b (Levenshtein), where a
// substitution counts as much as the caller says.
func editDistance(a, b string, substitution int) int {
	row := make([]int, len(b)+1) // distances from what was read of a to every beginning of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced += substitution
			}
			diagonal = row[j+1]
			row[j+1] = min(row[j+1]+1, row[j]+1, replaced)
		}
	}
	return row[len(b)]
}
