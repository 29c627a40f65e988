"""Parameters, and what they are computed with, written into tensors of samples in place: a mask token, a class token, a
scale of some channels."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import InvFuncError, batch_grad, diag_ggn
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N, T, D, EXACT = 4, 3, 4, 1e-9
P = {"w": Numbers()(D, D), "token": Numbers(1)(D), "v": Numbers(2)(D, 2)}


def mask_token(h, x, m, p):
    h[m] = p["token"]
    return h


def derived_token(h, x, m, p):
    h[m] = p["token"].exp() * 2
    return h


def entries(h, x, m, p):
    h[m, 1:3] = p["token"][:2]
    return h


def one_place(h, x, m, p):
    h[:, 0] = p["token"]
    return h


def one_number(h, x, m, p):
    h[:, :, 1] = p["token"][0]
    return h


def twice(h, x, m, p):
    h[:, 0] = p["token"]
    h[:, 0] *= p["token"]
    return h


def scaled(h, x, m, p):
    h[:, :, :2] *= p["token"][:2]
    return h


def scaled_data(h, x, m, p):
    z = x.clone()
    z[..., 1:] *= p["token"][1:]
    return z @ p["w"] + h


def features_in_data(h, x, m, p):
    z = x.clone()
    z[:, :2] = h[:, 1:] * p["token"]
    return z.tanh() @ p["w"]


def data_in_features(h, x, m, p):
    z = h * p["token"]
    z[:, 1] = x[:, 0]
    return z


def a_view_of_data(h, x, m, p):
    z = x.clone()
    first = z[:, :1]
    first += h[:, 1:2] * p["token"]
    return z + first


def filled(h, x, m, p):
    return h.masked_fill_(m[..., None], p["token"][0])


def copied(h, x, m, p):
    h[:, 0].copy_(p["token"])
    return h


def copied_into_what_is_new(h, x, m, p):
    return torch.empty_like(h).copy_(p["token"].exp()) * h


def put(h, x, m, p):
    return h.index_put_((m,), p["token"].exp())


def added(h, x, m, p):
    return h.index_put_((m,), p["token"], accumulate=True)


WAYS = [mask_token, derived_token, entries, one_place, one_number, twice, scaled, scaled_data]
WAYS += [features_in_data, data_in_features, a_view_of_data]
WAYS += [filled, copied, copied_into_what_is_new, put, added]
each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def outputs(way):
    return lambda p, x, m: torch.tanh(way((x @ p["w"]).sin(), x, m, p)).mean(1) @ p["v"]


def losses(way):
    return lambda p, x, m, y: F.cross_entropy(outputs(way)(p, x, m), y, reduction="none")


def batch(seed, n=N):
    g = torch.Generator().manual_seed(seed)
    return Numbers(seed)(n, T, D), torch.rand(n, T, generator=g) < 0.4, torch.randint(2, (n,), generator=g)


@each_way
@given(seed=st.integers(0, 99), n=st.integers(1, 5))
def test_shares_are_those_of_the_loop(way, seed, n):
    f, data = losses(way), batch(seed, n)
    wanted = torch.func.jacrev(f)(P, *data)
    assert_trees_close(batch_grad(f)(P, *data), wanted, EXACT)
    mean = batch_grad(lambda *a: f(*a).mean())(P, *data)
    assert_trees_close(mean, {k: v / n for k, v in wanted.items()}, EXACT)


@each_way
def test_of_the_criterion(way):
    f, data = losses(way), batch(0)
    if way in (filled, put, added):
        with pytest.raises(InvFuncError):  # the last resort has no columns
            diag_ggn(f)(P, *data)
        return
    probs = outputs(way)(P, *data[:2]).softmax(1)
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    jacobian = torch.func.jacrev(outputs(way))(P, *data[:2])
    wanted = {k: torch.einsum("nc...,ncd,nd...->...", j, hessian, j) for k, j in jacobian.items()}
    assert_trees_close(diag_ggn(f)(P, *data), wanted, EXACT)
