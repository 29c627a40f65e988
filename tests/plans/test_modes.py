"""Calls by a plan in other modes and threads, and their errors, are those of the call itself."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

import invfunc
from invfunc import compiled
from invfunc.plans.recorder import draws
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import EXACT, given, hits, loss, of, quietly, same
from tests.strategies import Numbers


@pytest.mark.quick
class TestModes:
    def test_of_differentiation(self):
        t, c = of(loss)
        w, x = given()
        c(w, x), c(w, x)
        slope = grad(lambda w: c(w, x).sum())(w)
        assert_trees_close(slope, grad(lambda w: t(w, x).sum())(w), EXACT)
        assert_trees_close(vmap(c, (0, None))(torch.stack([w, 2 * w]), x), torch.stack([t(w, x), t(2 * w, x)]), EXACT)
        assert_trees_close(jvp(lambda w: c(w, x), (w,), (w,)), jvp(lambda w: t(w, x), (w,), (w,)), EXACT)
        leaf = w.clone().requires_grad_()
        with pytest.warns(invfunc.InvFuncWarning, match="differentiable"):
            found = c(leaf, x)
        assert_trees_close(torch.autograd.grad(found.sum(), leaf)[0], slope, EXACT)
        with torch.no_grad():
            for _ in range(2):
                found = c(leaf, x)
                assert not found.requires_grad
                assert_trees_close(found, t(w, x), EXACT)
        with torch.inference_mode():
            for _ in range(2):
                assert c(w, x).is_inference() == t(w, x).is_inference()
        assert not c(w, x).is_inference()

    def test_that_find_anomalies_see_the_call_itself(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(c, t, *given())
        assert hits(c) == 1

    def test_of_autocast_and_default_dtypes(self):
        def f(w, x):
            return F.linear(x, w).square().sum(1) * torch.tensor(0.1)

        t, c = of(f)
        w, x = torch.randn(2, 3), torch.randn(4, 3)
        for _ in range(2):
            for on in (False, True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                    same(c, t, w, x)
        assert hits(c) == 2
        plain = c(w.double(), x.double())
        torch.set_default_dtype(torch.float64)
        try:
            exact = c(w.double(), x.double())
            same(c, t, w.double(), x.double())
        finally:
            torch.set_default_dtype(torch.float32)
        assert not torch.equal(plain, exact)

    def test_statistics_and_fake_tensors_around_it(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch._subclasses.FakeTensorMode() as mode:
            fake = c(*map(mode.from_tensor, given()))
        assert fake.shape == (3,)
        same(c, t, *given())

    def test_threads(self):
        t, c = of(loss)
        wanted = [t(*given(k)) for k in range(8)]
        found = [None] * 8

        def work(k):
            for _ in range(4):
                found[k] = c(*given(k))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_trees_close(found, wanted, EXACT)

    def test_closed_over_tensors_that_begin_to_want_gradients(self):
        held = torch.ones(3, dtype=torch.float64)
        t, c = of(lambda w, x: loss(w * held, x))
        c(*given()), c(*given())
        assert hits(c) == 1
        held.requires_grad_()
        assert quietly(c, *given()).requires_grad == t(*given()).requires_grad


@pytest.mark.quick
class TestErrors:
    def test_are_those_of_the_call(self):
        t, c = (wrap(invfunc.variance(lambda w, x, y: F.cross_entropy(x @ w, y))) for wrap in (lambda t: t, compiled))
        w, x = Numbers()(3, 5), Numbers(1)(4, 3)
        good, bad = torch.arange(4), torch.tensor([0, 1, 2, 9])
        same(c, t, w, x, good)
        same(c, t, w, x, good)
        for _ in range(2):
            with pytest.raises(IndexError, match="out of bounds"):
                c(w, x, bad)
            same(c, t, w, x, good)
        with pytest.raises(invfunc.errors.ArgumentTypeError, match=r"variance\(<lambda>\)\(w, x\): f takes"):
            c(w, x)

    def test_of_checks_of_numbers(self):
        """A loss that is convex at some outputs only."""
        t = invfunc.diag_ggn(lambda w, x: x @ w, lambda z, y: invfunc.outputs(z).pow(3).sum())
        c = compiled(t)
        w, x, y = torch.ones(3, 2), torch.ones(4, 3), torch.zeros(4)
        same(c, t, w, x, y)
        same(c, t, w, x, y)
        assert hits(c) == 1
        for call in (t, c):
            with pytest.raises(invfunc.errors.ConvexityError):
                call(w, -x, y)
        same(c, t, w, 2 * x, y)

    def test_of_singular_matrices(self):
        c = compiled(invfunc.variance(lambda w, x: (x @ torch.linalg.inv(w)).square().sum(1)))
        w, x = torch.eye(3) + 0.1, torch.ones(4, 3)
        c(w, x), c(w, x)
        assert hits(c) == 1
        with pytest.raises(torch.linalg.LinAlgError):
            c(torch.zeros(3, 3), x)


# Operations that draw random numbers: attention's kernels do where they leave something out

ATEN = torch.ops.aten
Q = torch.zeros(1, 1, 2, 4)
EFFICIENT, FLASH = (
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
)
CALLS = {
    "by position": (EFFICIENT, (Q, Q, Q, None, True, 0.1), {}, True),
    "by position, nothing": (EFFICIENT, (Q, Q, Q, None, True, 0.0), {}, False),
    "by name": (FLASH, (Q, Q, Q), {"dropout_p": 0.1}, True),
    "by name, nothing": (FLASH, (Q, Q, Q), {"dropout_p": 0.0}, False),
    "left out": (FLASH, (Q, Q, Q), {"is_causal": True}, False),
    "a derivative": (ATEN._scaled_dot_product_efficient_attention_backward.default, (Q,) * 9 + (0.1,), {}, False),
    "dropout": (ATEN.native_dropout.default, (Q, 0.0, True), {}, True),
    "a generator that is not given": (ATEN.bernoulli.p, (Q, 0.5), {}, True),
    "a product": (ATEN.mm.default, (Q[0, 0], Q[0, 0].T), {}, False),
}


@pytest.mark.parametrize(("func", "args", "kwargs", "wanted"), CALLS.values(), ids=CALLS)
def test_what_draws(func, args, kwargs, wanted):
    assert draws(func, args, kwargs) is wanted
