"""A little of `python -m tests.alarms`, with the same calls each time."""

import pytest
import torch

from invfunc import tree
from invfunc.statistic import Statistic
from invfunc.testing.laws.rows import LOSS
from tests.alarms.__main__ import DTYPES, counted, outcomes
from tests.alarms.calls import Call, Loss, Model, Problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_raise_none(dtype):
    came, reasons = counted(outcomes(dtype, 0, first=7, calls=20))
    assert came["right"] >= 10 and not came["alarm"]
    assert not any("by the certificate" in reason for reason in reasons)


@pytest.mark.quick
def test_wrong_results_raise_one_which_is_told_with_the_call(monkeypatch, capsys):
    problem = Problem(Model("affine", 3, dtype=torch.bfloat16), Loss("mse_loss"))
    call, compute = Call(problem, ("variance",), LOSS, samples=(0, 2), chunks=2, over="samples"), Statistic.compute
    assert call.outcome() == ("right", "")

    def wrong(self, *given):
        return tree.map_tensors(lambda x: 2 * x, compute(self, *given))

    monkeypatch.setattr(Statistic, "compute", wrong)
    assert counted([(call, *call.outcome())])[0] == {"alarm": 1}
    told = capsys.readouterr().out.splitlines()[-1].strip()
    assert eval(told.removesuffix(".check()")) == call
