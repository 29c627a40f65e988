"""Factored per-sample Jacobians.

A call of a statistic goes through `problem` (its arguments), `engine` (what to run), `runs` (the function under a
`trace`, which uses `follow` and `rules` at every operation), `loss` (the columns to send back), `pullback`, `shares`
(contractions), and ends in `measures` (what is kept, and how it folds).
"""
