"""What fails while the structure of a function is looked for is told, and costs nothing but time."""

from unittest import mock

import pytest
import torch.nn.functional as F

from invfunc import diag_ggn, explain
from invfunc.operations.receptive_fields import propagation
from invfunc.structure.labels import Labels
from invfunc.structure.look import Look, One
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers
from tests.structures import always


def convolved():
    rand = Numbers(3)
    args = ({"a": rand(2, 1, 3), "b": rand(1, 2, 3)}, rand(2, 1, 14), rand(2, 1, 10))
    return diag_ggn(lambda p, x: F.conv1d(F.conv1d(x, p["a"]).tanh(), p["b"]), F.mse_loss), args


@pytest.mark.quick
@pytest.mark.parametrize("where", [(Labels, "_follow"), (One, "layout"), (Look, "used")], ids=lambda w: w[1])
def test_after_a_fault_of_the_library_the_result_is_right(where):
    make, args = convolved()
    wanted = make(*args)

    def fails(*args, **kwargs):
        raise RuntimeError("planted")

    with always(), mock.patch.object(where[0], where[1], fails):
        assert_trees_close(make(*args), wanted, 1e-9, 0)


def test_a_rule_that_fails_is_told():
    """What its operation gives counts as read from everything, which is right but not local."""
    make, args = convolved()
    called = propagation._called

    def broken(func):
        found = called(func)
        if found.name != "tanh":
            return found

        def rule(step, out):
            raise IndexError("planted")

        return propagation.replace(found, known=propagation.replace(found.known, receptive_field=rule))

    with always():
        assert "planted" not in explain(make)(*args).why
        with mock.patch.object(propagation, "_called", broken):
            assert "`tanh`" in (why := explain(make)(*args).why) and "IndexError: planted" in why
            assert_trees_close(make(*args), diag_ggn(make.f, F.mse_loss, method="dense")(*args), 1e-9, 0)


def test_what_one_sample_raises_is_told_without_a_warning():
    rand = Numbers(3)
    scale = rand(3, 1)

    def f(p, x):
        assert len(x) == 3, "three samples are wanted"
        return (x @ p["a"].T).tanh() @ p["b"].T * scale

    args = ({"a": rand(2, 6), "b": rand(30, 2)}, rand(3, 6), rand(3, 30))
    with always():
        assert "AssertionError: three samples are wanted" in explain(diag_ggn(f, F.mse_loss))(*args).why
