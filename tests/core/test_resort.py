"""Programs that are not followed: single samples, or rows of the losses, are right, or there is an error."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

import invfunc
from invfunc import InvFuncError, batch_grad, tree
from invfunc.core import resort
from invfunc.core.ways import known_way
from invfunc.statistic import Statistic
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.core.hostile import Sums
from tests.rows import FIRST_ORDER

EXACT = {torch.float64: 1e-8, torch.float32: 1e-3}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The core is asked alone, of which the result has to come by the last resort."""

    def engine(*_, **__):
        raise InvFuncError("the core does not take it")

    monkeypatch.setattr(Statistic, "_engine", engine)


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return invfunc.functional(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype))


f, P = net()
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def slope(out, x):
    return torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)[0]


class Square(torch.autograd.Function):
    """A square, which torch.func does not take."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, *d):
        return 2 * d[0] * ctx.saved_tensors[0]


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, z):
        return (10 * z).round() / 10

    @staticmethod
    def backward(ctx, *d):
        return d[0]


@torch.jit.script
def swish(x):
    return x * torch.sigmoid(x)


def wgan(p, x):
    """A penalty of the slope between two samples, at a place that is drawn."""
    other, eps = x.roll(1, 1), torch.rand(len(x), 1, dtype=x.dtype)
    between = (eps * x + (1 - eps) * other).requires_grad_(True)
    return (f(p, x) - f(p, other))[:, 0] + 10 * (slope(f(p, between), between).norm(dim=1) - 1) ** 2


def physics(p, x):
    x = x.clone().requires_grad_()
    u = f(p, x)
    first = slope(u, x)
    return (first[:, 1] - slope(first[:, 0], x)[:, 0] + u[:, 0] * first[:, 2]) ** 2


def physics_by_torch_func(p, x):
    def u(r):
        return f(p, r[None])[0, 0]

    return vmap(lambda r: (grad(u)(r)[0] - hessian(u)(r).trace()) ** 2)(x)


def sliced_score(p, x):
    v, x = torch.randn_like(x), x.detach().requires_grad_()
    score = -torch.autograd.grad(f(p, x).sum(), x, create_graph=True)[0]
    (along,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
    return (along * v).sum(1) + score.square().sum(1) / 2


def meta(p, x):
    def task(r):
        inner = grad(lambda p: (f(p, r[None]) - 1).square().sum())(p)
        return (f({k: p[k] - 0.1 * inner[k] for k in p}, r.flip(0)[None]) - 2).square().sum()

    return torch.stack([task(r) for r in x])


def meta_by_autograd(p, x):
    found = []
    for r in x:
        inner = torch.autograd.grad((f(p, r[None]) - 1).square().sum(), [*p.values()], create_graph=True)
        own = {k: w - 0.1 * g for (k, w), g in zip(p.items(), inner, strict=True)}
        found.append((f(own, r.flip(0)[None]) - 2).square().sum())
    return torch.stack(found)


PROGRAMS = {
    "WGAN-GP": wgan,
    "physics": physics,
    "physics by torch.func": physics_by_torch_func,
    "sliced score matching": sliced_score,
    "MAML": meta,
    "MAML by autograd": meta_by_autograd,
    "jvp": lambda p, x: jvp(lambda x: f(p, x), (x,), (x.cos(),))[1].square().sum(1),
    "vjp": lambda p, x: vjp(lambda x: f(p, x), x)[1](torch.ones_like(x[:, :1]))[0].square().sum(1),
    "jacrev": lambda p, x: vmap(jacrev(lambda r: f(p, r)))(x).square().sum((1, 2)),
    "custom Function": lambda p, x: Square.apply(f(p, x)).sum(1),
    "straight through": lambda p, x: (Rounded.apply(f(p, x)) * x).square().sum(1),
    "jit": lambda p, x: swish(f(p, x)).square().sum(1),
    "a loop": lambda p, x: torch.stack([f(p, r[None]).square().sum() for r in x]),
    "squeezed": lambda p, x: swish(f(p, x)).squeeze().square(),
}
REDUCTIONS = {"none": lambda z: z, "mean": torch.mean, "sum": torch.sum}


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_single_samples_are_those_of_the_loop(name, reduction, dtype):
    """Also of one sample, with the numbers that f draws, after which the generator is where f leaves it."""
    for x in (X, X[:1]):
        params, x = tree.map_tensors(lambda z: z.to(dtype), (P, x))
        torch.manual_seed(7)
        losses = PROGRAMS[name] if name != "squeezed" or len(x) > 1 else lambda p, x: PROGRAMS[name](p, x)[None]
        wanted, after = loop_batch_grad(losses)(params, x.clone()), torch.rand(3)
        torch.manual_seed(7)
        t = batch_grad(lambda p, x: REDUCTIONS[reduction](PROGRAMS[name](p, x)))
        for _ in range(2):
            torch.manual_seed(7)
            found = t(params, x.clone())
            assert len(x) == 1 or name == "a loop" or known_way(t.f, t.called)
            assert not any(g.requires_grad for g in found.values())
            assert torch.equal(torch.rand(3), after)
            shares = {k: g / len(x) for k, g in wanted.items()} if reduction == "mean" else wanted
            assert_trees_close(found, shares, EXACT[dtype], 1e-2)


@pytest.mark.parametrize("name", ["WGAN-GP", "jacrev", "straight through"])
def test_all_statistics_are_of_these_shares(name):
    torch.manual_seed(3)
    shares = loop_batch_grad(PROGRAMS[name])(P, X)
    for row in FIRST_ORDER.values():
        torch.manual_seed(3)
        assert_trees_close(row.make(PROGRAMS[name])(P, X), row.of_shares(shares), 1e-7, 1e-2)


def total(result) -> torch.Tensor:
    return sum(x.cos().sum() for x in tree.tensors(result))


@pytest.mark.parametrize("name", ["WGAN-GP", "physics", "custom Function", "jacrev", "MAML"])
def test_derivatives_of_a_statistic_are_those_of_the_loop(name):
    row, given = FIRST_ORDER["variance"], {k: p.clone().requires_grad_() for k, p in P.items()}
    torch.manual_seed(3)
    each = row.of_shares(loop_batch_grad(PROGRAMS[name])(given, X))
    wanted = torch.autograd.grad(total(each), [*given.values()], materialize_grads=True, allow_unused=True)
    torch.manual_seed(3)
    found = total(row.make(PROGRAMS[name])(given, X))
    found = torch.autograd.grad(found, [*given.values()], materialize_grads=True, allow_unused=True)
    assert_trees_close([*found], [*wanted], 1e-6, 1e-2)
    if name in ("jacrev", "MAML"):  # torch.func takes the others no more than f itself
        t = row.make(PROGRAMS[name])
        assert_trees_close([*grad(lambda p: total(t(p, X)))(P).values()], [*wanted], 1e-6, 1e-2)
        both = vmap(t, (None, 0))(P, torch.stack([X.cos(), X]))
        assert_trees_close(tree.map_tensors(lambda g: g[1], both), t(P, X), 1e-8)


def test_a_tensor_that_is_closed_over_has_a_derivative():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    t = batch_grad(lambda p, x: (scale * physics(p, x)).mean())
    (found,) = torch.autograd.grad(t(P, X)["0.weight"].square().sum(), scale)
    wanted = (loop_batch_grad(physics)(P, X)["0.weight"] / 5).square().sum() * 2 * scale
    assert_trees_close(found, wanted.detach(), 1e-8)


def forces(p, x):
    return -vmap(grad(lambda r: f(p, r[None])[0, 0]))(x)


def test_outputs_have_jacobians_and_a_ggn():
    y = X.flip(0)
    wanted = dense_diag_ggn(forces, F.mse_loss)(P, X, y)
    assert_trees_close(invfunc.diag_ggn(forces, F.mse_loss)(P, X, y), wanted, 1e-8)
    assert_trees_close(invfunc.batch_jacobian(forces)(P, X), jacrev(forces)(P, X), 1e-8)
    last = invfunc.batch_jacobian(lambda p, x: forces(p, x.T).T, in_dims=1, out_dims=1)(P, X.T)
    assert_trees_close(last, jacrev(forces)(P, X), 1e-8)
    shares = loop_batch_grad(physics)(P, X)
    assert_trees_close(batch_grad(physics, samples=[4, 1])(P, X), tree.map_tensors(lambda g: g[[4, 1]], shares), 1e-8)
    found, aux = batch_grad(lambda p, x: (physics(p, x).mean(), {"x": x.sum()}), has_aux=True)(P, X)
    assert_trees_close((found, aux), (tree.map_tensors(lambda g: g / 5, shares), {"x": X.sum()}), 1e-8)


NORM = nn.BatchNorm2d(1).double()
REFUSED = {
    "a weighted mean": lambda p, x: (physics(p, x) * x[:, 0].softmax(0)).sum(),
    "a square of a mean": lambda p, x: physics(p, x).mean() ** 2,
    "a sum and a term of the parameters": lambda p, x: physics(p, x).sum() + p["0.weight"].square().sum(),
    "the parameters alone": lambda p, x: swish(p["0.weight"]).sum(),
    "batch norm in train mode": lambda p, x: NORM(forces(p, x)[:, None, None]).square().sum((1, 2, 3)),
    "a batch norm by hand": lambda p, x: (lambda z: (z - z.mean(0)).square().sum(1))(forces(p, x)),
    "a batch norm by jit": torch.jit.trace(lambda z: z - z.mean(0), X[:, :1]),
    "a backward pass that mixes": lambda p, x: Sums.apply(x @ p["0.weight"].T).sin().sum(1),
    "other numbers for each": lambda p, x: physics(p, x) * torch.randn(3).prod(),
    "a table that is written": lambda p, x: F.embedding(x.argmax(1), p["0.weight"], max_norm=0.1).square().sum(1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_mix_are_refused(name):
    """With no trace in the module, the parameters or the generator."""
    g = REFUSED[name]
    if "jit" in name:
        traced = g
        g = lambda p, x: traced(f(p, x)).square().sum(1)  # noqa: E731
    before = tree.map_tensors(torch.clone, (P, NORM.running_mean))
    try:
        found = batch_grad(g)(P, X)
    except InvFuncError:
        assert_trees_close((P, NORM.running_mean), before, 0)
    else:
        assert name == "other numbers for each" and found


def test_zeros_do_not_say_whether_they_are_a_mean_or_a_sum():
    """An error where samples cancel; where all are zero the answer does not matter."""
    with pytest.raises(InvFuncError):
        batch_grad(lambda p, x: Rounded.apply(x @ p["0.weight"].T).sum())(P, torch.cat([X, -X]))
    found = batch_grad(lambda p, x: 0 * physics(p, x).sum())(P, X)
    assert not any(g.any() for g in found.values())


GROUP = torch.tensor([0, 0, 1, 1, 1, 2])
ADJACENT = torch.eye(6).roll(1, 0).double() + torch.eye(6).double()
W = {"w": X[:4, :3].clone(), "b": X[4, :3].clone()}
ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def graphs(p, x, y):
    return F.cross_entropy(torch.zeros(3, 3).double().index_add(0, GROUP, (x @ p["w"]).tanh()), y, reduction="none")


def nodes(p, x, y):
    return F.cross_entropy(ADJACENT @ (x @ p["w"] + p["b"]).tanh(), y, reduction="none")


def bags(p, x, y):
    table, offsets = torch.cat([p["w"], p["w"].sin()]), torch.tensor([0, 1, 4])
    return (F.embedding_bag(GROUP, table, offsets).square().sum(1) - y.double()).square()


@pytest.mark.parametrize(("losses", "n"), [(graphs, 3), (nodes, 6), (bags, 3)])
def test_losses_of_groups_of_rows_have_their_rows(losses, n, monkeypatch):
    monkeypatch.setattr(resort, "ROWS", 2)
    y = torch.arange(n) % 3
    shares = loop_batch_grad(losses)(W, ROWS, y)
    for name in ("batch_grad", "variance", "batch_l2_grad", "gram"):
        t = getattr(invfunc, name)(losses, in_dims=(None, 0))
        assert_trees_close(t(W, ROWS, y), FIRST_ORDER[name].of_shares(shares), 1e-8, 1e-2)
    if losses is bags:
        return  # of which torch has no second derivative
    given = {k: p.clone().requires_grad_() for k, p in W.items()}
    wanted = total(loop_batch_grad(losses)(given, ROWS, y))
    found = total(batch_grad(losses, in_dims=(None, 0))(given, ROWS, y))
    options = {"materialize_grads": True, "allow_unused": True}
    pairs = [torch.autograd.grad(z, [*given.values()], **options) for z in (found, wanted)]
    assert_trees_close(*map(list, pairs), 1e-8, 1e-2)


def test_rows_of_samples_that_mix_are_refused():
    for mixed in (lambda z: z.softmax(0), lambda z: z - z.mean(0), swish_of_sums):
        with pytest.raises(InvFuncError):
            batch_grad(lambda p, x, m=mixed: m(x @ p["w"]).square().sum(1) + x[:, 0] * p["b"].sum())(W, ROWS)


@torch.jit.script
def swish_of_sums(x):
    return x * torch.sigmoid(x.sum(0))


def test_samples_alone_warn_of_nothing(recwarn):
    """`torch.func.vmap` warns of operations without a batching rule, of which the caller knows nothing."""
    batch_grad(lambda p, x: Rounded.apply(F.embedding_bag(x.sign().long() + 1, p["w"])).sum())(W, ROWS)
    assert not [w for w in recwarn.list if "performance drop" in str(w.message)]
