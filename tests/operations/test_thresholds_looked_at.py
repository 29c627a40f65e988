"""Each side of the thresholds up to which something is looked at."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from invfunc import additive_coupling, batch_grad, chain, diag_ggn, functional, ggnvp, outputs
from invfunc.errors import SplitError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_ggn, loop_batch_grad
from tests.crossed import thresholds_at
from tests.laws import RTOL
from tests.operations.test_thresholds import both, built
from tests.strategies import Numbers

TABLE, ROWS = Numbers(5)(6, 3), Numbers(6)(4, 3)
CONSTANTS = {
    "closed over": lambda x: TABLE[0],
    "made anew": lambda x: torch.linspace(0, 1, 3, dtype=x.dtype),
    "a row for each sample": lambda x: ROWS,
    "a row for each sample, made anew": lambda x: ROWS.sin(),
    "in the memory of another": lambda x: torch.from_numpy(ROWS.numpy())[0],
}


class TestWhatIsLookedAt:
    @both
    @pytest.mark.parametrize("constant", CONSTANTS)
    def test_constants_of_a_function(self, at, constant):
        def f(w, x, y):
            return ((x @ w).tanh() * CONSTANTS[constant](x) - y).square().sum(1)

        args = Numbers()(3, 3), Numbers(1)(4, 3), Numbers(2)(4, 3)
        wanted = loop_batch_grad(f)(*args)
        with thresholds_at(**at):
            assert_trees_close(batch_grad(f)(*args), wanted, 1e-10)

    @both
    def test_losses_without_known_structure(self, at):
        def loss(z, y):
            return (outputs(z) - y).cosh().log().mean()

        module, x = built("perceptron")
        f, params = functional(module)
        args, name = (params, x, Numbers(1)(5, 3)), "0.weight"
        v = {other: Numbers(2)(*p.shape) * (other == name) for other, p in params.items()}
        diagonal, matrix = dense_diag_ggn(f, loss)(*args), dense_ggn(f, loss)(*args)[name]
        with thresholds_at(**at):
            assert_trees_close(diag_ggn(f, loss)(*args), diagonal, 1e-9)
            assert_trees_close(ggnvp(f, loss)(params, v, *args[1:])[name].flatten(), matrix @ v[name].flatten(), 1e-9)

    def test_a_hessian_that_is_too_large_is_refused_with_a_way_out(self):
        def f(w, x):
            return x @ w

        def loss(z, y):
            return (z - y).cosh().log().mean()

        args = Numbers()(3, 2), Numbers(1)(4, 3), Numbers(2)(4, 2)
        with thresholds_at(HESSIAN=4 * 2 * 2):
            assert_trees_close(diag_ggn(f, loss)(*args), dense_diag_ggn(f, loss)(*args), 1e-9)
        with thresholds_at(HESSIAN=4 * 2 * 2 - 1):
            with pytest.raises(SplitError, match="Use one of torch's convex losses, or fewer outputs"):
                diag_ggn(f, loss)(*args)
            diag_ggn(f, F.mse_loss)(*args)

    @both
    @pytest.mark.parametrize("kind", RTOL, ids=str)
    def test_states_that_come_back(self, at, kind):
        parts = [lambda x, w=w: (x @ w).tanh() for w in Numbers()(6, 3, 3).to(kind)]
        blocks = [additive_coupling(*parts[i : i + 2], split_dim=1) for i in (0, 2, 4)]
        x = Numbers(1)(5, 6).to(kind)

        def slope(run):
            return torch.func.grad(lambda x: run(x).sin().sum())(x), torch.autograd.functional.vjp(run, x, x)[1]

        def plain(x):
            a, b = x.chunk(2, 1)
            for f, g in zip(parts[::2], parts[1::2], strict=True):
                a = a + f(b)
                b = b + g(a)
            return torch.cat([a, b], 1)

        with thresholds_at(**at):
            assert_trees_close(slope(chain(*blocks)), slope(plain), RTOL[kind])

    @both
    def test_hooks_that_lead_to_their_module(self, at):
        module, x = built("perceptron")
        seen = {"module": module, "others": list(range(10))}
        module[0].register_forward_hook(lambda m, args, out: out * len(list(seen["module"].parameters())))
        y = module(x)
        with thresholds_at(**at):
            f, params = functional(module)
            assert torch.equal(f(params, x), y)
