"""The table of axis rules against the probe, which knows no rules: it runs the operations."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from invfunc import batch_grad
from invfunc.core import rules
from invfunc.core.marks import SUMMED, Unsupported, tensors
from invfunc.core.probe import probe
from invfunc.core.tables import AXES, RULES
from invfunc.operations.axis import numbers
from invfunc.testing import assert_trees_close, loop_batch_grad
from tests.strategies import Numbers

Tensor, DRAWS = torch.Tensor, 12


class Drawn:
    """Tensors whose samples are in some dim, constants, and numbers, of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.n = self.random.choice([2, 3, 4])
        self.axis: dict[int, Any] = {}
        self.kept: list[Tensor] = []
        rank = self.random.randint(1, 4)
        self.dim = self.random.randint(-rank, -1)
        self.outer, self.inner = (self.random.choice([1, 1, 1, 2]) for _ in range(2))
        self.shape = [self.random.choice([2, 3, 4, self.n]) for _ in range(rank)]
        self.shape[self.dim] = self.outer * self.n * self.inner

    def data(self, *shape: int, dim: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor with samples in a dim: of the shape that is drawn, or of another one."""
        x = self.constant(*shape, dtype=dtype)
        axis = (self.dim, self.outer, self.inner) if dim is None else (dim, x.shape[dim] // self.n, 1)
        self.axis[id(x)] = axis
        return x

    def constant(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """A tensor without samples."""
        x = torch.rand(shape or self.shape, dtype=torch.float64)
        x = x > 0.5 if dtype is torch.bool else x.to(dtype) if dtype.is_floating_point else (2 * x).to(dtype)
        self.kept.append(x)
        return x

    def any(self, *shape: int) -> Tensor:
        """A tensor with or without samples, which are in any dim that divides by their number."""
        dims = [d for d in range(-len(shape), 0) if shape[d] % self.n == 0]
        if not dims or self.random.random() < 0.4:
            return self.constant(*shape)
        return self.data(*shape, dim=self.random.choice(dims))

    def number(self) -> int:
        """The number of a dim."""
        return self.random.randint(-len(self.shape), len(self.shape) - 1)

    def size(self) -> int:
        """The size of a dim, often that of the samples."""
        return self.random.choice([2, 3, self.n, self.n])

    def others(self) -> list[int]:
        """Numbers of one or more dims."""
        dims = random.Random(self.random.random()).sample(
            range(len(self.shape)), self.random.randint(1, len(self.shape))
        )
        return [d - len(self.shape) * self.random.randint(0, 1) for d in dims]

    def index(self) -> tuple:
        """Slices, numbers, None and an ellipsis."""
        found = [
            self.random.choice([slice(None), slice(None), slice(0, 1), slice(None, None, 2), 0, -1, None, slice(0, 99)])
            for _ in range(self.random.randint(1, len(self.shape)))
        ]
        if self.random.random() < 0.5:
            found.insert(self.random.randint(0, len(found)), Ellipsis)
        return tuple(found)

    def reshaped(self) -> list[int]:
        """Sizes of as many entries."""
        sizes = [f for size in self.shape for f in factors(size)]
        found = [1]
        for f in sizes if self.random.random() < 0.7 else random.Random(0).sample(sizes, len(sizes)):
            found = [*found, f] if self.random.random() < 0.5 else [*found[:-1], found[-1] * f]
        return found if self.random.random() < 0.3 or len(found) < 2 else found[1:] if found[0] == 1 else found


def factors(size: int) -> list[int]:
    """The primes of a size."""
    return next(([p, *factors(size // p)] for p in range(2, size + 1) if size % p == 0), [])


Calls = Iterator[tuple[tuple, dict[str, Any]]]


def of_pointwise(d: Drawn) -> Calls:
    x, y, c = d.data(), d.data(), d.constant()
    yield from (
        ((x,), {}),
        ((x, y), {}),
        ((x, c), {}),
        ((x, 0.5), {}),
        ((x, -0.5, 0.5), {}),
        ((x, 0.5, True), {}),
        ((x, 0.5, c), {}),
    )
    yield from (
        ((x, y, c), {}),
        ((c, x, y), {}),
        ((x, y, 0.5), {}),
        ((x, torch.float32), {}),
        ((x, d.any(*d.shape)), {}),
    )
    mask, number = d.data(dtype=torch.bool), d.data(dtype=torch.int64)
    yield from (((mask,), {}), ((mask, mask), {}), ((number, number), {}), ((mask, x, y), {}), ((x, mask, 0.5), {}))


def of_reductions(d: Drawn) -> Calls:
    x, dims, keep = d.data(), d.others(), d.random.random() < 0.5
    yield from (((x, dims, keep), {}), ((x, dims), {"keepdim": keep}), ((x, *dims), {}), ((x, dims[0], keep), {}))
    yield from (((x,), {"dim": dims[0]}), ((x,), {"dim": tuple(dims), "keepdim": keep}), ((x,), {}), ((x, keep), {}))
    yield from (((x, dims[0], keep, not keep), {}), ((x, dims, not keep, keep), {}), ((x, d.data()), {}))


def of_norm(d: Drawn) -> Calls:
    x, dims, keep = d.data(), d.others()[:2], d.random.random() < 0.5
    yield from (((x,), {}), ((x, 2, dims), {}), ((x, 2, dims[0], keep), {}), ((x,), {"dim": dims, "keepdim": keep}))


def of_dims(d: Drawn) -> Calls:
    x, size = d.data(), 1
    yield from (((x, d.number()), {}), ((x,), {"dim": d.number()}), ((x, size, d.number()), {}), ((x,), {}))
    yield from (((x, 2, d.number()), {}), ((x, size), {"dim": d.number()}), ((x, d.number(), 0), {}))
    yield from (((x, [1, max(0, x.shape[0] - 1)]), {}), ((x, d.number(), d.number()), {}), ((x, d.number(), 0, 2), {}))


def of_shapes(d: Drawn) -> Calls:
    x, sizes, first = d.data(), d.reshaped(), d.number() % len(d.shape)
    yield from (((x, sizes), {}), ((x, *sizes), {}), ((x, torch.rand(sizes)), {}), ((x, first), {}), ((x,), {}))
    yield from (((x, first, d.random.randint(first, len(d.shape) - 1)), {}), ((x, first, factors(d.shape[first])), {}))


def of_permutations(d: Drawn) -> Calls:
    order = random.Random(d.random.random()).sample(range(len(d.shape)), len(d.shape))
    order = [i - len(order) * d.random.randint(0, 1) for i in order]
    yield from (((d.data(), order), {}), ((d.data(), *order), {}))


def of_expansions(d: Drawn) -> Calls:
    d.shape = [1 if d.random.random() < 0.3 and i - len(d.shape) != d.dim else s for i, s in enumerate(d.shape)]
    sizes = [d.size(), *(d.size() if s == 1 else s for s in d.shape)][d.random.randint(0, 1) :]
    x = d.data()
    yield from (((x, sizes), {}), ((x, *sizes), {}), ((x, torch.rand(sizes)), {}))


def of_joins(d: Drawn) -> Calls:
    x, y, c = d.data(), d.data(), d.any(*d.shape)
    yield from ((([x, y], d.number()), {}), (([x, c],), {"dim": d.number()}), (((c, x, y),), {}), (([x],), {}))


def of_indices(d: Drawn) -> Calls:
    yield (d.data(), d.index()), {}
    yield (d.data(), d.index()[0]), {}


def of_products(d: Drawn) -> Calls:
    a, b, c = d.size(), d.size(), d.size()
    batch = [d.size() for _ in range(d.random.randint(0, 2))]
    for left, right in (
        ([*batch, a, b], [*batch, b, c]),
        ([*batch, a, b], [b, c]),
        ([a, b], [*batch, b, c]),
        ([*batch, a, b], [b]),
        ([b], [*batch, b, c]),
        ([b], [b]),
        ([2, a, b], [2, b, c]),
    ):
        yield (d.any(*left), d.any(*right)), {}
    yield (x := d.any(a, a), x), {}


def of_added_products(d: Drawn) -> Calls:
    a, b, c = d.size(), d.size(), d.size()
    yield (d.any(a, c), d.any(a, b), d.any(b, c)), {}
    yield (d.any(c), d.any(a, b), d.any(b, c)), {}
    yield (d.any(2, a, c), d.any(2, a, b), d.any(2, b, c)), {}
    yield (d.any(a), d.any(a, b), d.any(b)), {}
    yield (d.any(a, c), d.any(2, a, b), d.any(2, b, c)), {}


def of_linear(d: Drawn) -> Calls:
    shape, k, o = [d.size() for _ in range(d.random.randint(0, 3))], d.size(), d.size()
    yield (d.any(*shape, k), d.any(o, k), d.any(o)), {}
    yield (d.any(*shape, k), d.constant(o, k)), {}
    yield (d.any(*shape, k),), {"weight": d.constant(o, k), "bias": d.constant(o)}


def of_einsum(d: Drawn) -> Calls:
    for equation in (
        "ij,jk->ik",
        "ij,jk",
        "bij,bjk->bik",
        "...i,ij->...j",
        "ni,nj->n",
        "ni,nj,ij->n",
        "ij->ji",
        "ii->i",
    ):
        size, given = {}, []
        for letters in equation.partition("->")[0].split(","):
            shape = [size.setdefault(c, d.size()) for c in letters.replace("...", "xy")]
            given.append(d.any(*shape))
        yield (equation, *given), {}
        yield (equation, given), {}


def of_attention(d: Drawn) -> Calls:
    batch, t, s, e = [d.size() for _ in range(d.random.randint(0, 2))], d.size(), d.size(), d.size()
    yield (d.any(*batch, t, e), d.any(*batch, s, e), d.any(*batch, s, e)), {}


def of_tables(d: Drawn) -> Calls:
    x = d.data(dtype=torch.int64).clamp(0, 1)
    d.kept.append(x)
    d.axis[id(x)] = (d.dim, d.outer, d.inner)
    yield (x, d.any(2, d.size())), {}
    yield (x, d.constant(3, 2)), {}


def of_layer_norms(d: Drawn) -> Calls:
    x, count = d.data(), d.random.randint(1, len(d.shape))
    yield (x, d.shape[-count:]), {}
    yield (x, d.shape[-count:], d.constant(*d.shape[-count:])), {}


def of_layers(d: Drawn) -> Calls:
    """Of a batch, or of one image, of any number of dims."""
    n, c = (d.random.choice([2, 4, d.n]) for _ in range(2))
    for space in ([4], [4, 4], [4, 4, 4]):
        w = d.constant(d.size(), c, *[1] * len(space))
        x = d.any(n, c, *space) if d.random.random() < 0.7 else d.any(c, *space)
        yield from (((x, w), {}), ((x, w.transpose(0, 1).contiguous()), {}), ((x, 2), {}), ((x, 1), {}))
        yield from (((x, 2.0, 2), {}), ((x, None, 2.0), {}), ((x, None, None), {"training": d.random.random() < 0.5}))
        mean, var = d.constant(x.shape[1] if x.ndim > 1 else 1), d.constant(x.shape[1] if x.ndim > 1 else 1) + 1
        yield from (((x, mean, var), {}), ((x, mean, var, None, None, True), {}), ((x,), {}), ((x, mean), {}))


def of_losses(d: Drawn) -> Calls:
    x, y = d.data(), d.data()
    for reduction in ("none", "mean", "sum", 0, 1, 2):
        yield (x, y), {"reduction": reduction}
        yield (x, d.any(*d.shape)), {"reduction": reduction}
        yield (x, y, y), {"reduction": reduction}


def of_class_losses(d: Drawn) -> Calls:
    shape = [d.size(), 3, *[d.size() for _ in range(d.random.randint(0, 2))]]
    target = [shape[0], *shape[2:]]
    for reduction in ("none", "mean", "sum", 0, 1, 2):
        x = d.any(*shape)
        y = torch.randint(3, target)
        d.kept.append(y)
        if d.axis.get(id(x), (0,))[0] == -len(shape):
            d.axis[id(y)] = (-len(target), *d.axis[id(x)][1:])
        yield (x, y), {"reduction": reduction}
        yield (x, d.any(*shape)), {"reduction": reduction}
    yield (d.any(3), torch.tensor(1)), {}


def of_row_losses(d: Drawn) -> Calls:
    x, y = (d.data(d.n, 3, dim=-2) for _ in range(2))
    signs, labels = torch.tensor([1, -1, 1, -1])[: d.n], torch.tensor([[0, -1, -1]] * d.n)
    d.kept += [signs, labels]
    for reduction in ("none", "mean", "sum", 0, 1, 2):
        yield (x, y, signs), {"reduction": reduction}
        yield (x, labels), {"reduction": reduction}
        yield (x, labels[:, 0]), {"reduction": reduction}


CALLS: dict[Any, Callable[[Drawn], Calls]] = {
    rules.same: of_pointwise,
    rules.reshaped: of_shapes,
    rules.permuted: of_permutations,
    rules.swapped: of_dims,
    rules.reversed_: of_dims,
    rules.expanded: of_expansions,
    rules.joined: of_joins,
    rules.stacked: of_joins,
    rules.parts: of_dims,
    rules.dropped: of_dims,
    rules.indexed: of_indices,
    rules.matmul: of_products,
    rules.addmm: of_added_products,
    rules.linear: of_linear,
    rules.einsum: of_einsum,
    rules.attention: of_attention,
    rules.embedding: of_tables,
    rules.layer_norm: of_layer_norms,
    rules.batch_norm: of_layers,
    rules.instance_norm: of_layers,
    rules.convolution: of_layers,
    rules.first: of_layers,
    rules.pointwise_loss: of_losses,
    rules.class_loss: of_class_losses,
    rules.row_loss: of_row_losses,
}
RULES_MADE = {
    "spatial.<locals>.rule": of_layers,
    "reduction.<locals>.rule": of_reductions,
    "along.<locals>.rule": of_dims,
}


def calls_of(rule: Callable) -> Callable[[Drawn], Calls]:
    """The calls of the operations of a rule."""
    return CALLS.get(rule) or RULES_MADE[rule.__qualname__]


def judged(d: Drawn, func: Any, rule: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    """Compare a rule with the probe at one call: "axis", "sum" or "none" says what the rule gave."""
    data = [(x, d.axis[id(x)]) for x in given(args, kwargs) if id(x) in d.axis]
    if not data:
        return "none"
    with torch.no_grad():
        args, kwargs = copied(d, args), {k: copied(d, x) for k, x in kwargs.items()}
        data = [(x, d.axis[id(x)]) for x in given(args, kwargs) if id(x) in d.axis]
        before = copied(d, args)
        try:
            out = func(*args, **kwargs)
        except (TypeError, RuntimeError, ValueError, IndexError, NotImplementedError, AttributeError, AssertionError):
            return "none"  # no call of this operation
        try:
            found = rule(d.n, data, args, kwargs, out)
        except Exception:
            return "none"
        data = [(x, d.axis[id(x)]) for x in given(before, kwargs) if id(x) in d.axis]
        shown = [tuple(a.shape) if isinstance(a, Tensor) else a for a in (*args, kwargs)]
        said = f"N = {d.n}: {name_of(func)}{shown} of {[axis for _, axis in data]} is {found}"
        if found is None:
            return "none"
        if found is SUMMED:
            assert separable(d, func, before, kwargs, data), said
            return "sum"
        if any(y.numel() == 0 for y in tensors(out)):
            return "none"
        try:
            seen = probe(d.n, func, before, kwargs, data)
        except Unsupported as error:
            raise AssertionError(f"{said}, but: {error}") from error
        for y, axis in zip(tensors(out), seen, strict=True):
            assert y.ndim >= -found[0] and y.shape[found[0]] == d.n * found[1] * found[2], said
            assert axis in (None, found) or confined(d, func, before, kwargs, data, found), f"{said}, but {axis}"
    return "axis"


def given(args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call."""
    return [x for a in (*args, *kwargs.values()) for x in tensors(a)]


def copied(d: Drawn, x: Any) -> Any:
    """Copies of tensors with their axes, as an operation may write."""
    if isinstance(x, Tensor):
        y = x.clone()
        d.kept.append(y)
        if id(x) in d.axis:
            d.axis[id(y)] = d.axis[id(x)]
        return y
    return type(x)(copied(d, y) for y in x) if type(x) in (list, tuple) else x


def mixed(d: Drawn, args: tuple, data: list) -> Callable[[Tensor], tuple]:
    """`of(chosen)`: the arguments, with other numbers in the samples that are chosen."""
    redrawn = {id(x): torch.rand_like(x) if x.is_floating_point() else x.flip(0) for x, _ in data}

    def of(chosen: Tensor, x: Any = args) -> Any:
        if isinstance(x, Tensor) and id(x) in d.axis:
            return torch.where(chosen[numbers(x.shape, d.axis[id(x)], d.n, x.device)], redrawn[id(x)], x)
        return type(x)(of(chosen, y) for y in x) if type(x) in (list, tuple) else copied(d, x)

    return of


def separable(d: Drawn, func: Any, args: tuple, kwargs: dict[str, Any], data: list) -> bool:
    """True if the result is a sum of terms of one sample each: redrawing half of the samples splits it in two."""
    of, half = mixed(d, args, data), torch.arange(d.n) % 2 == 0
    one, other, none, all_ = (func(*of(m), **kwargs) for m in (half, ~half, half & ~half, half | ~half))
    return torch.allclose(one + other, none + all_)


def confined(d: Drawn, func: Any, args: tuple, kwargs: dict[str, Any], data: list, axis: Any) -> bool:
    """True if other numbers in a sample change its own entries alone; where few do, the probe may see another dim."""
    of, number = mixed(d, args, data), torch.arange(d.n)
    for i in range(d.n):
        for x, y in zip(
            tensors(func(*of(number < 0), **kwargs)), tensors(func(*of(number == i), **kwargs)), strict=True
        ):
            if bool(((x != y) & (x == x) & (numbers(x.shape, axis, d.n, x.device) != i)).any()):
                return False
    return True


UNCALLED: dict[str, str] = {
    "states_before": "an operation of ours, before all steps of a recurrent layer, as the next one",
    "states_after": "an operation of ours, of all steps of a recurrent layer, whose law is in tests/operations",
    **dict.fromkeys(
        ["_VariableFunctionsClass." + x for x in ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")],
        "draws by rejection, so that what is drawn later hangs on what was drawn before; tests/core/test_once_wrong.py",
    ),
    "_VariableFunctionsClass.empty_like": "its numbers are those that lie there",
    **dict.fromkeys([f"TensorBase.__{name}__" for name in ("bool", "float", "int", "long")], "they return numbers"),
    "TensorBase.cuda": "there may be no such device",
    "_VariableFunctionsClass.poisson_nll_loss": "it has no default for its options; the function of nn.functional has",
}
"""Operations of the table that no call is tried of, and why."""
REFUSED = {rules.reshaped_in_place}
"""Rules that never give an axis."""


def came_of(line: int) -> dict[str, set[str]]:
    """Results of the rules of a line, for each of its operations."""
    funcs, rule = AXES[line]
    found: dict[str, set[str]] = {}
    for func in funcs:
        if RULES[func] is not rule:
            continue  # an earlier line has it
        came = found.setdefault(name_of(func), set())
        if name_of(func) in UNCALLED:
            continue
        for seed in range(30 if rule is rules.convolution else DRAWS):
            torch.manual_seed(seed)
            d = Drawn(seed)
            for args, kwargs in calls_of(rule)(d):
                came.add(judged(d, func, rule, args, kwargs))
            if rule is rules.same and "axis" in came:
                break
    return found


def name_of(func: Any) -> str:
    """`Tensor.add_`, `linear`; of attributes, what reads them."""
    if (owner := getattr(func, "__self__", None)) is not None and not isinstance(owner, type):
        return f"{getattr(owner, '__name__', owner)}.{func.__name__}"
    return getattr(func, "__qualname__", None) or func.__name__


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("line", range(len(AXES)), ids=lambda i: min(map(name_of, AXES[i][0])))
def test_rules_give_what_the_probe_sees(line, monkeypatch):
    monkeypatch.setattr("invfunc.core.probe.ROUNDS", 1)
    if AXES[line][1] in REFUSED:
        return
    idle = {name for name, came in came_of(line).items() if not came & {"axis", "sum"}}
    assert idle <= UNCALLED.keys(), "calls of which the result has an axis are wanted"


@pytest.mark.parametrize("i", [[0, 0, 0], [4, 4, 4], [1, 0, 3]], ids=str)
def test_indices_behind_a_slice_are_followed_also_where_they_are_the_same(i):
    w, c, i = Numbers()(2, 5, 5), Numbers(1)(2, 5), torch.tensor(i)
    for f in (lambda w, i: w[:, i, i].T.tanh().sum(1), lambda w, i: (c[:, i] * w[:, :1, 0]).square().sum(0)):
        assert_trees_close(batch_grad(lambda w, i, f=f: f(w, i).mean())(w, i), loop_batch_grad(f)(w, i) / 3, 1e-12)
