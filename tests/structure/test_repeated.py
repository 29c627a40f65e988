"""Parameters that a function repeats for its samples, as class tokens and learned positions, hide no structure."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import diag_ggn, explain
from invfunc.testing import peak_memory
from tests.laws import composed
from tests.strategies import Numbers
from tests.structure.test_columns import STATISTICS, assert_as_dense
from tests.structures import always

REPEATED = {
    "expand": lambda p, n: p.expand(n, *p.shape[1:]),
    "repeat": lambda p, n: p.repeat(n, 1, 1),
    "zeros and": lambda p, n: torch.zeros(n, *p.shape[1:], dtype=p.dtype) + p,
    "rows": lambda p, n: F.embedding(torch.arange(p.shape[1]).expand(n, -1), p[0]),
    "one for all tokens": lambda p, n: p[:, :1].expand(n, p.shape[1], -1),
    "scaled": lambda p, n: (0.5 * p).expand(n, -1, -1),
    "twice": lambda p, n: torch.cat([p.expand(n, -1, -1)[..., :1], p.expand(n, -1, -1)[..., 1:]], 2),
}
"""A parameter `[1, k, d]` as `[N, k, d]`."""
JOINED = {
    "none": lambda h, t: h,
    "add": lambda h, t: h + t,
    "scale": lambda h, t: h * t,
    "in place": lambda h, t: h.clone().add_(t),
    "class token": lambda h, t: torch.cat([t[:, :1], h], 1),
    "class token, dropped": lambda h, t: torch.cat([t[:, :1], h], 1)[:, 1:],
    "registers": lambda h, t: torch.cat([h, t[:, :2]], 1),
    "features": lambda h, t: torch.cat([h[..., 1:], t[..., :1]], 2),
    "masked": lambda h, t: torch.where((torch.arange(h.shape[1]) % 2 == 0)[:, None], t, h),
    "stack": lambda h, t: torch.stack([h, t], 3).sum(3),
    "tokens first": lambda h, t: (h.transpose(0, 1) + t.transpose(0, 1)).transpose(0, 1),
}
MIXED = {
    "each token": lambda h, p: (h @ p["a"]).tanh(),
    "neighbours": lambda h, p: F.conv1d(h.mT, p["k"], padding=1).mT.tanh(),
    "all tokens": lambda h, p: F.scaled_dot_product_attention(h, h @ p["a"], h),
}


@st.composite
def models(draw):
    """A function of patches with one or two repeated parameters, and its arguments."""
    n, k, d, out = (draw(st.integers(low, high)) for low, high in ((1, 3), (2, 4), (2, 3), (1, 3)))
    rand = Numbers(draw(st.integers(0, 9)))
    kinds = [(draw(st.sampled_from([*REPEATED])), draw(st.sampled_from([*JOINED]))) for _ in range(2)]
    mixing = [draw(st.sampled_from([*MIXED])) for _ in range(2)]
    embeds, again = draw(st.booleans()), draw(st.booleans())

    def f(p, x):
        h = x @ p["e"] if embeds else x
        for (repeated, joined), mixed, name in zip(kinds, mixing, ("t", "t" if again else "u"), strict=True):
            token = p[name] if h.shape[1] == k else p[name][:, :1].expand(-1, h.shape[1], -1)
            h = MIXED[mixed](JOINED[joined](h, REPEATED[repeated](token, len(x))), p)
        return h @ p["b"]

    params = {"e": rand(d, d), "t": rand(1, k, d), "u": rand(1, k, d)}
    params |= {"a": rand(d, d), "k": rand(d, d, 3), "b": rand(d, out)}
    x = rand(n, k, d)
    return f, params, x, rand(*f(params, x).shape)


@settings(max_examples=26)
@given(data=st.data())
def test_it_is_that_of_all_columns(data):
    f, *args = data.draw(models())
    called = data.draw(st.sampled_from([*STATISTICS]))
    functions = (f, F.mse_loss) if data.draw(st.booleans()) else (composed(f, F.mse_loss),)
    assert_as_dense(partial(STATISTICS[called], *functions), args, refusable=called.startswith("exact kfac"))


def patches(repeated, joined, n, tokens=6):
    """Patches that are predicted one by one, with learned positions or a class token."""
    rand = Numbers(1)

    def f(p, x):
        h = JOINED[joined](x @ p["e"], REPEATED[repeated](p["t"], len(x)))
        return (h @ p["a"]).tanh() @ p["b"]

    params = {"e": rand(3, 2), "t": rand(1, tokens, 2), "a": rand(2, 2), "b": rand(2, 4)}
    x = rand(n, tokens, 3)
    return f, (params, x, rand(*f(params, x).shape))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("joined", [*JOINED])
@pytest.mark.parametrize("repeated", ["expand", "repeat", "zeros and"])
def test_the_structure_is_seen(repeated, joined, n):
    f, args = patches(repeated, joined, n)
    for make in (diag_ggn(f, F.mse_loss), diag_ggn(f, F.mse_loss, per_sample=True), invfunc.ggn_trace(f, F.mse_loss)):
        with always():
            told = explain(make)(*args)
        assert told.why == "by the structure of the function" and told.passes <= told.columns / 2


def test_no_sample_has_the_tokens_of_all():
    """The shares of a repeated parameter take the memory of one entry for each sample, not of one for each pair."""
    n, shape = 32, (1, 16, 8)
    p, x = torch.randn(shape), torch.randn(n, *shape[1:])
    make = invfunc.batch_l2_grad(lambda p, x: (x * p.expand_as(x)).tanh().sum((1, 2)))
    make(p, x)
    peak = peak_memory(lambda: make(p, x))[1]
    assert peak < 4 * 12 * n * p.numel(), peak
