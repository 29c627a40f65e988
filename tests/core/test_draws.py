"""Losses that draw for each sample, from weights of its own: shares are those of the numbers that f has drawn."""

import pytest
import torch
import torch.nn.functional as F
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

from invfunc import batch_grad
from invfunc.core.ways import known_way
from invfunc.testing import assert_trees_close, loop_batch_grad
from tests.strategies import Numbers

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
