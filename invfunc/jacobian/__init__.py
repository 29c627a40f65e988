"""Factored per-sample Jacobians.

A call of a statistic goes through `problem` (its arguments), `engine` (what to run), `runs` (the function under a
`trace`, which uses `follow` and `rules` at every operation), `loss` (the columns to send back) and `fold`, which sends
them back (`pullback`), has `measures` keep what they want of the `shares` (contractions), and makes results of it. A
`quantity` is a measure with the kind of its columns: those of the gradient, of the GGN, of the Hessian (`residual` adds
what the model's own operations bend), of a `chain`, or of the outputs. Where there are many columns of a GGN,
`structure` finds a cheaper way than to pull each back, with `labels` for the entries of tensors. `twice` mends what
torch differentiates wrongly.
"""
