"""Programs in which samples mix, or parameters come by unseen ways: the result of the loop, or an error."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import InvFuncError, batch_grad, diag_ggn, tree
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.core.hostile import PROGRAMS, SIZES, TERMS, data


def wanted(name, n):
    """The per-sample gradients of the loop; None if samples are mixed to a number, or plain autograd fails."""
    f, args = PROGRAMS[name], data(n)
    try:
        whole = f({k: p.clone().requires_grad_() for k, p in args[0].items()}, *args[1:]).detach()
        terms = TERMS.get(name)
        if whole.ndim:
            return loop_batch_grad(terms or f)(*args)
        terms = terms if n > 1 else lambda *args: f(*args)[None]
        if terms is None:
            return None
        assert_trees_close(terms(*args).sum() + (3 if "constant" in name and n > 1 else 0), whole, 1e-12)
        return loop_batch_grad(terms)(*args)
    except (RuntimeError, ValueError):
        return None


WAYS = {
    "plain": lambda t, params, x, y: t(params, x, y),
    "differentiable": lambda t, params, x, y: t({k: p.requires_grad_() for k, p in params.items()}, x, y),
    "within vmap": lambda t, params, x, y: tree.map_tensors(
        lambda g: g[1], torch.func.vmap(t, (None, 0, 0))(params, torch.stack([y, x]), torch.stack([x, y]))
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_result_is_that_of_the_loop(name, way):
    for n in SIZES if way == "plain" else (4,):
        right = wanted(name, n)
        plain = right is not None and way != "within vmap"  # torch may fail itself: then its errors do
        try:
            found = WAYS[way](batch_grad(PROGRAMS[name]), *data(n))
        except (RuntimeError, ValueError) as error:
            assert isinstance(error, InvFuncError) or not plain
            continue
        assert right is not None, f"{name}: the samples are mixed"
        assert_trees_close(found, right, 1e-8, 1e-6)


def test_most_programs_that_mix_samples_have_the_loop_too():
    """So that the law is of results, not of errors alone."""
    assert sum(wanted(name, 5) is not None for name in PROGRAMS) > 0.8 * len(PROGRAMS)


LOSSES = {
    "a square in place": lambda z, y: F.mse_loss(z.pow_(2), y),
    "a factor in place": lambda z, y: F.mse_loss(z.mul_(2), y),
    "curved beside": lambda z, y: F.mse_loss(z, y) + z.pow(4).sum(),
    "a square": lambda z, y: F.mse_loss(z, y).square(),
    "entries squared": lambda z, y: F.mse_loss(z, y, reduction="none").square().mean(),
    "entries weighted": lambda z, y: (F.mse_loss(z, y, reduction="none") * y.square()).sum(),
    "entries weighted by outputs": lambda z, y: (F.mse_loss(z, y, reduction="none") * z.square()).sum(),
    "sums of samples": lambda z, y: F.mse_loss(z, y, reduction="none").sum(1),
    "some of the outputs": lambda z, y: F.mse_loss(z[:, :2], y[:, :2]),
    "a view": lambda z, y: F.mse_loss(z.view(-1), y.view(-1)),
    "a turned view": lambda z, y: F.mse_loss(z.T, y.T),
    "samples turned": lambda z, y: F.mse_loss(z.flip(0), y),
    "arguments swapped": lambda z, y: F.mse_loss(y, z),
    "the outputs as targets": lambda z, y: F.mse_loss(z, z * 0.5),
    "the outputs as targets of classes": lambda z, y: F.cross_entropy(z, z.softmax(1)),
    "two criteria": lambda z, y: F.mse_loss(z, y) + F.cross_entropy(z, y.softmax(1)),
    "twice": lambda z, y: F.mse_loss(z, y) + F.mse_loss(z, -y),
    "centred": lambda z, y: F.mse_loss(z - z.mean(0), y),
    "products of samples": lambda z, y: F.mse_loss(z @ z.T, y @ y.T),
    "classes in dim 0": lambda z, y: F.cross_entropy(z.T, y.T.softmax(1)),
    "logits of a square": lambda z, y: F.binary_cross_entropy_with_logits(z.square(), y.sigmoid()),
    "weights of positives": lambda z, y: F.binary_cross_entropy_with_logits(z, y.sigmoid(), pos_weight=y[0].exp()),
    "in halves": lambda z, y: F.mse_loss(z[::2], y[::2]) + F.mse_loss(z[1::2], y[1::2]),
    "minus": lambda z, y: -F.mse_loss(z, y),
    "times a detached loss": lambda z, y: F.mse_loss(z, y) * F.mse_loss(z, y).detach(),
    "exponents": lambda z, y: (-F.mse_loss(z, y)).exp(),
}
MODELS = {
    "linear": lambda p, x: x @ p["w"],
    "batch norm": lambda p, x: F.batch_norm(x @ p["w"], None, None, p["b"], training=True),
    "centred": lambda p, x: (x @ p["w"] - (x @ p["w"]).mean(0)).sin(),
    "samples last": lambda p, x: p["w"] @ x.T,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_diagonal_of_the_ggn_is_the_dense_one(name):
    """Of outputs and their loss, and of both in one, of which the outputs are what the criterion gets."""
    p, x, y = data(4)
    for f in MODELS.values():
        whole = diag_ggn(lambda p, x, y, f=f: LOSSES[name](f(p, x), y))
        for t in (diag_ggn(f, LOSSES[name]), whole)[: 1 if "a square" in name and name != "a square" else 2]:
            try:
                found = t(p, x, y)
            except InvFuncError:
                continue
            wanted = dense_diag_ggn(f, lambda z, y: LOSSES[name](z.clone(), y))(p, x, y)
            assert_trees_close(found, wanted, 1e-8, 1e-6)
