"""Every transform around every other one gives of a checkpointed function what it gives of the function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vjp, vmap

from invfunc import tree
from invfunc.testing import assert_trees_close
from tests.invertible.test_composition import live, some, squares, steps, turned
from tests.invertible_cases import FLOOR, FORMS, RTOL, Sizes, sizes, twins
from tests.networks import total

Of = Callable[[Any, Any], Any]
"""A function of x and of parameters."""


def with_tangents(h: Of) -> Of:
    """Those of `forward_ad`, as numbers."""

    def tangent(t: torch.Tensor) -> torch.Tensor:
        found = forward_ad.unpack_dual(t).tangent
        return torch.zeros_like(t) if found is None else found

    def of(x, p):
        with forward_ad.dual_level():
            given = tree.map_leaves(lambda t: forward_ad.make_dual(t, turned(t)), (x, p))
            return tree.map_leaves(tangent, h(*given))

    return of


def pulled(h: Of) -> Of:
    def of(x, p):
        y, pull = vjp(h, x, p)
        return vmap(pull)(steps(y))

    return of


TRANSFORMS: dict[str, Callable[[Of], Of]] = {
    "grad": lambda h: grad(lambda x, p: total(h(x, p)), (0, 1)),
    "jacrev": lambda h: lambda x, p: jacrev(lambda p: some(h(x, p), 2))(p),
    "vjp": pulled,
    "jvp": lambda h: lambda x, p: jvp(h, (x, p), (turned(x), turned(p))),
    "forward_ad": with_tangents,
    "vmap over x": lambda h: lambda x, p: vmap(h, (0, None))(steps(x), p),
    "vmap over params": lambda h: lambda x, p: vmap(h, (None, 0))(x, steps(p)),
    "vmap over both": lambda h: lambda x, p: vmap(h)(steps(x), steps(p)),
}


def in_autograd(h: Of, order: int) -> Of:
    """Gradients in plain autograd, around all of it."""

    def of(x, p):
        x, p = live(x, p)
        leaves, value, found = tree.leaves((x, p)), total(h(x, p)), []
        for _ in range(order):
            found.append(torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True))
            value = squares(found[-1])
        return tree.map_leaves(torch.Tensor.detach, found)

    return of


def in_batches(h: Of) -> Of:
    """Several cotangents at once, in plain autograd."""

    def of(x, p):
        x, p = live(x, p)
        y = total(h(x, p)), squares(h(x, p))
        many = [torch.linspace(1, 2, 3).to(t) for t in y]
        found = torch.autograd.grad(y, tree.leaves((x, p)), many, is_grads_batched=True, allow_unused=True)
        return [g for g in found if g is not None]

    return of


AROUND: dict[str, Callable[[Of], Of]] = {
    "nothing": lambda h: h,
    "autograd": lambda h: in_autograd(h, 1),
    "autograd, twice": lambda h: in_autograd(h, 2),
    "is_grads_batched": in_batches,
}


def assert_same(words: list[str], around: str, form: str, s: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    pair = twins(form, s).to(dtype, device)

    def of(h: Of) -> Any:
        for word in words:
            h = TRANSFORMS[word](h)
        return AROUND[around](h)(pair.x, pair.params)

    try:
        wanted = of(pair.f)
    except (RuntimeError, NotImplementedError):  # torch has no such composition
        return
    assert_trees_close(of(pair.g), wanted, RTOL[dtype], FLOOR)


EVERY_TWO = [
    (inner, outer, around)
    for (i, inner), (j, outer), (k, around) in product(*map(enumerate, (TRANSFORMS, TRANSFORMS, AROUND)))
    if (i + j + k) % 2 == 0
]
"""Half of all triples, with each pair in one of them."""


@pytest.mark.parametrize(("inner", "outer", "around"), EVERY_TWO)
def test_two(inner, outer, around, dtype, device):
    forms = ["additive", "functions of a dict"]
    form = forms[(list(TRANSFORMS).index(inner) + list(AROUND).index(around)) % 2]
    assert_same([inner, outer], around, form, Sizes(depth=2), dtype, device)


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_several(data, dtype, device):
    words = data.draw(st.lists(st.sampled_from(list(TRANSFORMS)), min_size=1, max_size=3))
    around, form = data.draw(st.sampled_from(list(AROUND))), data.draw(st.sampled_from(list(FORMS)))
    assert_same(words, around, form, data.draw(sizes()), dtype, device)
