"""What was wrong or failed once in the exact GGN by structure."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import diag_ggn, explain, functional
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.strategies import Numbers
from tests.structure.test_columns import assert_as_dense
from tests.structures import always


def bottleneck(dtype):
    torch.manual_seed(0)
    f, params = functional(nn.Sequential(nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 12)).to(dtype))
    return f, (params, torch.randn(4, 12).to(dtype), torch.zeros(4, 12, dtype=dtype))


@pytest.mark.parametrize("constant", ["scale", "places", "index"])
def test_constants_for_places_in_the_batch(constant):
    rand = Numbers(3)
    scale, index = rand(9, 1), rand(9, 6).argsort(1)
    parts = {
        "scale": lambda h: h * scale[: len(h)],
        "places": lambda h: h * (1 + torch.arange(len(h)))[:, None],
        "index": lambda h: h.gather(1, index[: len(h)]),
    }

    def f(p, x):
        return parts[constant]((x @ p["a"].T).tanh() @ p["b"].T)

    args = ({"a": rand(2, 6), "b": rand(6, 2)}, rand(5, 6), rand(5, 6))
    assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)


@pytest.mark.quick
def test_blocks_of_several_groups_at_a_narrow_layer():
    rand = Numbers(3)

    def f(p, x):
        return F.linear(F.linear(x, p["a"]).tanh(), p["b"])  # at each of three positions 4 numbers, then 9

    args = ({"a": rand(4, 5), "b": rand(9, 4)}, rand(2, 3, 5), rand(2, 3, 9))
    assert_as_dense(partial(diag_ggn, f, F.mse_loss), args)


@pytest.mark.quick
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_half_precision_at_a_narrow_layer(low):
    f, args = bottleneck(low)
    with always():
        found = diag_ggn(f, F.mse_loss)(*args)
    assert_trees_close(found, diag_ggn(f, F.mse_loss, method="dense")(*args), 0.05)


def test_autocast_at_a_narrow_layer():
    f, args = bottleneck(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with always():
            found = diag_ggn(f, F.mse_loss)(*args)
        wanted = diag_ggn(f, F.mse_loss, method="dense")(*args)
    assert_trees_close(found, wanted, 0.05)


def test_saturated_pixels_in_closed_form_and_single_precision():
    """1 - p of a p near 1 has no digits left."""
    w, x = torch.tensor([20.0, 2.0, -8.0]).reshape(3, 1, 1, 1), torch.ones(2, 1, 3, 3)
    make, args = diag_ggn(lambda w, x: F.conv2d(x, w), F.cross_entropy), (x, torch.zeros(2, 3, 3).long())
    with always():
        assert [part.way for part in explain(make)(w, *args).parts] == ["closed form"]
        found = make(w, *args)
    wanted = dense_diag_ggn(lambda w, x: F.conv2d(x, w), F.cross_entropy)(w.double(), x.double(), args[1])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "classes"), [(torch.bfloat16, 263), (torch.float16, 2051)])
def test_outputs_that_are_more_than_a_dtype_counts(dtype, classes):
    """Where entries are moved before the criterion, their numbers are pulled back in its precision."""

    def loss(z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())

    rand = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*size, generator=rand).to(dtype) for size in ((4, classes), (2, 1, 4)))
    y = torch.randint(classes, (2, 1), generator=rand)
    found, wanted = (diag_ggn(lambda w, x: x @ w, loss, method=method)(w, x, y) for method in ("auto", "dense"))
    assert (found - wanted).abs().max() <= 4 * torch.finfo(dtype).eps * wanted.abs().max()
