"""A checkpointed function is the function: its value and derivatives of every order, by every way to take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from invfunc import additive_coupling, invertible_checkpoint, tree
from invfunc.testing import assert_trees_close
from tests.invertible_cases import FLOOR, FORMS, RTOL, Sizes, gradients, sizes, twins
from tests.many_processes import alone
from tests.networks import total

BOTH = (0, 1)


def live(*trees: Any, needs: Callable[[int], bool] = lambda i: True) -> tuple:
    """Copies that a gradient is asked of, of all leaves or of some by their place."""
    leaves, structure = tree.flatten(trees)
    made = [leaf.clone().requires_grad_(needs(i)) for i, leaf in enumerate(leaves)]
    return tree.unflatten(made, structure)


def squares(result: Any) -> torch.Tensor:
    """A nonlinear function of a result, for derivatives of it."""
    parts = [t.square().sum() for t in tree.leaves(result)]
    return sum(parts[1:], parts[0])


def steps(like: Any, n: int = 2) -> Any:
    """n points around a tree, stacked in front."""
    around = torch.linspace(0.8, 1.2, n).double()
    return tree.map_leaves(lambda t: torch.stack([t * c for c in around.to(t).unbind()]), like)


def turned(like: Any) -> Any:
    """Other numbers of the same shapes, as tangents and cotangents."""
    return tree.map_leaves(lambda t: (t + 1).cos(), like)


def some(like: Any, n: int = 2) -> Any:
    return tree.map_leaves(lambda t: t.flatten()[:n], like)


# Plain autograd


def grads(trees: Any) -> list[torch.Tensor | None]:
    return [None if t.grad is None else t.grad.clone() for t in tree.leaves(trees)]


def backward(h, x, p, times=1, **needs):
    x, p = live(x, p, **needs)
    y = h(x, p)
    loss, found = total(y), []
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
        found.append([g for g in grads((x, p)) if g is not None])
    return tree.map_leaves(torch.Tensor.detach, y), found


def backward_inputs(h, x, p):
    x, p = live(x, p)
    wanted = [*tree.leaves(p)[:1], *tree.leaves(x)[-1:]]
    total(h(x, p)).backward(inputs=wanted)
    assert sum(g is not None for g in grads((x, p))) == len(wanted)
    return [t.grad for t in wanted]


def of_parts(h, x, p):
    """One output after the other, each for other inputs, through the same graph."""
    x, p = live(x, p)
    ys, leaves = tree.leaves(h(x, p)), tree.leaves((x, p))
    return [
        torch.autograd.grad(total(y, i), leaves[i::2], retain_graph=True, materialize_grads=True)
        for i, y in enumerate([*reversed(ys), ys[0]])
    ]


def orders(h, x, p, order, **needs):
    """The derivatives up to an order."""
    x, p = live(x, p, **needs)
    leaves = [t for t in tree.leaves((x, p)) if t.requires_grad]
    value, found = total(h(x, p)), []
    for _ in range(order):
        found.append(torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True))
        value = squares(found[-1])
    return found


def batched_grads(h, x, p):
    """Many cotangents at once, through a retained graph."""
    x, p = live(x, p)
    y = total(h(x, p)), squares(some(h(x, p)))
    cotangents = [torch.linspace(1, 2, 3).to(t) for t in y]
    return torch.autograd.grad(y, tree.leaves((x, p)), cotangents, is_grads_batched=True)


def computed(h):
    """At an x that nobody holds, so that it is the inverse that gives it."""
    return lambda x, p: h(tree.map_leaves(lambda t: t + 0.1 * t.sin(), x), p)


def of_vmap(h, x, p):
    x, p = live(steps(x), p)
    y = vmap(h, (0, None))(x, p)
    total(y).backward(retain_graph=True)
    first = grads((x, p))
    total(y).backward()
    return y, first, grads((x, p))


def of_vmap_over_params_twice(h, x, p):
    return orders(vmap(computed(h), (None, 0)), x, steps(p), 2)


def of_func_grad(h, x, p):
    """A gradient of torch.func of what needs a gradient in plain autograd."""
    x, p = live(x, p)
    inner = grad(lambda p: squares(h(x, p)))(p)
    return inner, torch.autograd.grad(squares(inner), tree.leaves((x, p)), materialize_grads=True)


def checkpointed(h, x, p):
    x, p = live(x, p)
    value = checkpoint(lambda x, p: total(h(x, p)), x, p, use_reentrant=False)
    found = torch.autograd.grad(value, tree.leaves((x, p)), create_graph=True)
    return found, torch.autograd.grad(squares(found), tree.leaves((x, p)), materialize_grads=True)


class Module(nn.Module):
    """A module that calls h with its parameters."""

    def __init__(self, h: Callable, params: Any) -> None:
        super().__init__()
        leaves, self._structure = tree.flatten(params)
        self.own = nn.ParameterList(leaf.clone() for leaf in leaves)
        self.call = h

    def forward(self, x: Any) -> Any:
        return self.call(x, tree.unflatten(list(self.own), self._structure))


def of_module(h, x, p):
    module = Module(h, p)
    total(module(x)).backward()
    return grads(list(module.parameters()))


def called_functionally(h, x, p):
    module = Module(h, p)
    others = {name: t.detach() * 1.1 for name, t in module.named_parameters()}
    first = grad(lambda q: total(functional_call(module, q, (x,))))(others)
    q = dict(zip(others, live(*others.values()), strict=True))
    total(functional_call(module, q, (x,))).backward()
    assert all(t.grad is None for t in module.parameters())
    return first, grads(list(q.values()))


PLAIN = {
    "backward": backward,
    "backward three times": lambda h, x, p: backward(h, x, p, times=3),
    "backward, data needs no gradient": lambda h, x, p: backward(h, x, p, needs=lambda i: i >= len(tree.leaves(x))),
    "backward, of the data": lambda h, x, p: backward(h, x, p, needs=lambda i: i < len(tree.leaves(x))),
    "backward, half is frozen": lambda h, x, p: backward(h, x, p, needs=lambda i: i % 2 == 1),
    "backward(inputs=)": backward_inputs,
    "of each output": of_parts,
    "three orders": lambda h, x, p: orders(h, x, p, 3),
    "two orders, half is frozen": lambda h, x, p: orders(h, x, p, 2, needs=lambda i: i % 2 == 0),
    "is_grads_batched": batched_grads,
    "backward of vmap, twice": of_vmap,
    "two orders of vmap over params": of_vmap_over_params_twice,
    "autograd of grad": of_func_grad,
    "torch's checkpoint around": checkpointed,
    "module": of_module,
}


# torch.func


def slope(h):
    """Of x and params."""
    return grad(lambda x, p: total(h(x, p)), BOTH)


def curved(h):
    """A scalar that depends on first derivatives."""
    return lambda x, p: squares(slope(h)(x, p))


def pulled(h, x, p):
    y, pull = vjp(h, x, p)
    return pull(turned(y)), pull(y)


def pulled_in_grad(h, x, p):
    def outer(x):
        y, pull = vjp(lambda p: h(x, p), p)
        return squares(pull(y))

    return grad(outer)(x)


def of_the_cotangent(h, x, p):
    """Differentiated after the level of the vjp has ended."""
    y, pull = vjp(lambda p: h(x, p), p)
    return grad(lambda c: squares(pull(c)))(turned(y)), vmap(pull)(steps(y)), pull(y)


def linear(h, x, p):
    return jvp(h, (x, p), (turned(x), turned(p)))


def with_tangents(h, x, p):
    """Tangents of `forward_ad`, as numbers."""

    def tangent(t):
        found = forward_ad.unpack_dual(t).tangent
        return torch.zeros_like(t) if found is None else found

    with forward_ad.dual_level():
        given = tree.map_leaves(lambda t: forward_ad.make_dual(t, turned(t)), (x, p))
        return tree.map_leaves(tangent, h(*given))


def summed(h, axes=(0, 0)):
    return lambda x, p: total(vmap(h, axes)(x, p))


FUNC = {
    "value": lambda h, x, p: h(x, p),
    "no_grad": lambda h, x, p: torch.no_grad()(h)(x, p),
    "grad": lambda h, x, p: slope(h)(x, p),
    "grad of x": lambda h, x, p: grad(lambda x: total(h(x, p)))(x),
    "grad of params": lambda h, x, p: grad(lambda p: total(h(x, p)))(p),
    "grad with aux": lambda h, x, p: grad(lambda p: (total(h(x, p)), h(x, p)), has_aux=True)(p),
    "vjp": pulled,
    "vjp in grad": pulled_in_grad,
    "vjp, its cotangent": of_the_cotangent,
    "jvp": linear,
    "forward_ad": with_tangents,
    "vmap of jvp": lambda h, x, p: vmap(lambda x: linear(h, x, p))(steps(x)),
    "jacrev of vmap over params": lambda h, x, p: jacrev(lambda p: some(vmap(h, (None, 0))(x, p)))(steps(p)),
    "jacrev": lambda h, x, p: jacrev(lambda x, p: some(h(x, p)), BOTH)(x, p),
    "jacrev, in chunks": lambda h, x, p: jacrev(lambda p: some(h(x, p), 3), chunk_size=2)(p),
    "jacfwd": lambda h, x, p: jacfwd(lambda x: h(x, p))(x),
    "linearize of grad": lambda h, x, p: linearize(slope(h), x, p)[1](turned(x), turned(p)),
    "hessian": lambda h, x, p: hessian(lambda x: total(h(x, p)))(x),
    "jvp of grad": lambda h, x, p: jvp(slope(h), (x, p), (turned(x), turned(p))),
    "grad of jvp": lambda h, x, p: grad(lambda p: squares(linear(h, x, p)))(p),
    "grad of grad": lambda h, x, p: grad(curved(h), BOTH)(x, p),
    "grad of vmap over params, at one computed x": lambda h, x, p: slope(vmap(computed(h), (None, 0)))(x, steps(p)),
    "grad of grad of vmap over params": lambda h, x, p: grad(curved(vmap(computed(h), (None, 0))), BOTH)(x, steps(p)),
    "three grads": lambda h, x, p: grad(lambda x, p: squares(grad(curved(h), BOTH)(x, p)), BOTH)(x, p),
    "functional_call": called_functionally,
    "vmap": lambda h, x, p: vmap(h, (0, None))(steps(x), p),
    "vmap of grad": lambda h, x, p: vmap(slope(h), (0, None))(steps(x), p),
    "vmap of grad over params": lambda h, x, p: vmap(slope(h), (None, 0))(x, steps(p)),
    "vmap of grad over the last axis": lambda h, x, p: vmap(slope(h), (-1, None), -1)(
        tree.map_leaves(lambda t: t.movedim(0, -1), steps(x)), p
    ),
    "vmap of vmap of grad": lambda h, x, p: vmap(vmap(slope(h), (0, None)), (None, 0))(steps(x), steps(p, 3)),
    "grad of vmap": lambda h, x, p: grad(summed(h, (0, None)), BOTH)(steps(x), p),
    "grad of vmap over params": lambda h, x, p: grad(summed(h, (None, 0)), BOTH)(x, steps(p)),
    "vmap of hessian": lambda h, x, p: vmap(hessian(lambda x: total(h(x, p))))(steps(x)),
    "vmap of grad of grad": lambda h, x, p: vmap(grad(curved(h), BOTH), (0, None))(steps(x), p),
    "grad of vmap of grad": lambda h, x, p: grad(lambda x, p: squares(vmap(slope(h), (0, None))(x, p)), BOTH)(
        steps(x), p
    ),
    "grad of grad of vmap": lambda h, x, p: grad(lambda x, p: squares(grad(summed(h, (0, None)), BOTH)(x, p)), BOTH)(
        steps(x), p
    ),
}

EVERYWHERE = ["additive", "functions of a dict"]
TABLE = [
    (form, composed)
    for i, form in enumerate(FORMS)
    for k, composed in enumerate(PLAIN | FUNC)
    if form in EVERYWHERE or (i + k) % 5 == 0
]
"""Some forms meet everything; what the others meet takes turns, so that everything meets some of them."""


def assert_same(composed: Callable, form: str, s: Sizes, dtype: torch.dtype, device: torch.device) -> None:
    pair = twins(form, s).to(dtype, device)
    found, wanted = (composed(h, pair.x, pair.params) for h in (pair.g, pair.f))
    assert_trees_close(found, wanted, RTOL[dtype], FLOOR)


@pytest.mark.parametrize(
    ("form", "composed"),
    [
        pytest.param(*each, marks=[pytest.mark.quick] * (i % 3 == 0 and "linearize" not in each[1]))  # which traces
        for i, each in enumerate(TABLE)
    ],
)
def test_equals_the_function(form, composed, dtype, device):
    assert_same((PLAIN | FUNC)[composed], form, Sizes(), dtype, device)


@settings(max_examples=10, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_equals_the_function_at_any_size(data, dtype, device):
    form, composed = data.draw(st.sampled_from(list(FORMS))), data.draw(st.sampled_from(list(PLAIN | FUNC)))
    assert_same((PLAIN | FUNC)[composed], form, data.draw(sizes()), dtype, device)


# A test for each way in which MemCNN or invtorch break, and for each thing that their users ask for

READS = {
    "x + g(x)": lambda h, x, w: x + h(x, w),
    "g(x) + x": lambda h, x, w: h(x, w) + x,
    "x * g(x)": lambda h, x, w: x * h(x, w),
    "g(g(x)) - g(x)": lambda h, x, w: h(h(x, w), w) - h(x, w),
    "both outputs": lambda h, x, w: (lambda y: h(y, w) - y)(h(x, w)),
    "print": lambda h, x, w: (lambda y: (repr(x), str(y), y)[2])(h(x, w)),
    "base of a view": lambda h, x, w: (lambda y: y + x.sum())(h(x.view(6).view(2, 3), w)),
    "base of an expanded one": lambda h, x, w: h(x.sum(0, keepdim=True).expand(2, 3), w) * x,
}


class TestCrashes:
    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
    def test_x_is_read_after_the_call(self, same, read, leaf):
        """Both: the process dies, as the storage of x is gone."""
        same(lambda h, x, w: gradients(read(h, x if leaf else x.sin(), w), x, w))


class TestErrors:
    @pytest.mark.parametrize("op", ["relu", "exp", "sigmoid", "tanh", "sqrt", "softmax"])
    def test_an_op_that_saves_its_output_stands_before(self, same, op):
        """Both (memcnn#70): "modified by an inplace operation", as they free what relu saved."""

        def before(x):
            return x.softmax(-1) if op == "softmax" else getattr(torch, op)(x.abs() if op == "sqrt" else x)

        same(lambda h, x, w: gradients(h(before(h(before(x), w)), w), x, w))


class TestWishes:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_nan_and_infinity_go_where_they_go_without(self, same, bad):
        """memcnn#29: the loss becomes NaN out of finite numbers; here only where it does so without."""

        def run(h, x, w):
            x = torch.where(x > x.max() - 1e-6, bad, x)
            found = gradients(h(h((x, x.sin().nan_to_num()), (w, w)), (w, w)), w)[0]
            return torch.where(found.isfinite(), found, 0), found.isnan().to(x)

        def part(b, p):
            return (b * p).tanh()

        pair = additive_coupling(part, part)
        same(run, pair, invertible_checkpoint(pair, keep=True))

    @pytest.fixture
    def group(self):
        """A process group of this process alone."""
        if not dist.is_available() or dist.is_initialized():
            pytest.skip("needs a process group of its own")
        with alone():
            yield
