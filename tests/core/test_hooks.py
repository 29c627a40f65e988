"""Hooks that f gives to its tensors: those that look on are allowed, and of those that change it a result is right."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, batch_jacobian, clipped_grad, variance
from invfunc.errors import SampleAxisError
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
@pytest.mark.parametrize("needs", [False, True])
def test_are_seen_or_refused(place, needs):
    params = {name: p.clone().requires_grad_(needs) for name, p in PARAMS.items()}
    losses = of_losses(place, reduction="none")
    shares = rows(losses, X, Y)
    norms = sum(s.flatten(1).square().sum(1) for s in shares.values()).sqrt()
    for found, wanted in (
        (lambda: batch_grad(losses)(params, X, Y), shares),
        (lambda: variance(losses)(params, X, Y), {n: s.var(0, correction=0) for n, s in shares.items()}),
        (lambda: clipped_grad(losses, 1e9)(params, X, Y)[1], norms),
        (lambda: batch_jacobian(model(place))(params, X), rows(model(place), X)),
    ):
        try:
            assert_trees_close(found(), wanted, 1e-12)
        except SampleAxisError as error:
            assert "`register_hook`" in str(error)


@pytest.mark.parametrize("place", PLACES)
def test_of_a_loss_that_is_a_number_are_seen_or_refused(place):
    shares = rows(of_losses(place, reduction="none"), X, Y)
    try:
        found = batch_grad(of_losses(place))(PARAMS, X, Y)
    except SampleAxisError as error:
        assert "`register_hook`" in str(error)
        return
    assert_trees_close(found, {n: s / len(X) for n, s in shares.items()}, 1e-12)
