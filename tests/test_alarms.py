"""`certified` raises no false alarm: of drawn problems in each precision, and all that it takes."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from invfunc import tree
from invfunc.statistic import Statistic
from tests.alarms import Call, Loss, Model, Problem, drawn
from tests.rows import LOSS


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_right_results_raise_none(dtype):
    came = []

    @settings(max_examples=20, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(drawn(dtype))
    def look(call):
        what, said = call.outcome()
        assert what in ("right", "refused"), f"{said}\n{call}.check()"
        came.append(what)

    look()
    assert came.count("right") >= 10


@pytest.mark.quick
def test_wrong_results_raise_one_and_the_call_prints_as_code(monkeypatch):
    problem = Problem(Model("affine", 3, dtype=torch.bfloat16), Loss("mse_loss"))
    call, compute = Call(problem, ("variance",), LOSS, samples=(0, 2), chunks=2, over="samples"), Statistic.compute
    assert call.outcome() == ("right", "") and eval(repr(call)) == call

    def wrong(self, *given):
        return tree.map_tensors(lambda x: 2 * x, compute(self, *given))

    monkeypatch.setattr(Statistic, "compute", wrong)
    assert call.outcome()[0] == "alarm"
