"""Each side of the thresholds up to which something is looked at."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from invfunc import diag_ggn, functional, ggnvp, outputs
from invfunc.errors import SplitError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_ggn
from tests.crossed import thresholds_at
from tests.operations.test_thresholds import both, built
from tests.strategies import Numbers


class TestWhatIsLookedAt:
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
