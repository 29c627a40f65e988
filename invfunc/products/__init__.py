"""Products of curvature matrices with vectors, and what is made of them.

`given` runs a function whole or split at its outputs, `curvature` records the maps of a matrix as vector-Jacobian
products, `maps` evaluates them, and `product` makes functions of them; `along` is a product at fixed parameters. `rows`
are columns at the outputs, which make the square root of a matrix, and `sample_space` is that matrix by its small one.
"""
