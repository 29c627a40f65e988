"""Norms from products of positions, in float32 where these do not cancel, and what a weighted sum keeps of them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import invfunc
from invfunc import tree
from invfunc.testing.oracles import assert_trees_close, loop_batch_l2_grad, loop_clipped_grad
from tests.crossed import FAR, HIGHEST, LOWEST, thresholds_at
from tests.strategies import Numbers

POSITIONS, WIDE = 24, 48


@pytest.fixture(autouse=True)
def no_shares_at_once():
    with thresholds_at(AT_ONCE=0):
        yield


def paired(w, a, s):
    """Losses whose per-sample gradients are `sum_t a[t] s[t]^T`."""
    return ((a @ w) * s).sum((1, 2))


def factors(*apart, dtype=torch.float32):
    """Samples whose positions are pairs that cancel but for such a part, or do not (1)."""
    a, s = (Numbers(i)(len(apart), POSITIONS // 2, WIDE).to(dtype) for i in (1, 2))
    off = torch.tensor(apart, dtype=dtype)[:, None, None]
    return torch.cat([a, a + off * a.flip(1)], 1), torch.cat([s, -s + off * s.flip(2)], 1)


class Made(TorchDispatchMode):
    """Records the operations that are called, the dtypes of the results and the size of the largest."""

    def __init__(self):
        super().__init__()
        self.dtypes, self.largest, self.names = set(), 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for x in tree.tensors(out):
            self.dtypes.add(x.dtype)
            self.largest = max(self.largest, x.numel())
        return out


def made(statistic, *args):
    with Made() as found:
        result = statistic(*args)
    return result, found


class TestOfPositions:
    w = torch.zeros(WIDE, WIDE)

    def test_form_no_share_in_float32(self):
        args = factors(1, 1, 1, 1)
        found, seen = made(invfunc.batch_l2_grad(paired), self.w, *args)
        wanted = loop_batch_l2_grad(paired)(self.w.double(), *(x.double() for x in args))
        assert_trees_close(found.double(), wanted, 1e-5)
        assert seen.dtypes <= {torch.float32, torch.bool}
        assert seen.largest < len(found) * WIDE**2

    @pytest.mark.parametrize("positions", [2, 3, 24])
    def test_of_halves_are_those_of_all(self, positions):
        """Half of the products between the halves are left out."""
        args = [x[:, :positions] for x in factors(1, 1, 1)]
        found = []
        for halved in (0, FAR):
            with thresholds_at(HALVED=halved, GHOST_PRODUCTS=0, FORMED=FAR):
                found.append(made(invfunc.batch_l2_grad(paired), self.w, *args))
        (halves, seen), (whole, before) = found
        wanted = loop_batch_l2_grad(paired)(self.w.double(), *(x.double() for x in args))
        assert_trees_close(halves.double(), wanted, 1e-5)
        assert_trees_close(whole.double(), wanted, 1e-5)
        assert seen.names.count("bmm") > before.names.count("bmm")

    @pytest.mark.parametrize("apart", [1e-2, 1e-3, 0.0])
    def test_that_cancel_are_formed(self, apart):
        """Of one sample of several."""
        args = factors(1, apart, 1, 1)
        found, seen = made(invfunc.batch_l2_grad(paired), self.w, *args)
        wanted = loop_batch_l2_grad(paired)(self.w.double(), *(x.double() for x in args))
        assert ((found - wanted).abs() <= 1e-4 * wanted + 1e-12 * wanted.max()).all()
        assert seen.largest >= len(found) * WIDE**2

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_of_one_sample_that_is_not_finite_leave_the_others(self, bad):
        a, s = factors(1, 1, 1)
        a[1, 2, 3] = bad
        found = invfunc.batch_l2_grad(paired)(self.w, a, s)
        assert not found[1].isfinite()
        assert_trees_close(found[::2], invfunc.batch_l2_grad(paired)(self.w, a[::2], s[::2]), 1e-5)

    @pytest.mark.parametrize("read, sent", [(1e17, 1e-21), (1e-21, 1e17), (1e-6, 1e22)])
    def test_of_factors_whose_squares_have_no_digits(self, read, sent):
        a, s = factors(1, 1)
        args = a * read, s * sent
        found = invfunc.batch_l2_grad(paired)(self.w, *args)
        wanted = loop_batch_l2_grad(paired)(self.w.double(), *(x.double() for x in args))
        assert_trees_close(found.double(), wanted, 1e-5)

    def test_are_formed_where_they_are_differentiated(self):
        """A derivative cancels where the norm does not."""
        a, s = factors(1, 1)

        def norms(a):
            return invfunc.batch_l2_grad(paired)(self.w, a, s).sum()

        found, seen = made(torch.func.grad(norms), a)
        wide = a.double().requires_grad_()
        (wanted,) = torch.autograd.grad(torch.einsum("nti,ntk->nik", wide, s.double()).square().sum(), wide)
        assert_trees_close(found.double(), wanted, 1e-5)
        assert seen.largest >= len(a) * WIDE**2

    def test_sums_over_one_factor_alone_are_formed(self):
        """They may be larger than the factor, so that more cancels than it shows."""
        f = lambda w, a, s: torch.einsum("nti,ik,nutk->n", a, w, s)  # noqa: E731
        a, s = factors(1e-2, 1e-2)
        s = s[:, None].expand(-1, 64, -1, -1).contiguous()
        with thresholds_at(GHOST_PRODUCTS=0, FORMED=FAR):
            found = invfunc.batch_l2_grad(f)(self.w, a, s)
        wanted = loop_batch_l2_grad(f)(self.w.double(), a.double(), s.double())
        assert_trees_close(found.double(), wanted, 1e-5)


class TestKept:
    """Per-sample gradients that are kept from the norms for the weighted sum."""

    layers = (nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Flatten(), nn.Linear(20, 3))

    @pytest.mark.parametrize(
        "at", [LOWEST, HIGHEST, LOWEST | {"CACHE": {"cpu": 2**24}}], ids=["lowest", "highest", "whole"]
    )
    def test_give_the_clipped_sum_of_the_loop(self, at):
        f, params = invfunc.functional(nn.Sequential(*self.layers).double())
        x = Numbers(1)(4, 5, 3)
        losses = lambda params, x: f(params, x).square().sum(1)  # noqa: E731
        bound = loop_clipped_grad(losses, torch.inf)(params, x)[1].mean().item()
        with thresholds_at(**at):
            found = invfunc.clipped_grad(losses, bound)(params, x)
            chunked = invfunc.chunked(invfunc.clipped_grad(losses, bound), 3)(params, x)
        assert_trees_close((found, chunked), (loop_clipped_grad(losses, bound)(params, x),) * 2, 1e-9)

    def test_of_a_number_that_many_read(self):
        """A temperature: a parameter without dims, whose shares are `[N]`."""
        x, params = Numbers(3)(4, 5), {"w": Numbers(4)(5, 64), "t": torch.tensor(1.3, dtype=torch.double)}

        def losses(p, x):
            return torch.logsumexp((x @ p["w"]) / p["t"], 1)

        assert_trees_close(invfunc.batch_l2_grad(losses)(params, x), loop_batch_l2_grad(losses)(params, x), 1e-12)
        wanted = loop_clipped_grad(losses, 1.0)(params, x)
        assert_trees_close(invfunc.clipped_grad(losses, 1.0)(params, x), wanted, 1e-12)
