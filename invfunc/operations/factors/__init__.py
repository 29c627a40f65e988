"""Fast rules: the share of a parameter at an operation that is linear in it, as an einsum of small tensors."""

from invfunc.operations.factors import convolutions, norms
from invfunc.operations.factors.recipe import RULES, Part, Recipe, Site, aligned, axis_of, find, grouped, product, rule

__all__ = [
    "RULES",
    "Part",
    "Recipe",
    "Site",
    "aligned",
    "axis_of",
    "convolutions",
    "find",
    "grouped",
    "norms",
    "product",
    "rule",
]
