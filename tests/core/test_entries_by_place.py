"""A parameter with an entry for each sample: in any operation, the share of sample n comes from its own places only."""

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import InvFuncError, batch_grad, chunked, gram
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-10
FORMS = {
    "where": lambda p, x, i: torch.where(i[:, None] > 0, p, x),
    "take_along_dim": lambda p, x, i: p.take_along_dim(i[:, None], 1) * x,
    "take_along_dim of an expanded one": lambda p, x, i: (
        p.expand(len(x), *p.shape).take_along_dim(i[:, None, None], 1)[:, 0] * x
    ),
    "gather": lambda p, x, i: p.gather(1, i[:, None]) * x,
    "p[arange, i]": lambda p, x, i: p[torch.arange(len(x)), i][:, None] * x,
    "index_copy": lambda p, x, i: x.index_copy(1, torch.tensor([0]), p[:, :1]),
    "index_put": lambda p, x, i: torch.index_put(x * p, (torch.arange(len(x)), i), p[:, 0]),
    "scatter": lambda p, x, i: x.scatter(1, i[:, None], p[:, :1]),
    "scatter_add": lambda p, x, i: x.scatter_add(1, i[:, None], p[:, :1]),
    "masked_scatter": lambda p, x, i: x.masked_scatter((i > 0)[:, None].expand_as(x), p),
    "masked_scatter of another length": lambda p, x, i: x.masked_scatter((i > 0)[:, None].expand_as(x), p.repeat(2, 1)),
    "slice_scatter": lambda p, x, i: torch.slice_scatter(x.repeat(1, 2), p[:, :1], 1, 0, 1),
    "select_scatter": lambda p, x, i: torch.select_scatter(x.repeat(1, 2), p[:, 0], 1, 1),
    "cat": lambda p, x, i: torch.cat([x, p], 1),
    "stack": lambda p, x, i: torch.stack([x, p], 1).flatten(1),
    "solve": lambda p, x, i: torch.linalg.solve(
        p[:, :, None] * p[:, None] + 2 * torch.eye(p.shape[1]).to(p), x[..., None]
    )[..., 0],
    "vecdot": lambda p, x, i: torch.linalg.vecdot(x, p)[:, None],
    "cosine_similarity": lambda p, x, i: F.cosine_similarity(torch.cat([x, x.exp()], 1), torch.cat([p, p.sin()], 1))[
        :, None
    ],
    "pairwise_distance": lambda p, x, i: F.pairwise_distance(x, p)[:, None],
    "attention": lambda p, x, i: F.scaled_dot_product_attention(x[:, None], p[:, None], p[:, None])[:, 0],
    "cdist": lambda p, x, i: torch.cdist(x, p),
}
FOLLOWED = [FORMS[name] for name in ("where", "take_along_dim of an expanded one", "cdist")]
"""What is right of any loss; the others are right, or an error."""


def jacobian(f, p):
    """Entry by entry, without vmap, of which some derivatives are wrong."""
    p = p.clone().requires_grad_()
    return torch.stack([torch.autograd.grad(e, p, retain_graph=True)[0] for e in f(p)])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=4)
@given(n=st.integers(2, 4), k=st.integers(1, 4))
def test_share_is_of_the_places_of_its_sample(form, n, k):
    rand = Numbers()
    p, x, i = rand(n, k), rand(n, k), Numbers(1).below(k, n)
    i[0] = 0  # a mask of all would leave nothing of x

    def f(p, x, i):
        return (1 + form(p, x, i)).square().sum(1)

    wanted = jacobian(lambda p: f(p, x, i), p)
    for statistic, expected in (
        (batch_grad(f), wanted),
        (batch_grad(lambda *args: f(*args).mean()), wanted / n),
        (batch_grad(f, samples=[n - 1, 0]), wanted[[n - 1, 0]]),
        (gram(f), wanted.flatten(1) @ wanted.flatten(1).T),
    ):
        with nullcontext() if form in FOLLOWED else suppress(InvFuncError):
            assert_trees_close(statistic(p, x, i), expected, EXACT)


@pytest.mark.parametrize("form", ["cat", "stack", "index_copy", "slice_scatter"])
def test_function_that_does_not_run_on_a_part_cannot_be_chunked(form):
    rand = Numbers()
    p, x, i = rand(3, 3), rand(3, 3), Numbers(1).below(3, 3)
    with pytest.raises(SampleAxisError, match="does not run on a part of the batch"):
        chunked(batch_grad(lambda *args: FORMS[form](*args).square().sum(1)), 2)(p, x, i)


def test_parameter_that_leaves_nothing_of_the_samples():
    rand = Numbers()
    with pytest.raises(SampleAxisError, match="the samples are not kept apart"):
        batch_grad(lambda p, x: torch.slice_scatter(x, p, 1, 0, 1).square().sum(1))(rand(3, 1), rand(3, 1))
