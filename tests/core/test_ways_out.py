"""Programs of which some form is refused, with the form that its error names, and systems of equations."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, chunked, diag_ggn
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.strategies import Numbers

N, T = 4, 4
P, X, Y = Numbers()(3, 3), Numbers(1)(N, 3), Numbers(2)(N, 3)
EXACT = 1e-9


def apart(f, params, *batch):
    """The gradients of each sample's loss, from f on a batch of one."""
    shares = [torch.func.grad(lambda p, n=n: f(p, *(x[n : n + 1] for x in batch)).sum())(params) for n in range(N)]
    return {k: torch.stack([g[k] for g in shares]) for k in params} if isinstance(params, dict) else torch.stack(shares)


def test_ctc():
    x, y = Numbers(3)(N, T, 3), Numbers(4).below(2, N, 2) + 1

    def ctc(p, x, y, reduction="none"):
        z = (x @ p).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(z, y, torch.full((len(x),), T), torch.full((len(x),), 2), reduction=reduction)

    found = batch_grad(lambda p, x, y: ctc(p, x, y, "mean"))(P, x, y)  # divided by the lengths of the targets, too
    assert_trees_close(found, apart(ctc, P, x, y) / 2 / N, EXACT)
    assert_trees_close(batch_grad(ctc)(P, x, y), apart(ctc, P, x, y), EXACT)


MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]])


def masked(p, x, mask):
    return (x if mask.all() else x * mask) @ p


@pytest.mark.parametrize("n", [2, 4])  # a part of one sample would be broadcast to the whole mask
@pytest.mark.parametrize(("f", "given"), [(masked, {"mask": MASK}), (lambda p, x: masked(p, x, MASK), {})])
def test_a_mask_in_parts_is_a_batch_argument(f, given, n):
    for t in (diag_ggn(f, F.mse_loss), batch_grad(lambda p, x, y, **given: F.mse_loss(f(p, x, **given), y))):
        with pytest.raises(SampleAxisError, match="such as a mask or indices, goes among its batch arguments"):
            chunked(t, n, over="samples")(P, X, Y, **given)

    def f_of_mask(p, x, mask):
        return (x * mask) @ p

    wanted = dense_diag_ggn(f_of_mask, F.mse_loss)(P, X, MASK, Y)
    assert_trees_close(chunked(diag_ggn(f_of_mask, F.mse_loss), n, over="samples")(P, X, MASK, Y), wanted, EXACT)
