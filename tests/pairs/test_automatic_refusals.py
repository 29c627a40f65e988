"""Functions whose inverse is not found, and what is said of them."""

from __future__ import annotations

import copy
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

OWN = r"y does not tell x\[0\], as `add` \(test_automatic_refusals.py:\d+\) cannot be undone.* read the other parts"
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
