"""What a user gets wrong is found, with the smallest case: a rule, an inverse, a model that mixes its samples."""

import pytest
import torch.nn.functional as F

import invfunc
from invfunc.testing import laws
from tests.strategies import Numbers


def doubled():
    """A wrong rule: twice the shares."""
    op = invfunc.operation(lambda x, weight: x @ weight)

    @op.share_of("weight")
    def _(cotangent, x, weight):
        return "vno,ni->io", 2 * cotangent, x

    return op


def test_a_wrong_rule_of_an_operation():
    op, rand = doubled(), Numbers()
    args = {"layer": {"w": rand(3, 2)}}, rand(5, 3), rand(5, 2)

    def f(p, x, y):
        return (op(x, p["layer"]["w"]).tanh() - y).square().sum(1)

    with pytest.raises(AssertionError) as failed:
        laws.check(f, *args)
    told = str(failed.value)
    assert "a law does not hold: shares sum to the gradient" in told
    assert "['layer']['w'][" in told and "samples: [0], of 5" in told
    assert "laws.check(f, params, *batch, only=['shares sum to the gradient'], samples=[0], seed=0)" in told
    with pytest.raises(AssertionError, match="of 1"):
        laws.check(f, *args, only="shares sum to the gradient", samples=[0])


@pytest.mark.parametrize("loss", [None, F.mse_loss], ids=["[N] losses", "model and loss"])
def test_a_model_that_mixes_its_samples(loss):
    rand = Numbers()
    w, x, y = rand(3, 2), rand(5, 3), rand(5, 2)

    def f(w, x, y=None):
        z = F.batch_norm(x @ w, None, None, training=True)
        return z if y is None else (z - y).square().sum(1)

    with pytest.raises(AssertionError) as failed:
        laws.check(f, w, x, y, loss=loss)
    told = str(failed.value)
    assert "a law does not hold: samples do not mix" in told and "samples: [0, 1], of 5" in told
    assert "batch_norm" in told  # the library refuses it, and says where
