"""Factored per-sample Jacobians: taps, rules, contractions, and the columns of a loss."""
