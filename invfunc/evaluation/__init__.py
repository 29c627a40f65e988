"""From a function to its statistics.

A call of a statistic is an `engine`: it runs the function (`passes`, which rest on a `recording`), asks the `loss` for
the columns to send back, and hands both to a `fold`. That pulls the columns back to every parameter use, has the
`reductions` keep what they want of the per-sample gradients found there (`per_sample`), and makes results of it. What
is known of torch's operations is in `operations`; `sparsity` finds a cheaper way than to pull each column back.
"""
