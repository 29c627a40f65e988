"""What was wrong or failed once in the exact GGN by structure."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, explain
from invfunc.testing import dense_diag_ggn
from tests.strategies import Numbers
from tests.structure.test_columns import assert_as_dense
from tests.structures import always


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
