"""What is known of torch's operations: one entry for each (`operation`), family by family.

`views`, `pointwise`, `products` ... state what is known. `batch_axis` follows where operations move the samples;
`factors`: how the gradient of a parameter factorises, sample by sample; `receptive_fields`: which entries are read for
which; `equations`: what is an einsum; `compositions`: what is followed in other operations; `second_derivatives`: where
torch's are missing or wrong; `naming`: what functions and arguments are called; `calls`: what a call reads and writes;
`heard`: the door by which calls come in.
"""

# ruff: noqa: F401  (importing a family fills its entries in)

from invfunc.operations import (
    along,
    attention,
    convolutions,
    images,
    indexing,
    linear_algebra,
    lookup,
    losses,
    norms,
    pointwise,
    products,
    queries,
    random,
    recurrences,
    recurrent,
    reductions,
    views,
)
