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


def test_what_a_part_decides_otherwise():
    def counted(p, x, mask):
        return masked(p, x, mask) / mask.sum()

    given = diag_ggn(counted, F.mse_loss)
    with pytest.raises(SampleAxisError, match="mixes samples.* Chunk over outputs or params"):
        chunked(given, 2, over="samples")(P, X, MASK, Y)
    wanted = dense_diag_ggn(counted, F.mse_loss)(P, X, MASK, Y)
    for over in ("outputs", "params"):
        assert_trees_close(chunked(given, 2, over=over)(P, X, MASK, Y), wanted, EXACT)
    given = diag_ggn(lambda p, x, mask, y: F.mse_loss(masked(p, x, mask), y))
    wanted = dense_diag_ggn(masked, F.mse_loss)(P, X, MASK, Y)
    assert_trees_close(chunked(given, 2, over="samples")(P, X, MASK, Y), wanted, EXACT)


def test_what_cancels_in_the_derivative_of_a_sample_alone():
    def attention(params, x, mask):  # a softmax does not change with a bias of all its entries
        h = torch.stack([(3 * k * x + k).sin() for k in range(16)], 1)
        h = h if mask.all() else h * mask[:, None]
        return ((h @ params["key"] + params["bias"]).softmax(-1) * h).mean(1)

    params = {"key": P, "bias": Numbers(5)(1)}
    given = chunked(diag_ggn(attention, F.mse_loss), 2, over="samples")(params, X, MASK, Y)
    wanted = dense_diag_ggn(attention, F.mse_loss)(params, X, MASK, Y)
    assert_trees_close(given, wanted, EXACT, floor=float(wanted["key"].amax()))


def test_what_is_solved_along_the_samples_is_refused():
    with pytest.raises(SampleAxisError, match="depends on several samples"):
        batch_grad(lambda p, x: torch.linalg.solve(x[:3] @ p, x[:3]).sum())(P, X)


def test_the_call_of_f_is_named_where_it_is_followed_in_others():
    with pytest.raises(SampleAxisError, match="at `cdist`.*: it combines samples"):
        batch_grad(lambda p, x: torch.cdist(x @ p, x @ p).mean())(P, X)
