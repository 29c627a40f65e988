"""Fast rules: the share of a parameter at an operation that is linear in it, as an einsum of small tensors."""

from invfunc.operations.factors.recipe import Part, Recipe, Site, aligned, alike, axis_of, find

__all__ = ["Part", "Recipe", "Site", "aligned", "alike", "axis_of", "find"]
