"""A function fills the lists and dicts that the caller has given to its block, as it does without the block."""

from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import torch
from torch.func import grad
from torch.utils._pytree import tree_leaves, tree_map

from invfunc import InvFuncWarning, additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

W = Numbers()(4, 4)
X = Numbers(1)(3, 4)


@dataclass
class Cache:
    size: torch.Tensor
    seen: list = field(default_factory=list)
    last: object = None


def in_a_list(seen, z):
    seen.append(z)


def in_a_list_within(given, z):
    given["layers"][0].append(z)
    given["count"] = given.get("count", 0) + 1


def in_place_of_one(given, z):
    given[0] = z


def by_key(given, z):
    given["loss"] = given.get("loss", 0) + z


def in_a_dataclass(cache, z):
    cache.seen.append(z)
    cache.last = z


def removed(given, z):
    given.pop()
    given.append(z)


KINDS = {
    "list": (list, in_a_list),
    "deque": (deque, in_a_list),
    "within": (lambda: {"layers": ([],)}, in_a_list_within),
    "in place of another": (lambda: [torch.ones(())], in_place_of_one),
    "dict": (dict, by_key),
    "dict with tensors": (lambda: {"scale": torch.ones(())}, by_key),
    "ordered dict": (OrderedDict, by_key),
    "default dict": (lambda: defaultdict(int), by_key),
    "mapping": (lambda: UserDict(scale=torch.ones(())), by_key),
    "empty mapping": (UserDict, by_key),
    "dataclass": (lambda: Cache(torch.ones(())), in_a_dataclass),
    "removed": (lambda: [1, torch.ones(())], removed),
}


def beside(w, given, fill):
    """f of a plain checkpoint."""

    def f(x, w, given):
        z = torch.tanh(x @ w)
        fill(given, z.square().mean())
        return x * z

    return lambda wrap: lambda x: (invertible_checkpoint(f, None) if wrap else f)(x, w, given)


def within_a_part(w, given, fill):
    """A part of a coupling."""

    def part(b, given):
        z = torch.tanh(b @ w)
        fill(given, z.square().mean())
        return z

    pair = additive_coupling(part, lambda a, given: a.sin(), split_dim=0)
    return lambda wrap: lambda x: (invertible_checkpoint(pair) if wrap else pair)(x, (given, None))


def by_keyword(w, given, fill):
    def f(x, *, given):
        z = torch.tanh(x @ w)
        fill(given, z.square().mean())
        return x + 1

    def f_inv(y, *, given):
        return y - 1

    return lambda wrap: lambda x: (invertible_checkpoint(f, f_inv) if wrap else f)(x, given=given)


WAYS = {"plain": beside, "coupling": within_a_part, "keyword": by_keyword}


def seen(given):
    """What is in a container by now, as plain lists and dicts."""
    if isinstance(given, Cache):
        return [seen(given.seen), seen(given.last)]
    if isinstance(given, (list, tuple, deque)):
        return [seen(value) for value in given]
    return {key: seen(given[key]) for key in given} if hasattr(given, "keys") else given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_filled_has_its_gradients(kind, way):
    make, fill = KINDS[kind]
    found = []
    for wrap in (False, True):
        w, given = W.clone().requires_grad_(), make()
        step = WAYS[way](w, given, fill)(wrap)
        x = X.clone().requires_grad_()
        y = step(step(torch.cat([x, x]) * 1))
        tensors = _tensors(given)
        loss = y.sin().sum() + sum((k + 1) * t.sum() for k, t in enumerate(tensors))
        found.append((seen(given), torch.autograd.grad(loss, (w, x))))
        assert [id(t) for t in tensors] == [id(t) for t in _tensors(given)]  # also after the backward pass
    assert_trees_close(*(g for _, g in found), 1e-9)
    assert_trees_close(*(tree_map(_detached, s) for s, _ in found), 1e-9)
    assert len(tree_leaves(found[0][0])) > 0


def _tensors(given):
    return [t for t in tree_leaves(seen(given)) if isinstance(t, torch.Tensor)]


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(float(value))


def test_inside_of_torch_func_what_is_filled_is_a_constant_and_told_of():
    given = []

    def loss(x):
        def f(x, given):
            given.append(x.square().sum())
            return x * 2

        y = invertible_checkpoint(f, lambda y, given: y / 2)(x, given)
        return y.sum() + given[-1]

    with pytest.warns(InvFuncWarning, match="return it with y"):
        slope = grad(loss)(X)
    assert len(given) == 1
    assert_trees_close(slope, torch.full_like(X, 2.0), 1e-9)


def test_what_is_not_filled_stays_the_same_object():
    inner = [torch.ones(2)]
    given = {"a": inner, "b": 1}
    x = X.clone().requires_grad_()
    invertible_checkpoint(lambda x, given: x * given["b"], None)(x, given).sum().backward()
    assert given["a"] is inner
    assert list(given) == ["a", "b"]
