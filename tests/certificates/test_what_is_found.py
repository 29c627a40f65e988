"""certified: what is found beside numbers that are not finite, kinks and small leaves, and in half precision."""

import re

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import batch_grad, batch_l2_grad, certified, gram, tree, variance
from invfunc.errors import CertificateError
from invfunc.testing.models import Loss, Model, Problem
from tests.alarms import CERTIFIED
from tests.certificates.test_certified import made, planted

each_row = pytest.mark.parametrize("row", CERTIFIED.values(), ids=CERTIFIED)
SEED = 7


def squares(p, x, y):
    return (torch.tanh(x @ p["w"]) @ p["v"] - y).square()


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


PARAMS = {"w": rand(3, 2), "v": rand(2, seed=1)}
ARGS = PARAMS, rand(5, 3, seed=2), rand(5, seed=3)


class TestNumbersThatAreNotFinite:
    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    @each_row
    def test_are_no_fault(self, row, number):
        problem = Problem(Model("perceptron", n=4), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        x = x.clone()
        x[1, 0] = number
        certified(t, generator=SEED)(params, x, *target)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0])
    @each_row
    def test_beside_finite_ones_are_a_fault(self, row, number):
        """One kind in the place of the other."""
        problem = Problem(Model("perceptron", n=3), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        if number == 0:
            x = torch.full_like(x, float("nan"))
        with planted(lambda result: tree.map_tensors(lambda r: torch.full_like(r, number), result)):
            with pytest.raises(CertificateError):
                certified(t, generator=SEED)(params, x, *target)


class TestKinks:
    """|z| where z is 0 to the last digit for one of the samples."""

    @staticmethod
    def f(p, x, y):
        return (x @ p["w"] - y).abs() + torch.tanh(x @ p["v"])

    ARGS = {"w": torch.ones(3), "v": rand(3).float()}, torch.randint(9, (6, 3)).float(), torch.zeros(6)

    def args(self):
        x = self.ARGS[1]
        return *self.ARGS[:2], torch.cat([x[:1].sum(1), self.ARGS[2][1:]])

    @pytest.mark.parametrize("t", [batch_grad, batch_l2_grad, variance, gram, invfunc.sum_grad_squared])
    def test_are_no_fault(self, t):
        for seed in range(5):
            certified(t(self.f), generator=seed)(*self.args())


class TestPaths:
    """An error names the entry that is wrong."""

    @pytest.mark.parametrize(
        "t, path",
        [
            (batch_grad, r"result\['[wv]'\]\[1, [\d, ]+\]"),
            (batch_l2_grad, r"result\['[wv]'\]\[1\]"),
            (gram, r"result\[1, [01]\]"),
            (invfunc.batch_jacobian, r"result\['w'\]\[1, [01], \d, \d\]"),
            (invfunc.sqrt_ggn, r"\(result\['w'\] \*\* 2\).sum\(0\)\[1, \d, \d\]"),
        ],
    )
    def test_name_the_place_in_the_result(self, t, path):
        """Of which only some are asked for."""
        model = lambda p, x: torch.tanh(x @ p["w"])  # noqa: E731  (as users write it)
        f, args = (squares, ARGS) if t in (batch_grad, batch_l2_grad, gram) else (model, ({"w": PARAMS["w"]}, ARGS[1]))
        loss, args = ((F.mse_loss,), (*args, rand(5, 2))) if t is invfunc.sqrt_ggn else ((), args)

        def change(result):
            def off(x):
                x = x.clone()
                x.narrow(1 if t is invfunc.sqrt_ggn else 0, 1, 1).mul_(2)
                return x

            return tree.map_tensors(off, result)

        with planted(change), pytest.raises(CertificateError) as told:
            certified(t(f, *loss, samples=[4, 1]), generator=SEED)(*args)
        assert re.fullmatch(path, told.value.path), told.value.path
