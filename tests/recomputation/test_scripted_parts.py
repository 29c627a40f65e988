"""Parts that torch.jit made, each by itself: methods, saved ones, memory, and what is refused."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacrev

from invfunc import (
    ReplayError,
    additive_coupling,
    invertible_checkpoint,
)
from invfunc._torch.scripted import Interpreted
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.recomputation.test_scripted import MODULES, Counting, X, as_it_is
from tests.strategies import Numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


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
