"""Weights that are put in for a call, statistics that look through blocks, strides, and options."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import invfunc
from invfunc import Invertible, additive_coupling, invertible_checkpoint, tree
from invfunc.testing import assert_trees_close

RTOL = 1e-9


class Reversible(nn.Module):
    """Its coupling closes over its own layers."""

    def __init__(self, wrap, kind="linear"):
        super().__init__()
        parts = {
            "linear": lambda: nn.Linear(3, 3),
            "norm": lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)),
            "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
            "recurrent": lambda: Recurrent(),
        }
        torch.manual_seed(0)
        self.a, self.b = parts[kind](), parts[kind]()
        self.block = wrap(additive_coupling(lambda b: self.a(b).tanh(), lambda a: self.b(a).tanh()))
        self.to(torch.float64)

    def forward(self, x):
        u, v = self.block(x.chunk(2, 1))
        return torch.cat(self.block((v, u)), 1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(1, 1, batch_first=True)

    def forward(self, b):
        return self.inner(b[:, :, None])[0][:, :, 0]


def as_it_is(pair):
    return pair


def moved(params):
    """Other parameters than those of the module."""
    return {name: p.detach() + 0.3 for name, p in params.items()}


def data(n=5):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) % 6


class TestModules:
    @pytest.mark.parametrize("kind", ["linear", "norm", "weight norm", "recurrent"])
    @pytest.mark.parametrize("needs", [False, True])
    def test_statistics(self, kind, needs):
        x, y = data()

        def run(wrap, statistic):
            f, params = invfunc.functional(Reversible(wrap, kind))
            params = {name: p.requires_grad_(needs) for name, p in moved(params).items()}
            return tree.map_tensors(torch.Tensor.detach, statistic(f)(params, x, y))

        def variance(f):
            return invfunc.variance(lambda params, x, y: F.cross_entropy(f(params, x), y))

        def diag_ggn(f):
            return invfunc.diag_ggn(f, F.cross_entropy)

        for statistic in (variance, diag_ggn):
            assert_trees_close(run(invertible_checkpoint, statistic), run(as_it_is, statistic), rtol=RTOL)


class Scaled(nn.Module):
    """Its inverse reads its parameters."""

    def __init__(self, wrap):
        super().__init__()
        self.scale, self.power = (nn.Parameter(torch.full((6,), by).double()) for by in (2.0, 1.0))
        self.block = wrap(Invertible(self.scaled, self.back))

    def scaled(self, x):
        return x * self.scale.exp() + self.power

    def back(self, y):
        return (y - self.power) * (-self.scale).exp()

    def forward(self, x):
        return self.block(self.block(x)).sin()


def test_an_inverse_that_closes_over_what_was_put_in_gets_what_was_there():
    """When it runs, the module has its own parameters again."""

    def gradients(model):
        own = dict(model.named_parameters())
        params = {name: p.requires_grad_() for name, p in moved(own).items()}
        found = torch.autograd.grad(functional_call(model, params, (data()[0],)).square().sum(), list(params.values()))
        assert all(p is own[name] for name, p in model.named_parameters())
        return found

    assert_trees_close(gradients(Scaled(invertible_checkpoint)), gradients(Scaled(as_it_is)), rtol=RTOL)


def test_random_numbers_of_a_first_attempt_are_taken_back():
    """An f that uses torch.func is evaluated in another way, once that is known."""

    def run(wrap):
        generator = torch.Generator().manual_seed(2)
        x = data()[0][:, :3].requires_grad_()

        def part(b):
            mask = torch.rand(b.shape, generator=generator, dtype=b.dtype)
            return torch.func.grad(lambda c: (c.sin() * mask).sum())(b)

        out = wrap(additive_coupling(part, part))((x, x.cos()))
        return [*torch.autograd.grad((out[0] * out[1]).sum(), x), generator.get_state()]

    assert_trees_close(run(invertible_checkpoint), run(as_it_is), rtol=RTOL)


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("split_dim", [None, 1])
def test_tensors_lie_in_memory_as_they_did(n, split_dim):
    """A linear layer saves its input and its weight in another order where its kernel is another."""

    def run(wrap):
        generator = torch.Generator().manual_seed(3)
        made = (torch.randn(4, 4, generator=generator), torch.randn(4, generator=generator))
        w, bias, x = (t.double().requires_grad_() for t in (*made, torch.randn(n, 8, generator=generator)))

        def part(b):
            return F.linear(b[:, None], w, bias)[:, 0].tanh()

        block = wrap(additive_coupling(part, part, split_dim=split_dim))
        out = block(block(x if split_dim == 1 else x.chunk(2, 1)))
        loss = sum(t.sin().sum() for t in tree.tensors(out))
        return torch.autograd.grad(loss, [w, bias, x])

    assert_trees_close(run(invertible_checkpoint), run(as_it_is), rtol=RTOL)


class TestOptions:
    def test_of_what_is_checkpointed_already_stay(self):
        x = torch.ones(3, requires_grad=True)
        kept = invertible_checkpoint(invertible_checkpoint(lambda x: x.exp(), None))
        kept(kept(x)).sum().backward()
        wrong = invertible_checkpoint(lambda x: 2 * x, lambda y: y, check=True)
        with pytest.raises(invfunc.InverseError, match="check="):
            invertible_checkpoint(wrong)(x)

    @pytest.mark.parametrize("option", [{"keep": 0}, {"keep": (0.5,)}, {"check": "a"}, {"min_bytes": "a"}])
    def test_of_a_wrong_kind_are_refused(self, option):
        (name,) = option
        with pytest.raises(invfunc.ArgumentTypeError, match=name):
            invertible_checkpoint(lambda x: x, lambda y: y, **option)


class TestInsideOfTorchFunc:
    @pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(3).eval(), lambda: Last(nn.LSTM(3, 3, batch_first=True))])
    def test_modules_in_single_precision_have_the_gradients_of_plain_ones(self, make):
        torch.manual_seed(0)
        F, G = make(), nn.Linear(3, 3)
        net, x = nn.ModuleList([F, G]), torch.randn(5, 3)

        def loss(params, wrap):
            block = wrap(additive_coupling(F, G))
            with torch.nn.utils.stateless._reparametrize_module(net, params):
                a, b = block(block((x.sin(), x.cos())))
            return (a * b).sum()

        params = {name: p.detach() for name, p in net.named_parameters()}
        found = torch.func.grad(loss)(params, invertible_checkpoint)
        assert_trees_close(found, torch.func.grad(loss)(params, lambda pair: pair), 1e-4)

    @pytest.mark.parametrize("kind", ["dropout", "dropout2d"])
    def test_dropout_of_what_is_transposed_is_that_of_the_function(self, kind):
        """Inside of torch.func it gives its random numbers to other entries than outside."""
        drop = getattr(F, kind)

        def f(x, w):
            return x + drop(x.transpose(0, 1).sin() * w, 0.5, True).transpose(0, 1)

        def found(wrap):
            torch.manual_seed(0)
            g = wrap(f, None)
            loss = torch.func.grad_and_value(lambda w: g(g(torch.ones(5, 6, 2, 3), w), w).square().sum())
            return loss(torch.tensor([0.5, 1.0, 2.0]))

        assert_trees_close(found(invertible_checkpoint), found(lambda f, _: f), 1e-5)


class Last(nn.Module):
    """What a recurrent layer gives at its last step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:, None])[0][:, -1]
