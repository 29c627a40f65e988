"""Programs that once gave wrong numbers without a word: each is right now, or refused."""

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Dirichlet,
    Gamma,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
)
from torch.func import jacrev
from torch.utils.checkpoint import checkpoint

from invfunc import (
    InvFuncError,
    batch_grad,
    batch_jacobian,
    batch_l2_grad,
    chunked,
    diag_ggn,
    diag_hessian,
    ekfac,
    estimate_trace,
    functional,
    ggnvp,
    grad_and_variance,
    gram,
    kfac,
    operation,
    sum_grad_squared,
    together,
)
from invfunc.core.ways import known_way
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.kronecker import kfra
from invfunc.testing import (
    assert_trees_close,
    dense_diag_ggn,
    dense_diag_hessian,
    loop_batch_grad,
    loop_batch_jacobian,
    loop_gram,
)
from tests.strategies import Numbers

W, X = Numbers()(3, 3), Numbers(1)(4, 3)
EXACT = 1e-10


def assert_shares(f, *args):
    """The shares, each by itself and contracted."""
    shares = loop_batch_grad(f)(*args)
    assert_trees_close(batch_grad(f)(*args), shares, EXACT)
    assert_trees_close(sum_grad_squared(f)(*args), shares.square().sum(0), EXACT)
    assert_trees_close(batch_l2_grad(f)(*args), shares.flatten(1).square().sum(1), EXACT)


class TestTheSameParameterAtCallsThatOnlyLookAlike:
    def test_options(self):
        x, w = Numbers()(4, 2, 7), Numbers(1)(2, 2, 3)

        def f(w, x):
            strided = F.conv_transpose1d(x, w, stride=2, padding=1)[..., :7]
            return (strided.sin() * F.conv_transpose1d(x, w, dilation=2, padding=2)).flatten(1).sum(1)

        assert_shares(f, w, x)

    def test_operations_of_one_name(self):
        one, other = operation(lambda x, w: x @ w), operation(lambda x, w: x @ w.T)
        one.share_of("w")(lambda delta, x, w: ("vno,ni->io", delta, x))
        other.share_of("w")(lambda delta, x, w: ("vno,ni->oi", delta, x))
        assert_shares(lambda w, x: (one(x, w).sin() + other(x, w).cos()).sum(1), W, X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_that_is_checkpointed(kind):
    f, params = functional(kind(3, 3, batch_first=True).double())
    x = Numbers()(4, 2, 3)

    def losses(p, x):
        return checkpoint(f, p, x, use_reentrant=False)[0].sum((1, 2))

    for loss in (losses, lambda p, x: losses(p, x).sum()):
        assert_trees_close(batch_grad(loss)(params, x), loop_batch_grad(losses)(params, x), 1e-10)


def test_an_operation_that_writes_into_its_argument():
    @operation
    def doubled(x, w):
        return x.mul_(2) * w

    doubled.share_of("w")(lambda delta, x, w: ("vni,ni->i", delta, x))
    assert_trees_close(batch_grad(lambda w, x: doubled(x.clone(), w).sum(1))(W[0], X), 2 * X, EXACT)


def test_an_operation_that_reads_a_constant_of_each_sample():
    scaled = operation(lambda x, w: x * C * w)
    scaled.share_of("w")(lambda delta, x, w: ("vni,ni,ni->i", delta, x, C))
    with pytest.raises(ArgumentError, match="equation .* with operands"):
        batch_grad(lambda w, x: scaled(x, w).sum(1), samples=[1, 0, 3, 2])(W[0], X)


C = Numbers(5)(4, 3)


def test_tangents_of_forward_mode():
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(W, torch.ones_like(W))
        with pytest.raises(ArgumentError, match="jvp"):
            batch_grad(lambda w, x: (x @ w).sum(1))(w, X)


def test_autocast_around_what_is_computed_in_full_precision(device):
    w, x = W.float().to(device), X.float().to(device)

    def f(w, x):
        with torch.autocast(device.type, enabled=False):
            return (x @ w).sin().sum(1)

    with torch.autocast(device.type, torch.bfloat16):
        found = gram(f)(w, x)
    assert_trees_close(found, loop_gram(f)(w, x), 1e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_under_autocast(kind):
    f, params = functional(kind(3, 2, batch_first=True))

    def low(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            return f(params, x)[0].float().square().sum((1, 2))

    x = Numbers()(4, 5, 3).float()
    expected = loop_batch_grad(lambda p, x: f(p, x)[0].square().sum((1, 2)))(params, x)
    assert_trees_close(batch_grad(low)(params, x), expected, 5e-2)


def test_batch_norm_in_half_precision():
    f, params = functional(nn.BatchNorm1d(3).bfloat16().eval())
    x = X.bfloat16()
    expected = loop_batch_grad(lambda p, x: f(p, x).sin().sum(1))(params, x)
    assert_trees_close(batch_grad(lambda p, x: f(p, x).sin().sum(1))(params, x), expected, 2e-2)


def test_outputs_of_the_parameters_alone():
    def f(w, x):
        return w[0].expand(len(x), 3)

    assert_trees_close(batch_jacobian(f)(W, X), loop_batch_jacobian(f)(W, X), EXACT)


def test_an_operation_called_like_a_function_of_torch_that_reads_nothing():
    def tanh_like(x):
        return x.tanh()

    op = operation(tanh_like)
    assert_shares(lambda w, x: (op(x) @ w).square().sum(1), W, X)


def test_aux_of_a_function_that_is_taken_sample_by_sample():
    def f(w, x):
        return torch.fft.rfft(x @ w).abs().sum(1), x.sum(1)

    found, aux = batch_grad(f, has_aux=True)(W, X)
    assert_trees_close(found, loop_batch_grad(lambda w, x: f(w, x)[0])(W, X), EXACT)
    assert_trees_close(aux, X.sum(1), EXACT)


def test_an_operation_without_a_rule_under_autocast():
    op = operation(lambda x, w: x @ w)

    def f(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return op((x @ w).float(), w).float().square().sum(1)

    w, x = W.float(), X.float()
    expected = loop_batch_grad(lambda w, x: ((x @ w) @ w).square().sum(1))(w, x)
    assert_trees_close(batch_grad(f)(w, x), expected, 1e-1)


def test_an_operation_without_a_rule_runs_again_in_the_precision_of_autocast():
    """A product is taken in float32, since half precision would overflow."""
    op = operation(lambda h, s: h.prod(1, keepdim=True) * s)

    def f(p, x):
        with torch.autocast("cpu", torch.float16):
            return op(x @ p["w"], p["s"]).float().sum(1) * 1e-9

    args = {"s": torch.ones(2), "w": 300 + torch.zeros(3, 4)}, 0.3 + 0.01 * X.float()
    expected = loop_batch_grad(lambda p, x: (x @ p["w"]).prod(1) * p["s"].sum() * 1e-9)(*args)
    assert_trees_close(batch_grad(f)(*args), expected, 1e-2)


class Unbatched(torch.autograd.Function):
    """Twice x; its derivative looks at numbers, which vmap cannot."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g if bool(g.isfinite().all()) else g


@pytest.mark.parametrize("make", [partial(diag_ggn, method="dense"), diag_ggn, partial(diag_ggn, per_sample=True)])
def test_a_derivative_without_a_batching_rule_is_taken_column_by_column(make):
    op = operation(lambda x: Unbatched.apply(x))
    args = Numbers()(3, 4), Numbers(1)(5, 3), Numbers(2).below(4, 5)
    wanted = make(lambda w, x: 2 * (x @ w).sin(), F.cross_entropy)(*args)
    assert_trees_close(make(lambda w, x: op((x @ w).sin()), F.cross_entropy)(*args), wanted, EXACT)


def test_one_value_for_each_group_of_one_sample():
    f, params = functional(nn.GroupNorm(3, 3).double())
    found = batch_grad(lambda p, x: f(p, x).sin().sum(1), samples=[0])(params, X)
    assert_trees_close(found["bias"], torch.ones(1, 3).double(), EXACT)


# Programs that once gave wrong numbers of second order without a word: each is right now, or an error

W_BENT, X_BENT = Numbers(1)(3, 4), Numbers(2)(5, 3)
CLASSES, WEIGHTS = torch.tensor([0, 1, 2, 3, 0]), Numbers(3)(5).abs()


def linear(w, x):
    return x @ w


def squares(z, y):
    return (z - y).square().sum()


def multiplied(z, y):
    return F.cross_entropy(z, y, reduction="none").mul_(WEIGHTS).sum()


def masked(z, y):
    losses = F.cross_entropy(z, y, reduction="none")
    losses[y == 0] = 0
    return losses.sum()


@pytest.mark.parametrize("loss", [multiplied, masked])
def test_a_loss_that_is_written_to_before_it_is_summed(loss):
    wanted = dense_diag_ggn(linear, loss)(W_BENT, X_BENT, CLASSES)
    for t in (diag_ggn(linear, loss), diag_hessian(linear, loss), diag_ggn(lambda w, x, y: loss(linear(w, x), y))):
        assert_trees_close(t(W_BENT, X_BENT, CLASSES), wanted, 1e-10)


@pytest.mark.parametrize("write", [lambda h: h[:, 1:3].exp_(), lambda h: h.T.sigmoid_()], ids=["slice", "transpose"])
def test_a_view_that_is_bent_in_place(write):
    def f(w, x):
        h = x @ w
        write(h)
        return h

    target = torch.zeros(5, 4).double()
    wanted = dense_diag_hessian(lambda w, x: F.mse_loss(f(w, x), target))(W_BENT, X_BENT)
    assert_trees_close(diag_hessian(f, F.mse_loss)(W_BENT, X_BENT, target), wanted, 1e-10)


def test_a_loss_of_a_loss():
    def f(w, x, t):
        return F.mse_loss(F.mse_loss(x @ w, x, reduction="none").sum(1), t)

    square, t = Numbers(4)(3, 3), Numbers(5)(5)
    found = diag_ggn(f)(square.clone().requires_grad_(), X_BENT, t)
    assert_trees_close(found.detach(), diag_ggn(f)(square, X_BENT, t), 1e-12)


@pytest.mark.parametrize("make", [diag_hessian, partial(diag_hessian, per_sample=True)])
@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: (x * p).sin() * p,
        lambda p, x: (x + p).sin() * p,
        lambda p, x: torch.einsum("ni,ni->n", (x * p).cos(), p)[:, None] * x,
    ],
    ids=["mul", "add", "einsum"],
)
def test_a_parameter_with_an_entry_for_each_sample_that_is_read_again(f, make):
    p = Numbers(9)(5, 3)
    wanted = dense_diag_hessian(f, squares)(p, X_BENT, torch.zeros(5, 3).double())
    with suppress(SampleAxisError):
        found = make(f, squares)(p, X_BENT, torch.zeros(5, 3).double())
        assert_trees_close(found if make is diag_hessian else found.sum(0), wanted, 1e-10)


def test_a_product_through_logcumsumexp():
    def f(w, x):
        return (x @ w).logcumsumexp(1)

    J = jacrev(f)(W_BENT, X_BENT).reshape(-1, W_BENT.numel())
    found = ggnvp(f, squares)(W_BENT, W_BENT.cos(), X_BENT, torch.zeros(5, 4).double())
    assert_trees_close(found, (2 * J.T @ J @ W_BENT.cos().flatten()).reshape(W_BENT.shape), 1e-10)


IGNORED = {
    "a generator without draws": (lambda: diag_ggn(linear, squares, generator=torch.Generator()), "generator"),
    "no number of draws": (lambda: kfac(linear, squares, mc_samples=None, generator=torch.Generator()), "mc_samples"),
    "a fold of a statistic": (lambda: chunked(diag_ggn(linear, squares), 2, fold="sum"), "fold"),
    "parts of a recursion": (lambda: chunked(kfra(linear, squares), 2), "parts"),
    "a statistic for a product": (
        lambda: estimate_trace(diag_ggn(linear, squares), probes=2, generator=torch.Generator()),
        "statistic",
    ),
    "gram beside others": (lambda: together(batch_grad(squares), gram(squares)), "gram"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_options_that_would_be_ignored(case):
    make, named = IGNORED[case]
    with pytest.raises(InvFuncError, match=named):
        make()


def test_a_chain_with_indexing_and_squeezing():
    def f(p, x):
        return (x.unsqueeze(1) @ p[0]).squeeze(1).sin()[:, :3] @ p[1]

    args = [Numbers(1)(3, 4), Numbers(2)(3, 2)], X_BENT[:1], Numbers(4)(1, 2)
    found, wanted = kfra(f, F.mse_loss)(*args), kfac(f, F.mse_loss, fisher="exact")(*args)
    assert_trees_close([k.dense() for k in found], [k.dense() for k in wanted], 1e-10)


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_beside_a_hessian(order):
    f, params = functional(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    made, y = [diag_hessian(f, F.mse_loss), kfra(f, F.mse_loss)][::order], Numbers(8)(5, 2)
    found = together(*made)(params, X_BENT, y)[::order]
    assert_trees_close(found[0], dense_diag_hessian(f, F.mse_loss)(params, X_BENT, y), 1e-10)


# Losses that draw for each sample, from weights of its own: shares are those of the numbers that f has drawn

P = {"w": Numbers(0)(4, 3), "b": Numbers(1)(3)}
DIFFUSED = torch.linspace(0.1, 1, 10).double()


def z(p, x):
    return x @ p["w"] + p["b"]


def losses(z, y):
    return F.cross_entropy(z, y, reduction="none")


def labels(x):
    return x.argmax(1) % 3


def surprise(of):
    """Minus the logarithms of the probabilities of samples of a distribution."""
    each = -of.log_prob(of.sample())
    return each.reshape(len(each), -1).sum(1)


def diffusion(p, x):
    t, e = DIFFUSED[torch.randint(0, 10, (len(x),))][:, None], torch.randn_like(x)
    return (z(p, t.sqrt() * x + (1 - t).sqrt() * e) - e[:, :3]).square().sum(1)


def mixup(p, x):
    i = torch.randperm(len(x))
    return z(p, 0.3 * x + 0.7 * x[i]).square().sum(1)


def mixed_labels(p, x):
    i = torch.randperm(len(x))
    v, y = z(p, 0.3 * x + 0.7 * x[i]), x.argmax(1) % 3
    return 0.3 * losses(v, y) + 0.7 * losses(v, y[i])


DRAWS = {
    "multinomial": lambda p, x: losses(z(p, x), torch.multinomial(z(p, x).detach().softmax(1), 1)[:, 0]),
    "several": lambda p, x: z(p, x).log_softmax(1).gather(1, torch.multinomial(z(p, x).softmax(1), 2)).sum(1),
    "with replacement": lambda p, x: z(p, x).gather(1, torch.multinomial(x.abs(), 5, replacement=True) % 3).sum(1),
    "Categorical": lambda p, x: surprise(Categorical(logits=z(p, x))),
    "labels": lambda p, x: losses(z(p, x), Categorical(logits=z(p, x).detach()).sample()),
    "normal": lambda p, x: (z(p, x) - torch.normal(x[:, :3], x[:, :3].abs())).square().sum(1),
    "normal of one width": lambda p, x: (z(p, x) - torch.normal(z(p, x).detach(), 1.0)).square().sum(1),
    "Normal": lambda p, x: Normal(z(p, x), torch.ones(3).double()).rsample().square().sum(1),
    "Normal of two": lambda p, x: Normal(z(p, x), z(p, x).exp()).rsample().square().sum(1),
    "MultivariateNormal": lambda p, x: MultivariateNormal(z(p, x), torch.eye(3).double()).rsample().square().sum(1),
    "poisson": lambda p, x: (z(p, x) * torch.poisson(z(p, x).detach().exp())).sum(1),
    "Poisson": lambda p, x: surprise(Poisson(z(p, x).exp())),
    "Dirichlet": lambda p, x: (z(p, x) * Dirichlet(x.abs()[:, :3]).sample()).sum(1),
    "Gamma": lambda p, x: (z(p, x) * Gamma(x.abs()[:, :3], x.abs()[:, :3]).sample()).sum(1),
    "Gamma with a derivative": lambda p, x: Gamma(z(p, x).exp(), 1 + z(p, x).exp()).rsample().sum(1),
    "Beta": lambda p, x: (z(p, x) * Beta(x.abs()[:, :1], torch.ones(1).double()).sample()).square().sum(1),
    "bernoulli": lambda p, x: (z(p, x) * torch.bernoulli(x.abs()[:, :3].clamp(max=1))).square().sum(1),
    "bernoulli_": lambda p, x: (z(p, x) * x.new_empty(len(x), 1).bernoulli_(0.8).div_(0.8)).square().sum(1),
    "Bernoulli": lambda p, x: surprise(Bernoulli(logits=z(p, x))),
    "dropout": lambda p, x: F.dropout(z(p, x)).square().sum(1),
    "dropout of weights": lambda p, x: (x @ F.dropout(p["w"])).square().sum(1),
    "rand": lambda p, x: (z(p, x) * torch.rand(len(x), 1).add(0.5).floor()).square().sum(1),
    "randn_like": lambda p, x: (z(p, x) + torch.randn_like(z(p, x))).square().sum(1),
    "randn for all": lambda p, x: (z(p, x) + torch.randn(3).double()).square().sum(1),
    "gumbel_softmax": lambda p, x: (F.gumbel_softmax(z(p, x)) * x[:, :3]).sum(1),
    "negatives": lambda p, x: z(p, x)[:, torch.randint(0, 3, (2,))].logsumexp(1),
    "mixture": lambda p, x: -MixtureSameFamily(Categorical(logits=z(p, x)), Normal(z(p, x), 1.0)).log_prob(x[:, 0]),
    "diffusion": diffusion,
    "mixup": mixup,
    "mixup of labels": mixed_labels,
}
"""Programs whose draws are followed."""
OTHERS = {
    "Dirichlet with a derivative": lambda p, x: (x[:, :3] * Dirichlet(z(p, x).exp()).rsample()).sum(1),
    "hard gumbel_softmax": lambda p, x: (F.gumbel_softmax(z(p, x), hard=True) * x[:, :3]).sum(1),
    "Binomial": lambda p, x: (z(p, x) * Binomial(5, x.abs()[:, :3].clamp(max=1)).sample()).sum(1),
}
"""Programs that are evaluated on single samples."""


@pytest.mark.parametrize("reduction", [lambda v: v, torch.mean], ids=["none", "mean"])
@pytest.mark.parametrize("name", DRAWS | OTHERS)
def test_shares_are_those_of_the_numbers_that_were_drawn(name, reduction):
    f, x = (DRAWS | OTHERS)[name], Numbers(3)(5, 4)
    torch.manual_seed(7)
    wanted, after = loop_batch_grad(f)(P, x), torch.rand(3)
    t = batch_grad(lambda p, x: reduction(f(p, x)))
    torch.manual_seed(7)
    found = t(P, x)
    assert torch.equal(torch.rand(3), after)
    assert name not in DRAWS or name == "mixup" or not known_way(t.f, t.called)
    assert_trees_close(found, {k: g / (5 if reduction is torch.mean else 1) for k, g in wanted.items()}, 1e-9)


def thresholds(p, x):
    each = z(p, x).square().sum(1)
    return each * (each.detach() >= each.detach().topk(2).values[-1])


GROUPS = {
    "view": lambda p, x: z(p, x)[:, 0] * (x[:, 0].view(2, 3) - x[:, 0].view(2, 3).mean(1, keepdim=True)).flatten(),
    "unflatten": lambda p, x: z(p, x)[:, 0] * x[:, 1].unflatten(0, (3, 2)).softmax(1).flatten(),
    "topk": thresholds,
    "ranks": lambda p, x: z(p, x)[:, 0] * x[:, 0].argsort().argsort(),
    "a baseline": lambda p, x: z(p, x)[:, 0] * (x[:, 0] - x[:, 0].mean()) / x[:, 0].std(),
    "counted classes": lambda p, x: losses(z(p, x), labels(x)) / torch.bincount(labels(x))[labels(x)].to(x.dtype),
    "a histogram": lambda p, x: losses(z(p, x), labels(x)) * torch.histc(labels(x).to(x.dtype), 3, 0, 2)[labels(x)],
    "unique": lambda p, x: losses(z(p, x), labels(x)) / torch.unique(labels(x), return_counts=True)[1].sum(),
    "a covariance": lambda p, x: z(p, x)[:, 0] * (x @ torch.cov(x.T)).square().sum(1),
    "a number": lambda p, x: z(p, x)[:, 0] / x.abs().max().item(),
}


@pytest.mark.parametrize("reduction", [lambda v: v, torch.mean], ids=["none", "mean"])
@pytest.mark.parametrize("name", GROUPS)
def test_what_is_computed_of_data_or_is_detached_is_a_constant(name, reduction):
    x = Numbers(3)(6, 4)
    shares = loop_batch_grad(GROUPS[name])(P, x)
    t = batch_grad(lambda p, x: reduction(GROUPS[name](p, x)))
    assert_trees_close(t(P, x), {k: g / (6 if reduction is torch.mean else 1) for k, g in shares.items()}, 1e-9)
    assert not known_way(t.f, t.called)


def test_attention_with_a_relative_bias_that_is_learned():
    """Torch's fused kernel does not differentiate its mask, as in T5 and Swin."""
    rand = Numbers()
    params, x, y = {"w": rand(4, 12), "bias": rand(1, 2, 6, 6)}, rand(3, 6, 4), torch.arange(3)

    def f(p, x, y):
        q, k, v = (x @ p["w"]).view(len(x), 6, 2, 6).transpose(1, 2).split(2, -1)
        return F.cross_entropy(F.scaled_dot_product_attention(q, k, v, p["bias"]).flatten(1), y, reduction="none")

    assert_trees_close(batch_grad(f)(params, x, y), loop_batch_grad(f)(params, x, y), 1e-12)
    kfac(f, unsupported="diagonal", fisher="empirical")(params, x, y)


def test_one_row_of_a_table_by_both_of_its_indices():
    table, i = Numbers()(6, 3), torch.tensor([[5, -1, 2], [0, -6, -2], [4, -2, 1]])

    def f(table, i):
        return table[i].sum(1).sin().sum(1)

    shares = loop_batch_grad(f)(table, i)
    assert_trees_close(batch_l2_grad(f)(table, i), shares.flatten(1).square().sum(1), 1e-12)
    assert_trees_close(gram(f)(table, i), shares.flatten(1) @ shares.flatten(1).T, 1e-12)
    kfac(f, fisher="empirical")(table, i)


def test_rows_of_one_sample_and_the_sample_itself_meet_a_weight():
    def f(w, x):
        return (torch.stack([F.linear(row, w) for row in x]).sin() + F.linear(x, w)).sum(1)

    assert_trees_close(batch_grad(f)(W, X[:1]), loop_batch_grad(f)(W, X[:1]), 1e-12)
    kfac(f, fisher="empirical")(W, X[:1])


def test_values_of_a_transposed_convolution_with_its_bias():
    (f, params), x = functional(nn.ConvTranspose2d(2, 3, 2, dtype=torch.float64)), Numbers()(5, 2, 2, 2)

    def losses(p, x):
        return f(p, x).sin().flatten(1).sum(1)

    squares = sum(g.square().sum() for g in batch_grad(losses)(params, x).values())
    assert_trees_close(ekfac(losses, fisher="empirical", joint=True)(params, x)["weight"].trace(), squares, 1e-12)


@pytest.mark.parametrize("rows", [4, 40])
def test_moments_of_tables_with_fewer_rows_and_with_more_than_are_read(rows):
    table, i = Numbers()(rows, 3), torch.tensor([[0, 1, 1], [3, 1, 0], [2, 2, 2], [3, 0, 1]])

    def losses(table, i):
        return F.embedding(i, table).sin().sum((1, 2))

    shares = loop_batch_grad(losses)(table, i)
    wanted = shares.sum(0), shares.var(0, correction=0)
    assert_trees_close(grad_and_variance(losses)(table, i), wanted, 1e-12)
