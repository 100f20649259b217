"""Order of the samples of a run: data set parts, permutations, token windows and blends."""
