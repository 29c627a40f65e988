"""State that f writes is written once; what is written between forward and backward is never read as it was not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad

from invfunc import Invertible, additive_coupling, invertible_checkpoint
from invfunc.errors import ModifiedError
from tests.invertible_cases import f, f_inv, g, gradients, leaves, squares


class Quantising(nn.Module):
    """A codebook that follows its samples: cdist saves it for a gradient that nobody asks for, as argmin has none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("codes", torch.randn(4, 3))

    def forward(self, x):
        z = self.linear(x)
        q = self.codes[torch.cdist(z, self.codes).argmin(1)]
        with torch.no_grad():
            self.codes.copy_(0.9 * self.codes + 0.1 * z.mean(0))
        return z + (q - z).detach()


STATES = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "without tracking": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "in eval mode": lambda: nn.BatchNorm1d(3).eval(),
    "frozen": lambda: nn.BatchNorm1d(3).requires_grad_(False),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "cumulative average": lambda: nn.BatchNorm1d(3, momentum=None),
    "a codebook": Quantising,
}


def residual(part):
    """An invertible residual network, whose inverse evaluates the same module many times."""

    def inverse(y):
        x = y
        for _ in range(40):
            x = y - part(x)
        return x

    return Invertible(lambda x: x + part(x), inverse)


class TestState:
    @pytest.mark.parametrize("options", [{}, {"keep": True}, {"check": 1e-6}], ids=str)
    @pytest.mark.parametrize("how", ["parts", "one part", "i-ResNet"])
    @pytest.mark.parametrize("kind", STATES)
    def test_state_is_written_once_and_replayed(self, same, how, options, kind):
        """Several blocks that share a module, and another forward before the backward pass."""

        def run(wrap, x, w):
            torch.manual_seed(0)
            x0, x = x, torch.cat([x, 1.5 * x.sin(), x.cos()])
            first, second = (STATES[kind]().to(x) for _ in range(2))
            parts = (lambda b: first(b).sin() * w / 3, lambda a: second(a).tanh() / 3)
            block, given = wrap(additive_coupling(*parts)), (x, (3 * x).sin())
            if how == "one part":
                block = wrap(additive_coupling(parts[0], parts[0]))
            elif how == "i-ResNet":
                block, given = wrap(residual(parts[0])), given[1]
            y = block(block(given))
            z = block(y)
            inputs = (x0, w, *(p for m in (first, second) for p in m.parameters() if p.requires_grad))
            kwargs = {"allow_unused": True, "materialize_grads": True}
            state = [b.clone() for m in (first, second) for b in m.buffers()]
            found = gradients(y, *inputs, create_graph=True, **kwargs)
            other = gradients(z, *inputs, retain_graph=True, **kwargs)
            return (
                found,
                other,
                gradients(found, *inputs, **kwargs),
                state,
                [b for m in (first, second) for b in m.buffers()],
            )

        same(run, lambda pair: pair.forward if how == "i-ResNet" else pair, partial(invertible_checkpoint, **options))

    def test_written_arguments_are_refused(self):
        x, w = leaves()
        for change in (
            lambda x, w: x.mul_(2),
            lambda x, w: x.view(-1)[1:].zero_(),
            lambda x, w: w.add_(1),
            lambda x, w: w.__setitem__(0, 1.0),
        ):

            def writes(x, w, change=change):
                change(x, w)
                return f(x, w)

            for h in (invertible_checkpoint(writes, f_inv), invertible_checkpoint(writes, None)):
                with pytest.raises(ModifiedError, match="writes into its argument x|an argument has been modified"):
                    gradients(h(x * 1, w * 1), x, w)

    def test_an_inverse_that_writes_is_refused(self, same):
        for write in (
            lambda y, w: y.sub_(w.tanh()).mul_((-w).exp()),
            lambda y, w: (y - w.tanh()) * w.neg_().exp(),
            lambda y, w: (y.view(-1).mul_(2), f_inv(y / 2, w))[1],
        ):

            def run(h, x, w, write=write):
                return gradients(h(x * 1, w).sin(), x, w)

            with pytest.raises(ModifiedError, match="writes into its argument y|an argument has been modified"):
                same(run, f, invertible_checkpoint(f, write))


class Remembering(nn.Module):
    """A layer of a flow whose inverse reads what forward has put into buffers: the statistics of the batch."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.assigns, self.weight = assigns, nn.Parameter(torch.linspace(0.5, 2, 3))
        for name in ("mean", "scale", "running"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x):
        mean, scale = x.mean(0), x.var(0).add(1e-5).sqrt()
        running = 0.9 * self.running + 0.1 * mean
        with torch.no_grad():
            for name, value in (("mean", mean), ("scale", scale), ("running", running)):
                if self.assigns:
                    setattr(self, name, value.detach())
                else:
                    getattr(self, name).copy_(value)
        return (x - mean) / scale * self.weight

    def inverse(self, y):
        return y / self.weight * self.scale + self.mean


@pytest.mark.parametrize("assigns", [False, True], ids=["written", "assigned"])
@pytest.mark.parametrize("one", [False, True], ids=["two layers", "one layer twice"])
def test_statistics_that_a_layer_remembers_are_those_of_the_call(same, assigns, one):
    """For its inverse as they were after it, whatever was called since; running ones are written once."""

    def run(wrap, x, w):
        first = Remembering(assigns).to(x)
        second = first if one else Remembering(assigns).to(x)
        blocks = wrap(first), wrap(additive_coupling(torch.sin, torch.sin, split_dim=0)), wrap(second)
        y = torch.cat([x, x.cos()]) * w
        for block in blocks:
            y = block(y)
        with torch.no_grad():
            blocks[0](y + 3)
        found = gradients(y.sin(), x, w, *first.parameters(), *second.parameters())
        return found, [*first.buffers(), *second.buffers()]

    def wrapped(f):
        return invertible_checkpoint(f, f.inverse) if isinstance(f, nn.Module) else invertible_checkpoint(f)

    same(run, lambda f: f, wrapped, lambda f: invertible_checkpoint(f, None) if isinstance(f, nn.Module) else f)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["old", "new"])
def test_an_inverse_that_iterates_reads_the_norm_of_the_call(same, norm):
    """The first power iterations, each of which gives another weight."""

    def run(wrap, x, w):
        linear = norm(nn.Linear(3, 3)).to(x)
        block = wrap(residual(lambda x: linear(x).tanh() / 2))
        return gradients(block(block(x * w)), x, w, *linear.parameters()), [*linear.buffers()]

    same(run, lambda pair: pair.forward, invertible_checkpoint)


# What is written between forward and backward is told, or has no effect.


def closed(f, w):
    return lambda x, unused: f(x, w)


@pytest.mark.quick
class TestWrittenSince:
    """Parameters that are written between forward and backward: an error, never a number of the new ones."""

    @pytest.mark.parametrize("where", ["argument", "closed over", "shared", "of a dropped block", "kept"])
    @pytest.mark.parametrize("partial", [False, True], ids=["at once", "after a partial gradient"])
    def test_is_an_error(self, where, partial):
        x, w = leaves()
        h, args = g, (w,)
        if where == "closed over":
            h, args = invertible_checkpoint(closed(f, w), closed(f_inv, w)), (None,)
        elif where == "kept":
            h = invertible_checkpoint(f, None)
        elif where == "shared":
            coupling = additive_coupling(lambda b, p: (b * p).tanh(), lambda a, q: (a * q).sin())
            h, args = invertible_checkpoint(coupling), ((w, w),)
        y = h((x * 1, x * 2) if where == "shared" else x * 1, *args)
        if where == "of a dropped block":
            h(y, *args)
        s = squares(y)
        del y
        if partial:
            torch.autograd.grad(s, w, retain_graph=True)
        with torch.no_grad():
            w.mul_(3)
        with pytest.raises((ModifiedError, RuntimeError), match="modified by an inplace operation"):
            torch.autograd.grad(s, (x, w))

    def test_is_an_error_where_a_part_closes_over_what_is_left_of_a_partial_gradient(self):
        x, w = leaves()
        left, right = invertible_checkpoint(lambda x: (x * w, x * w.detach()), None)(x * 1)
        torch.autograd.grad(left.sum(), w, retain_graph=True)
        with torch.no_grad():
            w.mul_(3)
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            torch.autograd.grad(right.sum(), x)

    @pytest.mark.parametrize("wrap", [lambda f, f_inv: f, invertible_checkpoint], ids=["plain", "block"])
    def test_is_an_error_where_an_optimiser_writes_it_in_the_backward_pass(self, wrap):
        """As soon as its gradient is there; what reads it without one still needs what it held."""
        x, w = leaves()

        def step(w):
            with torch.no_grad():
                w.sub_(w.grad)

        w.register_post_accumulate_grad_hook(step)
        y = wrap(lambda x: (x * w.detach()).tanh() * w, None)(x * 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    @pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.detach().mul_(2)])
    @pytest.mark.parametrize("inside", [False, True])
    def test_outputs_that_are_written_before_the_next_block(self, same, write, inside):
        """Without a gradient, so that the graph stays as it is; also inside of torch.func."""

        def run(h, x, w):
            if inside:
                return grad(lambda w: squares(self.twice(h, x.detach(), w, write)))(w.detach())
            return gradients(self.twice(h, x * 1, w, write), w)

        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            same(run)

    @staticmethod
    def twice(h, x, w, write):
        y = h(x, w)
        with torch.no_grad():
            write(y)
        return h(y, w)


def test_a_part_that_reaches_the_whole_net_reads_the_buffers_of_its_own_layers_alone():
    """Buffers of another layer may be written between its call and the backward pass."""

    class Net(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            torch.manual_seed(0)
            self.f, self.g = STATES["spectral norm"](), nn.Linear(3, 3)
            self.blocks = [
                wrap(additive_coupling(*2 * [lambda b: self.f(b).sin()])),
                wrap(additive_coupling(*2 * [lambda b: self.g(b).sin()])),
            ]

        def forward(self, x):
            for block in self.blocks * 2:
                x = block(x)
            return torch.cat(x)

    found = []
    for wrap in (invertible_checkpoint, lambda pair: pair):
        net, x = Net(wrap).double(), leaves()[0].detach()
        found.append(gradients(net((x, x.cos())).sin(), *net.parameters()))
    torch.testing.assert_close(*found)
