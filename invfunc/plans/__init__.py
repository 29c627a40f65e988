"""A call of a statistic as one graph of operations: written down, guarded, and done again."""
