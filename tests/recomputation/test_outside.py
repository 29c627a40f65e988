"""What blocks read beside their arguments, and how their tensors lie in memory: found by a reviewer, each was wrong."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

import invfunc
from invfunc import Invertible, ModifiedError, ReplayError, additive_coupling, invertible_checkpoint, leapfrog, tree
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
            "rows": lambda: Rows(),
            "recurrent": lambda: Recurrent(),
        }
        torch.manual_seed(0)
        self.a, self.b = parts[kind](), parts[kind]()
        self.block = wrap(additive_coupling(lambda b: self.a(b).tanh(), lambda a: self.b(a).tanh()))
        self.to(torch.float64)

    def forward(self, x):
        u, v = self.block(x.chunk(2, 1))
        return torch.cat(self.block((v, u)), 1)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, b):
        return self.table(b.detach().abs().mul(10).long().remainder(5)).mean(1) * b


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
    def test_parameters_that_are_put_in_for_a_call(self):
        x, _ = data()

        def run(wrap):
            model = Reversible(wrap)
            params = {name: p.requires_grad_() for name, p in moved(dict(model.named_parameters())).items()}
            functional_call(model, params, (x,)).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
            return [p.grad for p in params.values()]

        assert_trees_close(run(invertible_checkpoint), run(as_it_is), rtol=RTOL)

    @pytest.mark.parametrize("kind", ["linear", "norm", "weight norm", "rows", "recurrent"])
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


@pytest.mark.parametrize("state", [False, True])
class TestAnInverseThatClosesOverWhatWasPutIn:
    """When it runs, the module has its own parameters again."""

    class Scaled(nn.Module):
        def __init__(self, wrap, inverse, state):
            super().__init__()
            self.scale, self.power, self.other = (nn.Parameter(torch.full((6,), by).double()) for by in (2.0, 1.0, 3.0))
            self.norm = nn.BatchNorm1d(6, momentum=None).double() if state else nn.Identity()
            self.block = wrap(Invertible(self.scaled, getattr(self, inverse)))

        def scaled(self, x):
            return x * self.scale.exp() + self.norm(torch.ones_like(x)).sin() * self.power

        def back(self, y):
            return (y - self.norm(torch.ones_like(y)).sin() * self.power) * (-self.scale).exp()

        def reading_more(self, y):
            return self.back(y) * self.other / self.other

        def forward(self, x):
            return self.block(self.block(x)).sin()

    @staticmethod
    def gradients(model):
        x, _ = data()
        given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        params = {
            name: p.requires_grad_(p.is_floating_point()) for name, p in moved(dict(model.named_parameters())).items()
        }
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        y = functional_call(model, {**params, **buffers}, (x,))
        found = torch.autograd.grad(y.square().sum(), list(params.values()), allow_unused=True, materialize_grads=True)
        assert all(t is given[name] for name, t in (*model.named_parameters(), *model.named_buffers()))
        return found, buffers, list(model.buffers())

    def test_gets_what_was_there(self, state):
        found, wanted = (self.gradients(self.Scaled(wrap, "back", state)) for wrap in (invertible_checkpoint, as_it_is))
        assert_trees_close(found, wanted, rtol=RTOL)

    def test_and_reads_more_is_refused(self, state):
        with pytest.raises(ReplayError, match="forward does not read, and .* exchanged since.*Pass them as arguments"):
            self.gradients(self.Scaled(invertible_checkpoint, "reading_more", state))


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


def test_what_f_saved_and_then_wrote_is_refused_as_by_torch():
    def f(x, w):
        h = x.tanh()
        h.mul_(2)
        return h @ w

    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in "xw")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        f(x, w).sum().backward()
    with pytest.raises(ModifiedError, match="modified by an inplace operation, within it"):
        invertible_checkpoint(f, None)(x, w).sum().backward()


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
        with pytest.raises(invfunc.ArgumentTypeError, match=rf"^invertible_checkpoint\(..., {name}=.*: {name} is "):
            invertible_checkpoint(lambda x: x, lambda y: y, **option)

    def test_check_looks_at_complex_numbers(self):
        calls = []

        def f(x):
            calls.append(x)
            return x.exp() + 1j * len(calls)

        y = invertible_checkpoint(f, None, check=True)(torch.ones(3, dtype=torch.complex128, requires_grad=True))
        with pytest.raises(ReplayError, match="another result"):
            y.abs().sum().backward()


class TestInsideOfTorchFunc:
    @settings(max_examples=10, deadline=None)
    @given(order=st.permutations(range(4)), in_keywords=st.booleans(), inverted=st.booleans())
    def test_an_operation_reads_again_in_its_order_what_needs_a_gradient_and_what_does_not(
        self, order, in_keywords, inverted
    ):
        fixed = [torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.1])]

        def loss(w, x, wrap):
            closed = [*fixed, *w]
            read = [closed[i] for i in order]

            def shift(b):
                terms = torch.stack(tensors=read) if in_keywords else torch.stack(read)
                return (b * torch.tensor([1.0, -2.0, 0.5, 7.0]) @ terms.sin()).tanh()

            if inverted:
                block = wrap(additive_coupling(lambda b: shift(b.repeat(1, 2)), lambda a: a.cos()))
            else:
                block = wrap(lambda x: (x[0] + shift(x[1].repeat(1, 2)), x[1] * 2), None)
            a, b = block((x[0] * 1, x[1] * 1))
            return (a * b).sum()

        w, x = [torch.tensor([0.3, 0.2]), torch.tensor([-0.4, 1.1])], (torch.ones(3, 2), torch.full((3, 2), 0.5))
        derivatives = torch.func.grad(loss, (0, 1))
        assert_trees_close(derivatives(w, x, invertible_checkpoint), derivatives(w, x, lambda f, *_: f), 1e-5)

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

    @pytest.mark.parametrize("kind", ["vmap", "jvp"])
    @pytest.mark.parametrize("wrap", [additive_coupling, lambda F, G: lambda x: (x[0] + F(x[1]), x[1] + G(x[0]))])
    def test_a_transform_within_f_may_read_what_f_closes_over(self, kind, wrap):
        torch.manual_seed(0)
        layer, x = nn.Linear(3, 3), torch.randn(5, 3)
        within = {
            "vmap": lambda b: torch.func.vmap(lambda row: layer(row).tanh() * layer.bias)(b),
            "jvp": lambda b: torch.func.jvp(lambda b: layer(b).sin(), (b,), (b,))[1],
        }
        pair = wrap(within[kind], torch.cos)
        block = invertible_checkpoint(pair) if wrap is additive_coupling else invertible_checkpoint(pair, None)

        def gradients(f):
            a, b = f(f((x.sin(), x.cos())))
            return torch.autograd.grad((a * b).sum(), [*layer.parameters()])

        assert_trees_close(gradients(block), gradients(pair), 1e-4)

    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[0], lambda w: w.view(-1)[3:6]])
    def test_a_gradient_within_f_may_read_views_of_a_constant(self, view, inside):
        constant, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
        scale = torch.ones(3, dtype=torch.float64, requires_grad=True)

        def energy(z):
            seen = view(constant)
            return ((z @ seen if seen.dim() == 2 else z * seen).tanh() * scale).sum()

        def found(wrap):
            block = wrap(leapfrog(torch.func.grad(energy), 0.1))

            def loss(x):
                y = block(block((x.sin(), x.cos())))
                return (y[0] * y[1]).sum()

            if inside:
                return torch.func.grad(loss)(x)
            return torch.autograd.grad(loss(x), scale)[0]

        assert_trees_close(found(invertible_checkpoint), found(lambda pair: pair), 1e-9)

    @pytest.mark.parametrize("inplace", [False, True])
    @pytest.mark.parametrize("kind", ["dropout", "alpha_dropout", "feature_alpha_dropout", "dropout2d"])
    def test_dropout_of_what_is_transposed_is_that_of_the_function(self, kind, inplace):
        """Inside of torch.func it gives its random numbers to other entries than outside."""
        drop = getattr(F, kind)

        def f(x, w):
            return x + drop(x.transpose(0, 1).sin() * w, 0.5, True, inplace).transpose(0, 1)

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
