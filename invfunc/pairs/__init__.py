"""Functions with their inverses, as values: `pair` says what one is; all others are made of a `part`, or of pairs."""
