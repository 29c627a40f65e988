from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import invfunc
from invfunc import thresholds, tree
from invfunc._torch import values


class Refused(TorchDispatchMode):
    """The CPU as a device without float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(x.dtype in (torch.float64, torch.complex128) for x in tree.tensors(out)):
            raise TypeError(f"{func} gives float64")
        return out


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(values, "WITHOUT_FLOAT64", {"cpu"})
    monkeypatch.setattr(thresholds, "AT_ONCE", 0)
    return Refused


def assert_near(found, wanted, rtol):
    """Relative to the largest entry of each tensor."""
    for a, b in zip(tree.tensors(found), tree.tensors(wanted), strict=True):
        assert (a.double() - b.double()).abs().max() <= rtol * b.abs().max()


def positions():
    """Products of few positions of wide layers: sums of squares and norms are cheaper in float64 than formed."""
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24), nn.Flatten(), nn.Linear(48, 3))
    return model, torch.randn(6, 2, 24), torch.randint(3, (6,))


def plain():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(8, 4), torch.randint(3, (8,))


def each(f):
    return lambda params, x, y: F.cross_entropy(f(params, x), y, reduction="none")


def drawn():
    return torch.Generator().manual_seed(0)


STATISTICS = {
    "variance": lambda f: invfunc.variance(each(f)),
    "chunked": lambda f: invfunc.chunked(invfunc.variance(each(f)), 2),
    "batch_l2_grad": lambda f: invfunc.batch_l2_grad(each(f)),
    "sum_grad_squared": lambda f: invfunc.sum_grad_squared(each(f)),
    "gram": lambda f: invfunc.gram(each(f)),
    "noise_scale": lambda f: invfunc.noise_scale(each(f)),
    "diag_ggn": lambda f: invfunc.diag_ggn(f, F.cross_entropy),
    "drawn": lambda f: invfunc.diag_ggn(f, F.cross_entropy, mc_samples=4, with_error=True, generator=drawn()),
    "exact kfac": lambda f: invfunc.kfac(f, F.cross_entropy, fisher="exact"),
    "eigenpairs": lambda f: lambda *args: invfunc.eigenpairs(f, F.cross_entropy)(*args).values,
    "estimate_trace": lambda f: invfunc.estimate_trace(invfunc.ggnvp(f, F.cross_entropy), probes=4, generator=drawn()),
}
MODELS = {"plain": plain, "positions": positions}


class TestDevicesWithoutFloat64:
    """No path takes float64 there, nor one in which float32 has too few digits."""

    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("name", STATISTICS)
    def test_have_statistics(self, name, model, monkeypatch):
        torch.manual_seed(0)
        model, x, y = MODELS[model]()
        f, params = invfunc.functional(model)
        wanted = STATISTICS[name](f)(params, x, y)
        monkeypatch.setattr(values, "WITHOUT_FLOAT64", {"cpu"})
        with Refused():
            found = STATISTICS[name](f)(params, x, y)
        assert_near(found, wanted, 2e-5)

    def test_are_those_that_are_said_to_be(self):
        model, x, y = plain()
        f, params = invfunc.functional(model)
        with Refused(), pytest.raises(TypeError, match="gives float64"):
            STATISTICS["noise_scale"](f)(params, x, y)

    def test_have_the_variance_of_samples_that_are_nearly_the_same(self, without):
        """Of which sums of squares in float32 would keep no digit."""
        w, x = torch.randn(6, 5), torch.randn(1, 5) + 1e-4 * torch.randn(9, 5)

        def f(w, x):
            return (x @ w.T).sum(1)

        with without():
            found = invfunc.variance(f)(w, x)
        shares = invfunc.batch_grad(f)(w, x).double()
        assert_near(found, shares.var(0, correction=0), 1e-3)

    @pytest.mark.parametrize(
        "of",
        [
            invfunc.batch_l2_grad,
            invfunc.gram,
            invfunc.sum_grad_squared,
            partial(invfunc.kronecker.kfoc, fisher="empirical"),
        ],
        ids=["batch_l2_grad", "gram", "sum_grad_squared", "kfoc"],
    )
    def test_have_products_that_cancel(self, of, monkeypatch):
        """Of positions that nearly cancel each other: products of positions in float32 would keep no digit."""
        torch.manual_seed(0)
        w, x = torch.randn(24, 24), torch.randn(6, 1, 24)
        x = torch.cat([x, -x * (1 + 1e-5)], 1)

        def f(w, x):
            return (x @ w.T).sum((1, 2))

        t = of(f)
        wanted = t(w, x)
        monkeypatch.setattr(values, "WITHOUT_FLOAT64", {"cpu"})
        assert_near(t(w, x), wanted, 1e-3)

    def test_have_blocks(self, without):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        block = invfunc.invertible_checkpoint(invfunc.additive_coupling(lambda x: layer(x).tanh(), layer))
        x = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
        with without():
            y = [block(tuple(x)) for _ in range(6)][-1]
            found = torch.autograd.grad(sum(t.square().sum() for t in y), x)
        first = x[0] + layer(x[1]).tanh()
        plain = [first, x[1] + layer(first)]
        assert_near(found, torch.autograd.grad(sum(t.square().sum() for t in plain), x), 1e-4)

    def test_have_no_equilibrium(self, without):
        with pytest.raises(invfunc.errors.ArgumentError, match="in float64, which cpu has not"):
            invfunc.pairs.equilibrium(lambda x: x.tanh())(torch.zeros(3))

    def test_have_no_decay_that_is_exact(self, without):
        step = invfunc.pairs.reversible_sgd(lambda w, c: c * w.square() / 2, lr=0.5)
        state = step.start(torch.tensor(4.0))
        with pytest.raises(invfunc.errors.ArgumentError, match="in float64, which cpu has not"):
            invfunc.repeated(step)(state, torch.ones(3))
