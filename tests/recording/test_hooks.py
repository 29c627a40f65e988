"""Hooks that f gives to its tensors: those that look on are allowed, and of those that change it a result is right."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F

from invfunc import SampleAxisError, batch_grad, batch_jacobian
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

PARAMS = {"w": Numbers()(4, 3), "v": Numbers(1)(3, 3)}
X, Y = Numbers(2)(5, 4), Numbers(3).below(3, 5)
PLACES = ["parameter", "activation", "copy"]


def model(place):
    def f(params, x):
        def hooked(t, here):
            t = t * 1 if place == "copy" else t
            if here and t.requires_grad:
                t.register_hook(lambda g: 2 * g)
            return t

        z = hooked(x @ hooked(params["w"], place == "parameter"), place != "parameter")
        return (z @ params["v"]).tanh()

    return f


def of_losses(place, **options):
    return lambda params, x, y: F.cross_entropy(model(place)(params, x), y, **options)


def rows(f, *args):
    """The gradient of each entry that f gives, by plain autograd."""
    params = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    found = f(params, *args)
    each = [torch.autograd.grad(e, list(params.values()), retain_graph=True) for e in found.flatten()]
    return {
        name: torch.stack(g).reshape(*found.shape, *p.shape)
        for (name, p), *g in zip(params.items(), *each, strict=True)
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_that_change_the_gradient_are_seen_or_refused(place, reduction):
    shares = rows(of_losses(place, reduction="none"), X, Y)
    shares = shares if reduction == "none" else {n: s / len(X) for n, s in shares.items()}
    with suppress(SampleAxisError):
        assert_trees_close(batch_grad(of_losses(place, reduction=reduction))(PARAMS, X, Y), shares, 1e-12)
    with suppress(SampleAxisError):
        assert_trees_close(batch_jacobian(model(place))(PARAMS, X), rows(model(place), X), 1e-12)


def test_that_look_on():
    seen = []

    def losses(params, x, y):
        z = x @ params["w"]
        z.register_hook(seen.append)
        return F.cross_entropy((z @ params["v"]).tanh(), y)

    def plain(params, x, y):
        return F.cross_entropy((x @ params["w"] @ params["v"]).tanh(), y)

    assert_trees_close(batch_grad(losses)(PARAMS, X, Y), batch_grad(plain)(PARAMS, X, Y), 1e-12)
    assert seen
