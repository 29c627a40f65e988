"""Networks that can run backwards, each as a plain function and as its checkpointed twin with options of checkpoints
(`laws.check_pair` takes a pair)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import chain, invertible_checkpoint, layers, repeated, tree, with_log_det
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.strategies import Numbers


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w.exp() + w.tanh()


def f_inv(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (y - w.tanh()) * (-w).exp()


g = invertible_checkpoint(f, f_inv)


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """x and w, new ones each time."""
    return Numbers()(2, 3).requires_grad_(), Numbers(1)(3).requires_grad_()


def assert_same(
    dtype: torch.dtype, device: torch.device, run: Callable, *functions: Callable, rtol: float | None = None
) -> None:
    """`run(h, x, w)` is the same for all functions h, with the first of them as the oracle; x and w are new leaves.

    Without functions it is the same for f, for g, and for a plain checkpoint.
    """
    x, w = moved((Numbers()(2, 3), Numbers(1)(3)), dtype, device)

    def result(h: Callable) -> Any:
        torch.manual_seed(0)
        return run(h, x.clone().requires_grad_(), w.clone().requires_grad_())

    plain, *others = functions or (f, g, invertible_checkpoint(f, None))
    wanted = result(plain)
    for h in others:
        assert_trees_close(result(h), wanted, RTOL[dtype] if rtol is None else rtol)


def squares(y: Any) -> torch.Tensor:
    """A loss of all outputs."""
    return sum(t.square().sum() for t in (y if isinstance(y, (tuple, list)) else (y,)))


def gradients(y: Any, *of: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the loss."""
    return torch.autograd.grad(squares(y), of, **options)


RTOL = {torch.float64: 1e-9, torch.float32: 1e-3}
FLOOR = 1e-2
"""Absolute tolerance for a leaf that is zero by structure, where rounding errors remain."""
ACTIVATIONS = {"tanh": torch.tanh, "gelu": F.gelu, "sin": torch.sin, "silu": F.silu}
"""Autograd saves the output of some and the input of others."""


@dataclass(frozen=True, repr=False)
class Twins:
    """Two functions `(x, params) -> y` of equal value, g with checkpoints, and arguments; x has N samples in front."""

    called: str
    f: Callable
    g: Callable
    x: Any
    params: Any

    def __repr__(self) -> str:
        return self.called

    def to(self, dtype: torch.dtype, device: torch.device) -> Twins:
        return replace(self, x=moved(self.x, dtype, device), params=moved(self.params, dtype, device))


@dataclass(frozen=True, repr=False)
class Sizes:
    """N samples, the widths of the two parts of a state, the number of blocks, and what is between linear maps."""

    n: int = 3
    left: int = 2
    right: int = 2
    depth: int = 3
    act: str = "tanh"
    seed: int = 0

    def __repr__(self) -> str:
        return f"N = {self.n}, {self.left} + {self.right}, {self.depth} blocks, {self.act}"

    @property
    def halves(self) -> tuple[int, int]:
        """Of one tensor that is split: the first half is the larger one."""
        both = self.left + self.right
        return both - both // 2, both // 2


@st.composite
def sizes(draw, low: int = 3, depths: Sequence[int] = (3, 2, 4, 1)) -> Sizes:
    """Few samples and blocks; parts of different widths, and of one number."""
    left, right = draw(st.sampled_from([(2, 3), (1, 2), (2, 2), (3, 1)]))
    act = draw(st.sampled_from(list(ACTIVATIONS)))
    return Sizes(
        draw(st.integers(low, low + 2)), left, right, draw(st.sampled_from(depths)), act, draw(st.integers(0, 3))
    )


# What the blocks are made of


def branch(act: str) -> Callable:
    """`F(b, p)`, a layer of a perceptron."""

    def layer(b: torch.Tensor, p: Any) -> torch.Tensor:
        return ACTIVATIONS[act](b @ p["w"] + p["b"]) * p["s"]

    return layer


def branch_params(rand: Numbers, inner: int, outer: int) -> dict[str, torch.Tensor]:
    return {"w": rand(inner, outer) / inner**0.5, "b": rand(outer) / 2, "s": 1 + rand(outer) / 4}


def branches(act: str) -> Callable:
    """`(s, t)` of an affine coupling."""
    layer = branch(act)
    return lambda b, p: (layer(b, p[0]), layer(b, p[1]))


def squash(x: torch.Tensor, p: Any) -> torch.Tensor:
    """One tensor, number by number, with an inverse in closed form."""
    return (x * p["s"].exp() + p["c"]).asinh()


def unsquash(y: torch.Tensor, p: Any) -> torch.Tensor:
    return (y.sinh() - p["c"]) * (-p["s"]).exp()


def squash_params(rand: Numbers, width: int) -> dict[str, torch.Tensor]:
    return {"s": rand(width) / 4, "c": rand(width) / 2}


def stacked(step: Callable) -> Callable:
    """One call after the other."""

    def net(x: Any, params: Any) -> Any:
        for p in params:
            x = step(x, p)
        return x

    return net


def one_after_another(steps: Sequence[Callable]) -> Callable:
    def net(x: Any, params: Any) -> Any:
        for step, p in zip(steps, params, strict=True):
            x = step(x, p)
        return x

    return net


# Each builder gets numbers and sizes, and gives (f, g, x, params)


def _pair_state(rand: Numbers, s: Sizes) -> tuple:
    return rand(s.n, s.left), rand(s.n, s.right)


def _coupling_params(rand: Numbers, left: int, right: int, count: int) -> list:
    return [(branch_params(rand, right, left), branch_params(rand, left, right)) for _ in range(count)]


def _additive(rand: Numbers, s: Sizes, **options: Any) -> tuple:
    pair = invfunc.additive_coupling(branch(s.act), branch(s.act))
    params = _coupling_params(rand, s.left, s.right, s.depth)
    return stacked(pair), stacked(invertible_checkpoint(pair, **options)), _pair_state(rand, s), params


def _split(rand: Numbers, s: Sizes) -> tuple:
    pair = invfunc.additive_coupling(branch(s.act), branch(s.act), split_dim=-1)
    params = _coupling_params(rand, *s.halves, s.depth)
    return stacked(pair), stacked(invertible_checkpoint(pair)), rand(s.n, sum(s.halves)), params


def _affine(rand: Numbers, s: Sizes) -> tuple:
    pair = invfunc.affine_coupling(branches(s.act), branches(s.act))
    firsts, seconds = (_coupling_params(rand, s.left, s.right, s.depth) for _ in range(2))
    params = [tuple(zip(one, two, strict=True)) for one, two in zip(firsts, seconds, strict=True)]
    return stacked(pair), stacked(invertible_checkpoint(pair)), _pair_state(rand, s), params


def _of_one_branch(rand: Numbers, s: Sizes, make: Callable) -> tuple:
    """A state of two tensors of one width, in front of the logarithm of the volume."""
    pair = with_log_det(make(branch(s.act)))
    params = [branch_params(rand, s.left, s.left) for _ in range(s.depth)]
    x = (rand(s.n, s.left), rand(s.n, s.left)), rand(s.n)
    return stacked(pair), stacked(invertible_checkpoint(pair)), x, params


def _solved(rand: Numbers, s: Sizes) -> tuple:
    """Steps of a solver along times, with parameters of each, in one argument that is stacked."""
    layer = branch(s.act)
    pair = invfunc.pairs.reversible_step(invfunc.pairs.runge_kutta(lambda x, t, p: layer(x, p) * t, "midpoint"), 0.9)
    params = [branch_params(rand, s.left, s.left) for _ in range(s.depth)]
    times = torch.linspace(0, 1, s.depth + 1, dtype=torch.float64)
    stack = (times[:-1], times[1:], tree.map_leaves(lambda *each: torch.stack(each), *params))
    return _unstacking(stacked(pair)), repeated(pair), (rand(s.n, s.left), rand(s.n, s.left)), stack


def _functions(rand: Numbers, s: Sizes, **options: Any) -> tuple:
    layer = branch(s.act)

    def f(x: dict, p: Any) -> dict:
        return {"a": x["b"] * p["e"].exp(), "b": x["a"] + layer(x["b"], p)}

    def f_inv(y: dict, p: Any) -> dict:
        b = y["a"] * (-p["e"]).exp()
        return {"a": y["b"] - layer(b, p), "b": b}

    params = [{**branch_params(rand, s.left, s.left), "e": rand(s.left) / 4} for _ in range(s.depth)]
    x = {"a": rand(s.n, s.left), "b": rand(s.n, s.left)}
    return stacked(f), stacked(invertible_checkpoint(f, f_inv, **options)), x, params


def _one_tensor(rand: Numbers, s: Sizes, **options: Any) -> tuple:
    params = [squash_params(rand, s.left) for _ in range(s.depth)]
    return stacked(squash), stacked(invertible_checkpoint(squash, unsquash, **options)), rand(s.n, s.left), params


def _no_inverse(rand: Numbers, s: Sizes) -> tuple:
    widths = [s.left, *([s.right, s.left] * s.depth)]
    params = [branch_params(rand, i, o) for i, o in zip(widths[: s.depth], widths[1:], strict=False)]
    f = branch(s.act)
    return stacked(f), stacked(invertible_checkpoint(f, None)), rand(s.n, s.left), params


def _normed(rand: Numbers, s: Sizes) -> tuple:
    norm = layers.batch_norm()
    steps = [norm, squash] * s.depth
    g = [invertible_checkpoint(norm), invertible_checkpoint(squash, unsquash)] * s.depth
    each = ((1 + rand(s.left) / 4, rand(s.left)), squash_params(rand, s.left))
    params = [tree.map_tensors(lambda t: t + rand(*t.shape) / 8, p) for p in each * s.depth]
    return one_after_another(steps), one_after_another(g), rand(s.n, s.left), params


def _chain(rand: Numbers, s: Sizes, anchor_every: int | None = None) -> tuple:
    """Pairs, a block without an inverse, one that hides something, and a chain within."""
    add, layer, norm = invfunc.additive_coupling(branch(s.act), branch(s.act)), branch(s.act), layers.batch_norm()

    def lossy(x: Any, p: Any) -> Any:
        return layer(x[0], p), x[1]

    def swap(x: Any) -> Any:
        return x[1], x[0]

    def normed(x: Any, p: Any) -> Any:
        return norm(x[0], p), x[1]

    def forward(x: Any, p: Any) -> Any:
        y, hidden = norm.forward(x[0], p)
        return (y, x[1]), hidden

    def inverse(y: Any, hidden: Any, p: Any) -> Any:
        return norm.inverse(y[0], hidden, p), y[1]

    hiding = replace(norm, forward=forward, inverse=inverse, log_det=None)
    swapped = replace(norm, forward=swap, inverse=swap, hidden=False, log_det=None)
    inner = chain(add, add)
    g = invertible_checkpoint(chain(add, hiding, inner, lossy, swapped, swapped, add, anchor_every=anchor_every))

    def without(x: Any, p: None) -> Any:
        return swap(x)

    f = one_after_another([add, normed, stacked(add), lossy, without, without, add])

    def completed(whole: Callable) -> Callable:
        """torch.func takes no None among the parameters."""
        return lambda x, params: whole(x, [*params[:4], None, None, *params[4:]])

    coupling = partial(_coupling_params, rand, s.left, s.right)
    norms, lossy_params = (1 + rand(s.left) / 4, rand(s.left)), branch_params(rand, s.left, s.left)
    params = [*coupling(1), norms, coupling(2), lossy_params, *coupling(1)]
    return completed(f), completed(g), _pair_state(rand, s), params


def _repeated(rand: Numbers, s: Sizes, stack: bool, **options: Any) -> tuple:
    pair = invfunc.additive_coupling(branch(s.act), branch(s.act))
    params: Any = _coupling_params(rand, s.left, s.right, s.depth)
    f, g = stacked(pair), repeated(pair, **options)
    if stack:
        params = tree.map_leaves(lambda *each: torch.stack(each), *params)
        f = _unstacking(f)
    return f, g, _pair_state(rand, s), params


def _unstacking(f: Callable) -> Callable:
    def net(x: Any, params: Any) -> Any:
        leaves, structure = tree.flatten(params)
        return f(x, [tree.unflatten(each, structure) for each in zip(*(t.unbind(0) for t in leaves), strict=True)])

    return net


def _nested(rand: Numbers, s: Sizes) -> tuple:
    """A block whose function and inverse call other blocks."""

    def made(inner: Callable, back: Callable) -> tuple[Callable, Callable]:
        def f(x: torch.Tensor, p: Any) -> torch.Tensor:
            return squash(inner(inner(x, p[0]), p[1]), p[0])

        def f_inv(y: torch.Tensor, p: Any) -> torch.Tensor:
            return back(back(unsquash(y, p[0]), p[1]), p[0])

        return f, f_inv

    f, _ = made(squash, unsquash)
    inner = invertible_checkpoint(squash, unsquash), invertible_checkpoint(unsquash, squash)
    g = invertible_checkpoint(*made(*inner))
    params = [(squash_params(rand, s.left), squash_params(rand, s.left)) for _ in range(s.depth)]
    return stacked(f), stacked(g), rand(s.n, s.left), params


def _with_torch(rand: Numbers, s: Sizes) -> tuple:
    """torch's checkpoint in the branches; not inside of torch.func, which refuses it."""
    layer = branch(s.act)

    def inner(b: torch.Tensor, p: Any) -> torch.Tensor:
        return checkpoint(layer, b, p, use_reentrant=False)

    params = _coupling_params(rand, s.left, s.right, s.depth)
    g = invertible_checkpoint(invfunc.additive_coupling(inner, inner))
    return stacked(invfunc.additive_coupling(layer, layer)), stacked(g), _pair_state(rand, s), params


FORMS: dict[str, Callable[[Numbers, Sizes], tuple]] = {
    "additive": _additive,
    "additive on one tensor": _split,
    "affine": _affine,
    "momentum": partial(_of_one_branch, make=partial(invfunc.pairs.momentum, gamma=0.7)),
    "leapfrog": partial(_of_one_branch, make=partial(invfunc.pairs.leapfrog, step=0.6)),
    "fixed_point": partial(_of_one_branch, make=partial(invfunc.pairs.fixed_point, beta=0.4)),
    "reversible_step": _solved,
    "functions of a dict": _functions,
    "functions of a tensor": _one_tensor,
    "no inverse": _no_inverse,
    "hidden": _normed,
    "chain": _chain,
    "chain, anchored": partial(_chain, anchor_every=2),
    "repeated": partial(_repeated, stack=False),
    "repeated, stacked": partial(_repeated, stack=True),
    "repeated, stacked, anchored": partial(_repeated, stack=True, anchor_every=2),
    "keep=True": partial(_additive, keep=True),
    "keep=(1,)": partial(_functions, keep=(1,)),
    "check=True": partial(_one_tensor, check=True, preserve_rng_state=False),
    "nested": _nested,
}
PLAIN_ONLY: dict[str, Callable[[Numbers, Sizes], tuple]] = {"torch's checkpoint inside": _with_torch}


def twins(called: str, s: Sizes) -> Twins:
    build = (FORMS | PLAIN_ONLY)[called]
    return Twins(f"{called}: {s}", *build(Numbers(s.seed), s))
