"""Parts of blocks that torch.jit made: what they read and write is seen, so that blocks are what they are without."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from invfunc import (
    Grid,
    Invertible,
    ReplayError,
    additive_coupling,
    affine_coupling,
    chain,
    functional,
    invertible_checkpoint,
    momentum,
    sum_grad_squared,
    tree,
)
from invfunc._scripted import Interpreted
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


class Counting(nn.Module):
    """A state that is read and written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        self.count.add_(1.0)
        return self.inner(x) * self.count.sqrt().rsqrt()


class Replacing(Counting):
    def forward(self, x):
        self.count = self.count + 1.0
        return self.inner(x) * self.count.rsqrt()


class Numbered(nn.Module):
    n: int

    def __init__(self):
        super().__init__()
        self.n = 1

    def forward(self, x):
        self.n += 1
        return x / self.n


class Listing(nn.Module):
    seen: list[torch.Tensor]

    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(1)]

    def forward(self, x):
        self.seen.append(x.detach())
        return x.sin()


class Calling(nn.Module):
    @torch.jit.ignore
    def python(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def forward(self, x):
        return self.python(x)


class Named(nn.Module):
    """A method beside forward, of a module within."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 3), nn.Tanh()])

    def forward(self, x):
        return x

    @torch.jit.export
    def method(self, x):
        for part in self.inner:
            x = part(x)
        return x


MODULES = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid()),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()),
    "cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "in eval mode": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), nn.Tanh()),
    "a count": Counting,
}


def traced(module):
    state = {name: t.clone() for name, t in module.state_dict().items()}
    made = torch.jit.trace(module, Numbers(1)(6, 3), check_trace=False)
    made.load_state_dict(state)
    return made


MAKERS = {"script": torch.jit.script, "trace": traced}


def generic(F):
    return Invertible(lambda x: (x[0] + F(x[1]), 1.5 * x[1]), lambda y: (y[0] - F(y[1] / 1.5), y[1] / 1.5))


def chained(F, G, wrap):
    first, second = additive_coupling(F, G), additive_coupling(G, F)
    return chain(first, second) if wrap is invertible_checkpoint else lambda x: second(first(x))


FORMS = {
    "modules": lambda F, G, wrap: wrap(additive_coupling(F, G)),
    "lambdas": lambda F, G, wrap: wrap(additive_coupling(lambda b: F(b).sin(), lambda a: G(a))),
    "one module": lambda F, G, wrap: wrap(additive_coupling(lambda b: F(b), lambda a: F(a))),
    "affine": lambda F, G, wrap: wrap(affine_coupling(lambda b: (F(b), G(b)), lambda a: (G(a), F(a)))),
    "exact": lambda F, G, wrap: wrap(additive_coupling(F, G, exact=GRID)),
    "momentum": lambda F, G, wrap: wrap(momentum(lambda x: F(x) + G(x))),
    "pair": lambda F, G, wrap: wrap(generic(F)),
    "no inverse": lambda F, G, wrap: without_inverse(lambda x: (x[0] + F(x[1]), x[1] + G(x[0])), wrap),
    "chain": chained,
}
GRID = Grid(dtype=torch.float64)


def as_it_is(pair):
    return pair


def without_inverse(f, wrap):
    return invertible_checkpoint(f, None) if wrap is invertible_checkpoint else f


class Net(nn.Module):
    def __init__(self, module, maker, form, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.F, self.G = (MAKERS[maker](MODULES[module]().double()) for _ in range(2))
        self.block = FORMS[form](self.F, self.G, wrap)

    def forward(self, x):
        a, b = GRID.enter(x), GRID.enter(x.cos())
        a, b = self.block(self.block((a, b)))
        return a.sin() * b


X = Numbers(7)(6, 3)
P = {"allow_unused": True, "materialize_grads": True}


def backward(net):
    """Several times, as torch.jit optimises what runs repeatedly."""
    for _ in range(3):
        x = X.clone().requires_grad_()
        found = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()], **P)
    return found


def twice(net):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), [x, *net.parameters()], **P)


def others(net):
    """Parameters that are not those of the module."""
    return {name: 1.25 * p.detach() for name, p in net.named_parameters()}


def called(net):
    return grad(lambda p: functional_call(net, p, (X,)).square().sum())(others(net))


def called_in_plain_autograd(net):
    params = {name: p.requires_grad_() for name, p in others(net).items()}
    loss = functional_call(net, params, (X,)).square().sum()
    return torch.autograd.grad(loss, list(params.values()), **P)


def of_a_function(net):
    f, _ = functional(net)
    return grad(lambda p: f(p, X).square().sum())(others(net))


def of_each_sample(net):
    f, _ = functional(net)
    slopes = vmap(grad(lambda p, x: f(p, x[None]).square().sum()), (None, 0), randomness="same")
    return slopes(others(net), X)


def statistic(net):
    return sum_grad_squared(lambda p, x: functional(net)[0](p, x).square().sum(1))(others(net), X)


HOW = [backward, twice, called, called_in_plain_autograd, of_a_function, of_each_sample, statistic]


def right(how, module, maker, form):
    """Whether torch itself has it without the block."""
    if how in (of_each_sample, called) and module in ("batch norm", "cumulative", "a count"):
        return how is of_each_sample and module == "a count"  # vmap and grad refuse to write what is captured
    if how is statistic and module in ("batch norm", "cumulative", "dropout"):
        return False  # samples are not apart
    return not (form == "exact" and how in (twice, of_each_sample, statistic))


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
@settings(max_examples=10)
@given(
    module=st.sampled_from(sorted(MODULES)),
    maker=st.sampled_from(sorted(MAKERS)),
    form=st.sampled_from(sorted(FORMS)),
)
def test_gradients_and_state_are_those_without_the_block(how, module, maker, form):
    if not right(how, module, maker, form):
        return
    found = []
    for wrap in (as_it_is, invertible_checkpoint):
        net = Net(module, maker, form, wrap)
        torch.manual_seed(1)
        found.append((tree.tensors(how(net)), [b.clone() for b in net.buffers()], torch.get_rng_state()))
    assert_trees_close(found[1][:2], found[0][:2], 1e-7, 1e-3)
    assert torch.equal(found[0][2], found[1][2])


class TestTheRest:
    def gradient(self, part, *inputs, wrap=invertible_checkpoint):
        x = X.clone().requires_grad_()
        y = wrap(additive_coupling(part, part))((x, x.cos()))
        return torch.autograd.grad((y[0] * y[1]).sum(), [x, *inputs])

    def test_functions_of_parameters(self):
        @torch.jit.script
        def part(b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (b @ w).tanh()

        def slope(wrap):
            def loss(w):
                block = wrap(additive_coupling(lambda b: part(b, w), lambda a: part(a, w.mT)))
                return sum((t * t).sum() for t in block(block((X, X.cos()))))

            w = Numbers(3)(3, 3)
            return grad(loss)(w), torch.autograd.grad(loss(w.requires_grad_()), w)

        assert_trees_close(slope(invertible_checkpoint), slope(as_it_is), 1e-9)

    def test_functions_that_write_arguments(self):
        @torch.jit.script
        def part(b: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            count.add_(1.0)
            return b * count.sqrt().rsqrt()

        found = []
        for wrap in (invertible_checkpoint, as_it_is):
            count = torch.ones(3, dtype=torch.float64)
            found.append((self.gradient(lambda b, count=count: part(b, count).sin(), wrap=wrap), count))
        assert_trees_close(*found, 1e-9)

    def test_running_statistics_that_are_arguments_are_refused(self):
        @torch.jit.script
        def part(b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.batch_norm(b, mean, var, None, None, True, 0.1, 1e-5)

        mean, var = Numbers(0)(3), Numbers(1)(3)
        with pytest.raises(
            ReplayError, match="`part`, .* running statistics that are its arguments.*buffers of a module"
        ):
            self.gradient(lambda b: part(b, mean, var))

    def test_within_blocks_within_blocks(self):
        def both(wrap):
            F, G = (torch.jit.script(MODULES[kind]().double()) for kind in ("batch norm", "in eval mode"))
            params = [*F.parameters(), *G.parameters()]
            for number, p in enumerate(params):
                p.data.copy_(Numbers(number)(*p.shape))
            inner = wrap(additive_coupling(lambda b: G(b), lambda a: G(a).sin()))
            slope = grad(
                lambda x: sum(t.sin().sum() for t in wrap(additive_coupling(lambda b: inner((b, b))[1], G))((x, x)))
            )
            outer = wrap(additive_coupling(lambda b: F(inner((b, b.cos()))[0]), lambda a: F(a).sin()))
            first = torch.autograd.grad(sum(t.sin().sum() for t in outer((X, X.cos()))), params)
            return first, list(F.buffers()), slope(X)

        assert_trees_close(both(invertible_checkpoint), both(as_it_is), 1e-7, 1e-3)

    def test_methods(self):
        module = torch.jit.script(Named().double())
        inputs = list(module.parameters())
        assert_trees_close(
            self.gradient(module.method, *inputs), self.gradient(module.method, *inputs, wrap=as_it_is), 1e-9
        )

    def test_modules_that_were_saved(self, tmp_path):
        torch.jit.save(torch.jit.script(MODULES["batch norm"]().double()), tmp_path / "part")
        one, other = (torch.jit.load(tmp_path / "part") for _ in range(2))
        found = self.gradient(lambda b: one(b), *one.parameters())
        wanted = self.gradient(lambda b: other(b), *other.parameters(), wrap=as_it_is)
        assert_trees_close((found, list(one.buffers())), (wanted, list(other.buffers())), 1e-7, 1e-3)

    @pytest.mark.parametrize("calls", [0, 3])
    def test_second_derivatives_in_torch_func(self, calls):
        """Torch itself (2.13) has wrong ones of what it has optimised."""

        @torch.jit.script
        def part(b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (b @ w).tanh()

        for _ in range(calls):
            part(X.clone().requires_grad_(), torch.ones_like(Numbers(3)(3, 3), requires_grad=True)).sum().backward()

        def loss(part):
            block = invertible_checkpoint(additive_coupling(part, part))
            return lambda w: sum(t.square().sum() for t in block((X, X.cos()), (w, w.mT)))

        for of in (hessian, lambda f: jacrev(jacrev(f)), jacrev):
            for _ in range(2):
                assert_trees_close(
                    of(loss(part))(Numbers(3)(3, 3)), of(loss(lambda b, w: (b @ w).tanh()))(Numbers(3)(3, 3)), 1e-9
                )

    def test_memory_does_not_grow_with_depth(self):
        part = torch.jit.script(MODULES["batch norm"]().double())
        block = invertible_checkpoint(additive_coupling(lambda b: part(b), lambda a: part(a)))

        def peak(depth):
            x = torch.ones(3000, 3, dtype=torch.float64, requires_grad=True)
            with nothing_collected(), Meter() as meter:
                state = (x, x)
                for _ in range(depth):
                    state = block(state)
                (found,) = torch.autograd.grad((state[0] * state[1]).sum(), x)
                del state
                return meter.peak(without=found)

        few, many = peak(6), peak(24)
        assert many < 1.1 * few

    def test_torch_runs_as_it_did_outside_of_blocks(self):
        """Calls are optimised there, and are those of torch, or of whoever has put theirs in place meanwhile."""
        scripted = torch.jit.script(nn.Linear(3, 3))
        with Interpreted(), Interpreted():
            assert not torch._C._get_graph_executor_optimize()
        assert torch._C._get_graph_executor_optimize()
        ours, seen = vars(torch.ScriptMethod)["__call__"], []

        def theirs(*args, **kwargs):
            seen.append(len(seen))
            return ours(*args, **kwargs)

        with mock.patch.object(torch.ScriptMethod, "__call__", theirs):
            with Interpreted():
                scripted(torch.ones(3))
            scripted(torch.ones(3))
        with Interpreted():
            scripted(torch.ones(3))
        assert seen == [0, 1]
        assert vars(torch.ScriptMethod)["__call__"] is ours

    @pytest.mark.parametrize("made", [Replacing, Numbered, Listing])
    def test_changes_that_cannot_be_repeated_are_refused(self, made):
        """The way out of the first is the module of a count, which is right above."""
        name = {Replacing: "count", Numbered: "n", Listing: "seen"}[made]
        part = torch.jit.script(made().double())
        told = f"`{made.__name__}`, which torch.jit made, changes {name}, .*write that in place: self.count.add_"
        with pytest.raises(ReplayError, match=told):
            self.gradient(lambda b: part(b))

    def test_a_constant_that_is_written_is_refused(self):
        count = torch.zeros(3, dtype=torch.float64)
        part = torch.jit.trace(lambda b: b * count.add_(1), X, check_trace=False)
        with pytest.raises(ReplayError, match="which torch.jit made, changes a constant"):
            self.gradient(part)

    def test_calls_of_python_are_refused(self):
        part = torch.jit.script(Calling())
        with pytest.raises(ReplayError, match="`Calling`, .* calls back into Python .*Leave this part of the block"):
            self.gradient(lambda b: part(b))
        self.gradient(Calling())
