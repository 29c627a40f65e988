"""Functions whose inverse is not found, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import vmap

from invfunc import (
    invert,
    invertible_checkpoint,
)
from invfunc.errors import InverseError
from invfunc.testing import assert_trees_close
from tests.pairs.test_automatic import total

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
        r"x\[0\] goes through `relu` \(test_automatic_refusals.py:\d+\), wh",
    ),
    "scale": (lambda x: (x[0] * x[1], x[1]), r"`mul` .* scales it by what is not known to differ from 0.*x\[0\]"),
    "behind a join": (
        lambda x: (torch.softmax(torch.cat(x), 0), x[1]),
        r"x\[0\] goes through `softmax` \(test_automatic_refusals.py:\d+\), wh",
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
