"""Functions that run backwards, and the transform that frees what they can compute again.

Read in this order: `pair` (a function and its inverse), `checkpoint` (the transform), `slots` (where the tensors
between blocks are), `call` (one call on flat lists, with `shared`, `replay` and `watch`), `hooks` (plain autograd),
`function` and `maps` (inside of torch.func); then what is made of them: `couplings` (of a `part`), `integrators`,
`exact`, `chain`, `log_det`, `checks`. All pairs are a `value`.
"""
