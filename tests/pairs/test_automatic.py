"""Inverses that are found in what a function does: the same as those written by hand, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.overrides import TorchFunctionMode

from invfunc import (
    additive_coupling,
    affine_coupling,
    chain,
    check_inverse,
    drift,
    grad_and_variance,
    invert,
    invertible_checkpoint,
    tree,
)
from invfunc.errors import InverseError, ReplayError
from invfunc.recomputation.like import Like
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

EXACT = 1e-9


# Drawn structures

SCALES: dict[str, Callable] = {
    "exp": lambda s: s.exp(),
    "sigmoid": lambda s: torch.sigmoid(s + 2),
    "softplus": lambda s: F.softplus(s) + 0.5,
    "2 exp": lambda s: 2 * torch.exp(-s).chunk(1)[0],
}
UPDATES: dict[str, Callable] = {
    "x + F": lambda x, t, s: x + t,
    "F + x": lambda x, t, s: t + x,
    "x - F": lambda x, t, s: x - t,
    "F - x": lambda x, t, s: t - x,
    "alpha": lambda x, t, s: torch.add(x, t, alpha=0.5),
    "in place": lambda x, t, s: t.clone().add_(x),
    "-x": lambda x, t, s: -x * 2 + t,
    "addcmul": lambda x, t, s: torch.addcmul(x, t, t, value=0.5),
    **{f"x {name} + F": lambda x, t, s, of=of: x * of(s) + t for name, of in SCALES.items()},
    "(x + F) exp": lambda x, t, s: torch.mul(s.exp(), x + t),
    "(x - F) / sigmoid": lambda x, t, s: (x - t) / torch.sigmoid(s),
}


def with_parts(f: Callable, parts: Callable, joined: Callable) -> Callable:
    return lambda x, *args: joined(f(list(parts(x)), *args))


SPLITS: dict[str, Callable] = {
    "tuple": lambda f, p, dim: lambda x, *args: tuple(f(list(x), *args)),
    "dict": lambda f, p, dim: lambda x, *args: dict(zip(x, f(list(x.values()), *args), strict=True)),
    "chunk": lambda f, p, dim: with_parts(f, lambda x: x.chunk(p, dim), lambda y: torch.cat(y, dim)),
    "split": lambda f, p, dim: with_parts(
        f, lambda x: torch.split(x, x.shape[dim] // p, dim), lambda y: torch.cat(y, dim)
    ),
    "tensor_split": lambda f, p, dim: with_parts(
        f, lambda x: x.tensor_split(p, dim), lambda y: torch.concat(y, dim=dim)
    ),
    "narrow": lambda f, p, dim: with_parts(
        f, lambda x: [x.narrow(dim, i * 2, 2) for i in range(p)], lambda y: torch.cat(tensors=y, dim=dim)
    ),
    "slices": lambda f, p, dim: with_parts(
        f,
        lambda x: [x.movedim(dim, -1)[..., 2 * i : 2 * i + 2] for i in range(p)],
        lambda y: torch.cat(y[::-1], -1).movedim(-1, dim),
    ),
    "steps": lambda f, p, dim: with_parts(
        f,
        lambda x: [x.movedim(dim, 0)[i::p] for i in range(p)],
        lambda y: torch.stack(y, 1).flatten(0, 1).movedim(0, dim),
    ),
    "unbind": lambda f, p, dim: with_parts(
        f, lambda x: x.unflatten(dim, (p, -1)).unbind(dim), lambda y: torch.stack(y, dim).flatten(dim, dim + 1)
    ),
}


@dataclass
class Drawn:
    """Parts that are updated one after another, each by what some others say."""

    updates: list[tuple[int, tuple[int, ...], str]]
    drop: bool

    def __call__(self, parts: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        for (to, of, how), w in zip(self.updates, weights, strict=True):
            read = torch.stack([parts[i] * (i + 1) for i in of]).sum(0)
            h = F.relu(read * w, inplace=True).sin() + read.cos() * w
            h = F.dropout(h, 0.3) if self.drop else h
            parts[to] = UPDATES[how](parts[to], h, (h * 0.5).tanh())
        return parts


@st.composite
def drawn(draw: Any) -> tuple[Callable, Any, list[torch.Tensor]]:
    rand, number = Numbers(), draw(st.integers(2, 4))
    updates = []
    for _ in range(draw(st.integers(1, 5))):
        to = draw(st.integers(0, number - 1))
        of = draw(st.sets(st.sampled_from([i for i in range(number) if i != to]), min_size=1))
        updates.append((to, tuple(sorted(of)), draw(st.sampled_from(sorted(UPDATES)))))
    split, dim = draw(st.sampled_from(sorted(SPLITS))), draw(st.integers(0, 2))
    shape = [3, 3, 3]
    shape[dim] = 2
    whole = list(shape)
    whole[dim] = 2 * number
    f = SPLITS[split](Drawn(updates, draw(st.booleans())), number, dim)
    x: Any = tuple(rand(*shape) for _ in range(number))
    if split == "dict":
        x = {f"p{i}": part for i, part in enumerate(x)}
    elif split != "tuple":
        x = rand(*whole)
    return f, x, [rand(1) for _ in updates]


def total(y: Any) -> torch.Tensor:
    return torch.stack([(t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y)]).sum()


def slopes(f: Callable, x: Any, *args: Any, depth: int = 2) -> Any:
    """Value and gradients through some blocks, from the same random numbers."""
    torch.manual_seed(0)
    x, args = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, args))
    y = tree.map_tensors(torch.clone, x)  # which nobody holds
    for _ in range(depth):
        y = f(y, *args)
    loss = total(y)
    own = [p for p in f.parameters() if p.requires_grad] if isinstance(f, nn.Module) else []
    return loss.detach(), torch.autograd.grad(loss, [*tree.tensors((x, args)), *own])


class TestStructures:
    @settings(max_examples=60)
    @given(case=drawn())
    def test_have_the_gradients_of_f_and_the_inverse_gives_x_back(self, case):
        f, x, w = case
        g = invertible_checkpoint(f, check="error")
        assert_trees_close(slopes(g, x, w), slopes(f, x, w), rtol=1e-7)
        assert check_inverse(g, x, w, tolerance=1e-8)

    @settings(max_examples=20)
    @given(case=drawn(), way=st.sampled_from(["grad", "vmap", "vmap of weights", "jacrev"]))
    def test_within_torch_func(self, case, way):
        f, x, w = case

        def slope(f):
            of = grad(lambda x, w: total(f(f(x, w), w)), argnums=(0, 1))
            torch.manual_seed(0)
            if way == "vmap":
                many = tree.map_tensors(lambda t: torch.stack([t, t + 1]), x)
                return vmap(of, (0, None), randomness="different")(many, w)
            if way == "vmap of weights":
                return vmap(of, (None, 0), randomness="same")(x, [torch.stack([t, t + 1]) for t in w])
            return jacrev(lambda w: total(f(x, w)))(w) if way == "jacrev" else of(x, w)

        assert_trees_close(slope(invertible_checkpoint(f)), slope(f), rtol=1e-7)

    @settings(max_examples=20)
    @given(case=drawn())
    def test_the_inverse_alone_is_differentiable(self, case):
        """It takes x to lie in memory as y does, by which dropout draws."""
        f, x, w = case
        assume([t.stride() for t in tree.tensors(f(x, w))] == [t.stride() for t in tree.tensors(x)])
        back = invert(invertible_checkpoint(f).pair)
        torch.manual_seed(0)
        y = f(x, w)

        def there(x):
            torch.manual_seed(0)
            return f(x, w)

        def again(y):
            torch.manual_seed(0)
            return back(y, w)

        torch.manual_seed(0)
        assert_trees_close(back(y, w), x, rtol=1e-8)
        round_trip = grad(lambda x: total(again(there(x))))(x)
        assert_trees_close(round_trip, grad(total)(x), rtol=1e-6)


# Against what is written by hand


def F_(b, w):
    return torch.tanh(b @ w)


def st_(b, w):
    return torch.tanh(b @ w), torch.sin(b @ w)


def additive(x, w):
    a, b = x
    a = a + F_(b, w[0])
    return a, b + F_(a, w[1])


def affine(x, w):
    a, b = x
    s, t = st_(b, w[0])
    a = a * torch.tanh(s).exp() + t
    s, t = st_(a, w[1])
    return a, b * torch.tanh(s).exp() + t


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def test_functions_of_autograd_are_followed_where_their_calls_are_seen():
    """What they save is taken by the hooks of the block, which calls that the search would hear look at."""

    def f(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a + Squared.apply(b), b], -1)

    x, found = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), []
    for g in (invertible_checkpoint(f), f):
        found.append(torch.autograd.grad(g(g(x * 1)).sin().sum(), x))
    assert_trees_close(*found, rtol=1e-12)


class TestCouplings:
    HAND = pytest.mark.parametrize(
        "f, pair",
        [(additive, additive_coupling(F_, F_)), (affine, affine_coupling(st_, st_))],
        ids=["additive", "affine"],
    )

    @HAND
    def test_found_and_written_by_hand_are_the_same_inverse_to_the_bit(self, f, pair):
        rand = Numbers()
        x, w = (rand(5, 4), rand(5, 4)), (rand(4, 4), rand(4, 4))
        found, hand = invertible_checkpoint(f), invertible_checkpoint(pair)
        assert_trees_close(slopes(found, x, w, depth=6), slopes(hand, x, w, depth=6), rtol=1e-12)
        y = f(x, w)
        assert_trees_close(invert(found.pair)(y, w), invert(pair)(y, w), rtol=0.0)

    @HAND
    def test_drift_is_that_of_the_coupling(self, f, pair):
        rand = Numbers()
        x, w = (rand(5, 4), rand(5, 4)), (rand(4, 4), rand(4, 4))
        assert drift(chain(*[invertible_checkpoint(f)] * 8), x, [w] * 8) == drift(chain(*[pair] * 8), x, [w] * 8)

    def test_is_told(self):
        g, w = invertible_checkpoint(additive), (torch.eye(2), torch.eye(2))
        assert repr(g) == "invertible_checkpoint(additive)"
        g((torch.ones(1, 2), torch.ones(1, 2)), w)
        assert repr(g) == "invertible_checkpoint(additive, x[1] = y[1] - F1(y[0]), x[0] = y[0] - F2(x[1]))"
        one = invertible_checkpoint(with_parts(affine, lambda x: x.chunk(2, -1), lambda y: torch.cat(y, -1)))
        one(torch.ones(1, 4), w)
        assert "x.part[1] = (y.part[1] - F2(y.part[0])) / F1(y.part[0])" in repr(one)

    def test_layouts_are_those_of_the_first_time(self):
        """F sees the second half with the strides that a chunk of x has, in either direction."""
        seen = []

        def f(x):
            a, b = x.chunk(2, 1)
            return torch.cat([a + probe(b), b], 1)

        def probe(b):
            seen.append((b.stride(), b.is_contiguous(), b.device.type, b.dtype))
            return b.sin()

        for x in (torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)):
            g = invertible_checkpoint(f)
            total(g(g(x.requires_grad_() * 1))).backward()
            assert len(set(seen)) == 1 and len(seen) > 4
            seen.clear()

    def test_tensors_of_x_lie_as_they_did(self):
        """What F is given in the inverse has the strides that it had, though y has others."""

        class Seen(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is torch.Tensor.sin:
                    strides.append(args[0].stride())
                return func(*args, **(kwargs or {}))

        def f(x):
            a = x[0] + x[1].sin()
            return a, a.cos() + x[1]

        strides: list[tuple] = []
        x = torch.randn(3, 4), torch.randn(4, 3).t()
        assert f(x)[1].stride() != x[1].stride()
        xs, form = tree.separate(x)
        back = invertible_checkpoint(f).pair.inverse_of(form, [Like.of(t) for t in xs], {})
        y = f(x)
        with Seen():
            found = back(y)
        assert_trees_close(found, x, rtol=1e-5)
        assert strides == [(1, 3)]

    def test_what_is_written_in_place_was_read_before(self):
        def f(x):
            a, b, c = x
            h = c.sin()
            before = h + b  # when the inverse knows b, h has been written
            return a + before, b + h.relu_(), c

        x = tuple(torch.randn(5, dtype=torch.float64) for _ in range(3))
        assert_trees_close(slopes(invertible_checkpoint(f, check="error"), x), slopes(f, x), rtol=1e-8)

    def test_kept_tensors_are_known(self):
        g = invertible_checkpoint(lambda x: (x[0] + x[1].sin(),), keep=(1,), check="error")
        a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        g((a * 1, b * 1))[0].square().sum().backward()
        assert_trees_close(b.grad, 2 * (a + b.sin()) * b.cos(), rtol=EXACT)
        with pytest.raises(InverseError, match=r"x\[1\] goes through `sin`.*y has nothing else of it"):
            invertible_checkpoint(lambda x: (x[0] + x[1].sin(),))((a, b))

    def test_other_leaves_of_x_and_other_trees_of_y(self):
        def f(x, by=1.0):
            return {"first": x[0] + by * x[2].sin() * x[1], "second": [x[2]]}

        g = invertible_checkpoint(f, check="error")
        a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        g((a * 1, 3, b * 1), by=2.0)["first"].square().sum().backward()
        assert_trees_close(b.grad, 12 * (a + 6 * b.sin()) * b.cos(), rtol=EXACT)


# Real blocks


class Bottleneck(nn.Module):
    """That of a RevNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.F, self.G = self.branch(width), self.branch(width)

    def branch(self, width: int) -> nn.Module:
        half = width // 2
        layers = [nn.Conv2d(width, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(half, half, 3, padding=1, bias=False), nn.BatchNorm2d(half), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(half, width, 1))

    def forward(self, x):
        a, b = x
        a = a + self.F(b)
        b = b + self.G(a)
        return a, b


class Reversible(nn.Module):
    """A transformer block on two streams, as a Reformer's."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, dropout=p, batch_first=True)
        wide = [nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(p), nn.Linear(2 * width, width), nn.Dropout(p)]
        self.mlp = nn.Sequential(*wide)

    def forward(self, x):
        a, b = x
        h = self.norms[0](b)
        a = a + self.attention(h, h, h, need_weights=False)[0]
        return a, b + self.mlp(self.norms[1](a))


class FlowStep(nn.Module):
    """Scales, a Real NVP coupling of one tensor, and the halves change places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = width // 2
        self.log = nn.Parameter(torch.randn(width) / 10)
        self.net = nn.Sequential(nn.Linear(width - self.left, 8), nn.Tanh(), nn.Linear(8, 2 * self.left))

    def forward(self, x):
        x = x * self.log.exp()
        a, b = x[..., : self.left], x[..., self.left :]
        t, s = self.net(b).chunk(2, -1)
        return torch.cat([b, (a + t) * torch.tanh(s).exp()], -1).flip(-1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        a = x[0] + self.lstm(x[1])[0]
        return a, x[1] + a.sin()


class Checkpoints(nn.Module):
    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block = block
        self.g = invertible_checkpoint(block, **options)

    def forward(self, x):
        return self.g(x)


def states_of_bn(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_var, 0.5, 2)  # type: ignore[arg-type]


def blocks() -> dict[str, tuple[nn.Module, Any]]:
    torch.manual_seed(0)
    rand = Numbers()
    image, words = (rand(2, 4, 5, 5), rand(2, 4, 5, 5)), (rand(2, 5, 4), rand(2, 5, 4))
    made = {
        "bottleneck, eval": (Bottleneck(4).eval(), image),
        "bottleneck, train": (Bottleneck(4), image),
        "attention": (Reversible(4, 0.0), words),
        "attention, dropout": (Reversible(4, 0.3), words),
        "flow step": (FlowStep(5), rand(3, 5)),
        "lstm, dropout": (Recurrent(), words),
    }
    for module, _ in made.values():
        states_of_bn(module.double())
    return made


BLOCKS = blocks()
of_each = pytest.mark.parametrize("name", BLOCKS)


class TestModules:
    @of_each
    def test_have_the_gradients_of_the_module(self, name):
        module, x = BLOCKS[name]
        plain, block = copy.deepcopy(module), Checkpoints(copy.deepcopy(module), check="error")
        assert_trees_close(slopes(block, x, depth=3), slopes(plain, x, depth=3), rtol=1e-8)
        assert_trees_close(block.block.state_dict(), plain.state_dict(), rtol=EXACT)

    @of_each
    def test_under_functional_call(self, name):
        module, x = BLOCKS[name]
        if "train" in name:
            module = copy.deepcopy(module).eval()

        def slope(net, prefix):
            torch.manual_seed(0)
            params = {prefix + k: p.detach() * 1.5 for k, p in module.named_parameters()}
            found = grad(lambda p: total(functional_call(net, p, (functional_call(net, p, (x,)),))))(params)
            return list(found.values())

        block = Checkpoints(copy.deepcopy(module), check="error")
        assert_trees_close(slope(block, "block."), slope(copy.deepcopy(module), ""), rtol=1e-8)

    def test_go_with_what_holds_them(self):
        module, x = BLOCKS["flow step"]
        block = Checkpoints(copy.deepcopy(module))
        y = block(x)
        other = copy.deepcopy(block)
        with torch.no_grad():
            other.get_parameter("block.log").add_(1)
        assert torch.equal(block(x), y) and not torch.allclose(other(x), y)
        assert_trees_close(slopes(other, x), slopes(other.block, x), rtol=1e-8)

    def test_statistics_and_second_derivatives(self):
        rand = Numbers()
        x, w = (rand(5, 4), rand(5, 4)), (rand(4, 4), rand(4, 4))
        g = invertible_checkpoint(additive)

        def losses(f):
            return lambda w, a, b: torch.stack([t.sin().sum(-1) for t in f(f((a, b), w), w)]).sum(0)

        assert_trees_close(grad_and_variance(losses(g))(w, *x), grad_and_variance(losses(additive))(w, *x), rtol=1e-8)
        assert_trees_close(
            hessian(lambda w: losses(g)(w, *x).sum())(w), hessian(lambda w: losses(additive)(w, *x).sum())(w), rtol=1e-8
        )

    def test_autocast(self):
        module, x = copy.deepcopy(BLOCKS["attention"][0]).float(), (torch.randn(2, 5, 4), torch.randn(2, 5, 4))
        with torch.autocast("cpu", torch.bfloat16):
            (_, found), (_, plain) = slopes(Checkpoints(module), x), slopes(module, x)
        assert_trees_close(found, plain, rtol=0.03)


# What prevents it

REFUSED: dict[str, tuple[Callable, str]] = {
    "own part": (
        lambda x: (x[0] + torch.tanh(x[0]), x[1]),
        r"F reads x\[0\], to which it is added: `tanh` \(test_auto",
    ),
    "own part, too": (lambda x: (x[0] + (x[1] * x[0]).sin(), x[1]), r"F reads x\[0\], to which it is added: `mul`"),
    "added behind": (lambda x: (x[0].sin() + x[0], x[1]), r"F reads x\[0\], to which it is added: `sin`"),
    "old value": (
        lambda x: (x[0] + x[1].sin(), x[1] + x[0].cos()),
        r"F reads x\[1\], which is not known when x\[0\] is",
    ),
    "not undone": (
        lambda x: (torch.relu(x[0] + x[1]), x[1]),
        r"x\[0\] goes through `relu` \(test_automatic.py:\d+\), wh",
    ),
    "scale": (lambda x: (x[0] * x[1], x[1]), r"`mul` .* scales it by what is not known to differ from 0.*x\[0\]"),
    "behind a join": (
        lambda x: (torch.softmax(torch.cat(x), 0), x[1]),
        r"x\[0\] goes through `softmax` \(test_automatic.py:\d+\), wh",
    ),
    "joined twice": (lambda x: (torch.cat([x[0], x[0]]), x[1]), r"x\[0\] goes through `cat`"),
    "lost": (lambda x: (x[0], x[0]), r"y has nothing of x\[1\]"),
    "branch": (lambda x: (x[0] + (x[1] if x[1].sum() > 0 else 1), x[1]), "`__bool__` .* reads numbers"),
    "number": (lambda x: (x[0] + x[1].mean().item(), x[1]), "`item` .* reads numbers of what depends on x"),
    "write": (lambda x: (x[0].add_(x[1]), x[1]), "`add_` .* writes into x in place"),
    "broadcast": (lambda x: (x[0][0] + x[1].sin(), x[1]), r"x\[0\].* goes through|y has nothing"),
    "transform": (lambda x: (x[0] + vmap(torch.sin)(x[1]), x[1]), "to a transform of torch.func"),
    "buffer": (lambda x: (torch.zeros(3, 2, dtype=x[0].dtype).add_(x[0]), x[1]), "writes what depends on x into"),
    "rounded": (lambda x: (x[0].float() + x[1].float(), x[1]), r"x\[0\] goes through `float`"),
    "cut": (lambda x: (torch.cat([x[0][:1] + x[1][:1], x[0][2:]]), x[1]), "y has nothing of x"),
    "stale": (lambda x: (x[0] + (h := x[1].exp(), h[:, 0].add_(1))[0], x[1]), "has written in place by another view"),
}


class TestRefusals:
    X = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    @pytest.mark.parametrize("name", REFUSED)
    def test_say_what_prevents_it(self, name):
        f, why = REFUSED[name]
        with pytest.raises(InverseError, match=rf"^invertible_checkpoint\(<lambda>\)\(x, ...\): .*{why}.*Pass f_inv"):
            invertible_checkpoint(f)(self.X)

    def switched(self, one: Callable, other: Callable) -> None:
        now = [one]
        g = invertible_checkpoint(lambda x: now[0](x))
        x = [t.clone().requires_grad_() for t in self.X]
        y = g(tuple(t * 1 for t in x))
        now[0] = other
        total(y).backward()

    def test_another_structure_in_the_backward_pass_is_an_error(self):
        plain = lambda x: (x[0] + x[1].sin(), x[1])  # noqa: E731
        with pytest.raises(InverseError, match="relu"):
            self.switched(plain, lambda x: (torch.relu(x[0]), x[1]))
        with pytest.raises((InverseError, ReplayError)):
            self.switched(plain, lambda x: (x[0] + 2 * x[1].sin(), x[1]))
        with pytest.raises((InverseError, ReplayError)):
            self.switched(plain, lambda x: (x[0] + x[1].sin(), x[1].reshape(-1)))

    def test_draws_that_depend_on_values_are_refused(self):
        g = invertible_checkpoint(lambda x: (x[0] + torch.poisson(x[1].exp()), x[1]))
        x = tuple(t.clone().requires_grad_() for t in self.X)
        with pytest.raises(InverseError, match="random numbers"):
            total(tuple(t.sin() for t in g(tuple(t * 1 for t in x)))).backward()

    def test_a_scale_that_underflows_is_found_by_the_check(self):
        g = invertible_checkpoint(lambda x: (x[0] * (-1e4 * x[1].abs()).exp() + x[1], x[1]))
        x = tuple(t.clone().requires_grad_() for t in self.X)
        with pytest.raises(InverseError, match=r"gives x\[0\] back with an error"):
            total(g(tuple(t * 1 for t in x))).backward()


def peak_of(block: Callable, x: Any, depth: int) -> int:
    with Meter() as meter:
        y = tree.map_tensors(torch.clone, x)
        for _ in range(depth):
            y = block(y)
        total(y).backward()
    return meter.peak()


class TestMemory:
    def test_is_flat_over_the_depth_and_nothing_is_left_to_the_garbage_collector(self):
        w = (torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True))
        g, x = invertible_checkpoint(additive), (torch.randn(1024, 4), torch.randn(1024, 4))
        with nothing_collected():
            peaks = [peak_of(lambda y: g(y, w), x, depth) for depth in (1, 5, 15)]
        assert peaks[2] == peaks[1] and peaks[2] < peak_of(lambda y: additive(y, w), x, 15) / 3

    @pytest.mark.parametrize("name", ["bottleneck, eval", "bottleneck, train", "attention, dropout", "flow step"])
    def test_of_modules_is_flat(self, name):
        module, x = (
            copy.deepcopy(BLOCKS[name][0]),
            tree.map_tensors(lambda t: t.repeat(16, *[1] * (t.dim() - 1)), BLOCKS[name][1]),
        )
        g = invertible_checkpoint(module, check="off")
        peak_of(g, x, 1)
        shallow, deep = peak_of(g, x, 3), peak_of(g, x, 9)
        assert deep < 1.05 * shallow + 60_000 and deep < peak_of(module, x, 9) / 1.5


# Attention of a coupling


class Attention(nn.Module):
    """What one stream of a Reformer says of itself, to be added to the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, b):
        heads = self.into(self.norm(b)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-3, -2)
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(-3, -2).flatten(-2))


class Reformer(nn.Module):
    """Words to logits of the next ones; its streams are the halves of one tensor."""

    def __init__(self, depth: int, made: Callable) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.attentions = nn.ModuleList(Attention(4) for _ in range(depth))
        norms = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(depth)]
        self.mlps = nn.ModuleList(norms)
        self.blocks = [made(F, G) for F, G in zip(self.attentions, self.mlps, strict=True)]

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def found_block(attention: nn.Module, mlp: nn.Module) -> Callable:
    def block(x):
        a, b = x.chunk(2, -1)
        a = a + attention(b)
        return torch.cat([a, b + mlp(a)], -1)

    return invertible_checkpoint(block)


REFORMERS = {
    "coupling": lambda F, G: invertible_checkpoint(additive_coupling(F, G, split_dim=-1)),
    "found": found_block,
    "plain": lambda F, G: additive_coupling(F, G, split_dim=-1),
}


class TestReformer:
    def model(self, depth: int, made: str) -> Reformer:
        torch.manual_seed(0)
        return Reformer(depth, REFORMERS[made]).double()

    def loss(self, model: Reformer, samples: int = 3) -> torch.Tensor:
        words = torch.randint(11, (samples, 10), generator=torch.Generator().manual_seed(0))
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    @pytest.mark.parametrize("made", ["coupling", "found"])
    def test_gradients_are_those_of_the_plain_model(self, made):
        models = self.model(4, made), self.model(4, "plain")
        found, plain = (torch.autograd.grad(self.loss(m), [*m.parameters()]) for m in models)
        assert_trees_close(found, plain, rtol=1e-9)

    @pytest.mark.parametrize("made", ["coupling", "found"])
    def test_memory_is_flat(self, made):
        def peak(depth, made):
            model = self.model(depth, made)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            self.loss(model).backward()
            with Meter() as meter:
                self.loss(model, 64).backward()
            return meter.peak()

        assert peak(9, made) < 1.05 * peak(3, made) and peak(9, made) < peak(9, "plain") / 3


class TestNumbers:
    """By which an inverse is computed have to be those that f has read."""

    def test_a_constant_that_is_written_later_is_refused(self):
        def f(x):
            a, b = x
            n = torch.ones(2)
            a = a + n
            n += 1
            return a, b + n

        x = torch.ones(2), torch.ones(2)
        with pytest.raises(InverseError, match="writes in place into a tensor after a call has read it"):
            invert(invertible_checkpoint(f).pair)(f(x))

    @pytest.mark.parametrize("scaled", [lambda ids: ids * 3, lambda ids: torch.add(1, ids, alpha=3)])
    def test_whole_numbers_are_not_divided(self, scaled):
        w = torch.zeros((), requires_grad=True)

        def f(x):
            return scaled(x[0]), x[1] + w * (x[0] % 7)

        with pytest.raises(InverseError, match="no inverse is found"):
            invertible_checkpoint(f)((torch.tensor([2**24 + 1]), torch.ones(1)))

    def test_a_scale_that_is_rounded_to_whole_numbers_may_be_zero(self):
        with pytest.raises(InverseError, match="no inverse is found"):
            invertible_checkpoint(lambda x, w: (x[0] * torch.exp(w).to(torch.int64), x[1] + x[0]))(
                (torch.ones(2), torch.ones(2)), torch.full((2,), -3.0)
            )

    def test_alone_it_does_not_write_the_buffers_of_a_module(self):
        class Step(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = torch.nn.BatchNorm1d(2)

            def forward(self, x):
                return x[0], x[1] + self.norm(x[0])

        step = Step()
        x = torch.randn(4, 2), torch.randn(4, 2)
        back, before = invert(invertible_checkpoint(step).pair), step.norm.running_mean.clone()
        with pytest.raises(InverseError, match=r"Call eval\(\) first"):
            back(x)
        assert step.norm.running_mean.equal(before)
        step.eval()
        assert_trees_close(back(step(x)), x, rtol=1e-6)
