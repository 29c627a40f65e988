"""Parameters that a function repeats for its samples, as class tokens and learned positions, hide no structure."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import diag_ggn, explain
from tests.strategies import Numbers
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
