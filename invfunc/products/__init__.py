"""Products of curvature matrices with vectors, and what is made of them.

`given` runs a function whole or split at its outputs, `curvature` records the maps of a matrix as vector-Jacobian
products, and `product` makes functions of them, `operators` linear operators and estimates, `eigenpairs` eigenvectors.
"""
