"""Inverses that are found of modules: RevNets, flows, attention, recurrent layers; their gradients and their memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from invfunc import invert, invertible_checkpoint, tree
from invfunc.errors import InverseError
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.pairs.test_automatic import EXACT, additive, slopes, total
from tests.strategies import Numbers

# Real blocks


class Bottleneck(nn.Module):
    """A RevNet's bottleneck."""

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


class Switched(nn.Module):
    """A block of which all changes that its inverse depends on."""

    by: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop, self.scale = nn.Linear(3, 3), nn.Dropout(0.4), 1.0
        self.register_buffer("by", torch.ones(()))
        self.leaves = False

    def forward(self, x):
        a, b = x
        a = a + self.drop(self.net(b).tanh()) * self.scale
        return a, b + self.drop(a.sin()) * (self.by.item() if self.leaves else self.by)


def replace_weight(module: Switched) -> None:
    module.net.weight = nn.Parameter(2 * module.net.weight.detach())


CHANGES: dict[str, Callable] = {
    "eval": lambda module: module.eval(),
    "a number of the module": lambda module: setattr(module, "scale", 0.3),
    "a buffer": lambda module: module.get_buffer("by").fill_(0.5),
    "a number that leaves torch": lambda module: module.get_buffer("by").fill_(0.5),
    "another weight": replace_weight,
    "another layer": lambda module: setattr(module, "net", nn.Linear(3, 3).double()),
    "a weight normed": lambda module: nn.utils.parametrizations.weight_norm(module.net),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_inverse_is_that_of_the_function_as_it_is_by_now(name):
    """Though it was recorded before."""
    module, x = Switched().double(), (Numbers(1)(4, 3), Numbers(2)(4, 3))
    module.leaves = "leaves" in name
    block = Checkpoints(module, check="error")
    slopes(block, x)
    CHANGES[name](module)
    assert_trees_close(slopes(block, x), slopes(module, x), rtol=1e-8)


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

    def test_of_the_inverse_alone_is_that_of_one_layer(self):
        def peak(depth):
            net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(depth)])
            back = invert(invertible_checkpoint(lambda x: (x[0] + net(x[1]), x[1])).pair)
            y = torch.randn(512, 8), torch.randn(512, 8)
            with torch.no_grad():
                back(y)
                with Meter() as meter:
                    back(y)
            return meter.peak()

        assert peak(12) == peak(4)


# Functions whose inverse is not found, and what is said of them

# What prevents it

OWN = r"y does not tell x\[0\], as `add` \(test_automatic_modules.py:\d+\) cannot be undone.* read the other parts"
REFUSED: dict[str, tuple[Callable, str]] = {
    "own part": (lambda x: (x[0] + torch.tanh(x[0]), x[1]), OWN),
    "own part, too": (lambda x: ((x[1] * x[0]).sin() + x[0], x[1]), OWN),
    "old value": (
        lambda x: (x[0] + x[1].sin(), x[1] + x[0].cos()),
        r"y does not tell x\[0\] and x\[1\], as `add` .* have changed by their new values",
    ),
    "not undone": (lambda x: (torch.relu(x[0] + x[1]), x[1]), r"not tell x\[0\], as `relu` .* cannot be undone"),
    "behind a join": (lambda x: (torch.softmax(torch.cat(x), 0), x[1]), r"x\[0\], as `softmax` .* cannot be undone"),
    "broadcast": (lambda x: (x[0][0] + x[1].sin(), x[1]), r"x\[0\], as `add` .* cannot be undone"),
    "rounded": (lambda x: (x[0].float() + x[1].float(), x[1]), r"x\[0\], as `float` .* cannot be undone"),
    "scale": (lambda x: (x[0] * x[1], x[1]), r"x\[0\], as `mul` .* a scale may never be 0"),
    "lost": (lambda x: (x[0], x[0]), r"y does not depend on x\[1\]"),
    "cut": (lambda x: (torch.cat([x[0][:1] + x[1][:1], x[0][2:]]), x[1]), r"depend on x\[0\], or not on all"),
    "cut and repeated": (lambda x: (torch.cat([x[0][:1], x[0][:2]]), x[1]), r"depend on x\[0\], or not"),
    "branch": (lambda x: (x[0] + (x[1] if x[1].sum() > 0 else 1), x[1]), "`__bool__` .* reads numbers of x"),
    "number": (lambda x: (x[0] + x[1].mean().item(), x[1]), "`item` .* reads numbers of x"),
    "transform": (lambda x: (x[0] + vmap(torch.sin)(x[1]), x[1]), "to a transform of torch.func"),
    "stale": (lambda x: (x[0] + (h := x[1].exp(), h[:, 0].add_(1))[0], x[1]), "has written in place by another view"),
}


class TestRefusals:
    X = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)

    @pytest.mark.parametrize("name", REFUSED)
    def test_say_what_prevents_it(self, name):
        f, why = REFUSED[name]
        with pytest.raises(InverseError, match=rf"^invertible_checkpoint\(<lambda>\)\(x, ...\): .*{why}.*Pass f_inv"):
            invertible_checkpoint(f)(self.X)

    def test_a_scale_that_underflows_is_found_by_the_check(self):
        g = invertible_checkpoint(lambda x: (x[0] * (-1e4 * x[1].abs()).exp() + x[1], x[1]))
        x = tuple(t.clone().requires_grad_() for t in self.X)
        with pytest.raises(InverseError, match=r"gives x\[0\] back with an error"):
            total(g(tuple(t * 1 for t in x))).backward()


class TestNumbers:
    """By which an inverse is computed have to be those that f has read."""

    def test_a_constant_that_is_written_later_is_read_as_it_was(self):
        def f(x):
            a, b = x
            n = torch.ones(2)
            a = a + n
            n += 1
            return a, b + n

        x = torch.ones(2), torch.zeros(2)
        assert_trees_close(invert(invertible_checkpoint(f).pair)(f(x)), x, rtol=0.0)

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

        for step in (Step(), Step().eval()):
            x = torch.randn(4, 2), torch.randn(4, 2)
            y, before = step(x), copy.deepcopy(step.state_dict())
            assert_trees_close(invert(invertible_checkpoint(step).pair)(y), x, rtol=1e-5)
            assert_trees_close(step.state_dict(), before, rtol=0.0)
