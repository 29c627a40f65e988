"""Plain Python state of the parts of a block: it goes on as without blocks, and what reads it is the same function."""

import copy
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close


class Part(nn.Module):
    """A layer with a state of a kind, which its result depends on."""

    def __init__(self, kind):
        super().__init__()
        self.lin, self.kind = nn.Linear(3, 3).double(), kind
        self.calls, self.seen, self.recent = 0, [], deque(maxlen=2)
        self.counts = {"calls": 0}
        self.phase = "warm", 0.0

    def forward(self, x):
        y = getattr(self, self.kind)(self.lin(x))
        self.balance = y.square().mean() if torch.is_grad_enabled() else None
        return y.tanh()

    def counter(self, y):
        self.calls += 1
        return y if self.calls <= 4 else y.sin()

    def listed(self, y):
        self.seen.append(0.1 * len(self.seen))
        return y * (1 + self.seen[-1])

    def long_list(self, y):
        self.seen += [y.detach()] * 20
        return y * len(self.seen)

    def last_ones(self, y):
        self.recent.append(len(self.recent) + sum(self.recent))
        return y * (1 + 0.1 * self.recent[0])

    def counted_in_a_dict(self, y):
        self.counts["calls"] += 1
        self.counts.setdefault("begun", 0.5)
        return y * self.counts["calls"]

    def in_phases(self, y):
        name, size = self.phase
        self.phase = ("hot" if size > 0.3 else name), size + 0.1
        return y.sin() if name == "hot" else y * (1 + size)

    def made_when_needed(self, y):
        if not hasattr(self, "begun"):
            self.begun = 1.0
            y = y.cos()
        self.begun /= 2
        return y * self.begun

    def state(self):
        return self.calls, len(self.seen), list(self.recent), self.counts, self.phase, getattr(self, "begun", None)


KINDS = "counter listed long_list last_ones counted_in_a_dict in_phases made_when_needed".split()
WAYS = {
    "a coupling": lambda F, G, block: block(additive_coupling(F, G, split_dim=1)),
    "one part twice": lambda F, G, block: block(additive_coupling(F, F, split_dim=1)),
    "a function": lambda F, G, block: block(
        lambda x: torch.cat([x[:, :3] + F(x[:, 3:]), x[:, 3:]], 1),
        lambda y: torch.cat([y[:, :3] - F(y[:, 3:]), y[:, 3:]], 1),
    ),
    "a checkpoint": lambda F, G, block: block(lambda x: x + torch.cat([F(x[:, :3]), G(x[:, 3:])], 1), None),
}


def without(f, f_inv=None):
    return f


def training(kind, way, block, calls=2, steps=7):
    """Losses, gradients and the states that are left, of some steps with several calls each."""
    torch.manual_seed(0)
    F, G = Part(kind), Part(kind)
    net, found = WAYS[way](F, G, block), []
    for _ in range(steps):
        x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(calls):
            y = net(y)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), (x, F.lin.weight))]
    return found, [F.state(), G.state()]


class TestState:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("way", WAYS)
    def test_goes_on_as_without_blocks(self, kind, way):
        found, state = training(kind, way, without)
        for check in ("warn", "off", True):
            came, left = training(kind, way, lambda *f, check=check: invertible_checkpoint(*f, check=check))
            assert_trees_close(came, found, 1e-8)
            assert left == state

    @pytest.mark.filterwarnings("ignore:.*the function leaves a tensor")  # its loss in an attribute
    @pytest.mark.parametrize("kind", KINDS)
    def test_in_torch_func(self, kind):
        def gradients(block):
            torch.manual_seed(0)
            F, G = Part(kind), Part(kind)
            net, x = WAYS["a coupling"](F, G, block), torch.randn(5, 6, dtype=torch.float64)
            return [grad(lambda x: net(net(x)).square().sum())(x) for _ in range(6)], F.state(), G.state()

        assert_trees_close(gradients(invertible_checkpoint)[0], gradients(without)[0], 1e-8)
        assert gradients(invertible_checkpoint)[1:] == gradients(without)[1:]

    def test_is_found_where_functions_lead_to_a_module(self):
        def states(block):
            torch.manual_seed(0)
            parts = [Part("counter") for _ in range(4)]
            bound, closed, given, listed = parts
            others = [listed]

            def f(x, part=given):
                return bound.forward(x) + closed(x) + part(x) + others[0](x)

            net, x = block(partial(f), None), torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            found = [torch.autograd.grad(net(net(x)).sum(), x)[0] for _ in range(6)]
            return found, [part.calls for part in parts]

        found, wanted = states(invertible_checkpoint), states(without)
        assert_trees_close(found[0], wanted[0], 1e-8)
        assert found[1] == wanted[1]

    def test_of_a_copy_is_its_own(self):
        torch.manual_seed(0)
        part = Part("counter")
        block = invertible_checkpoint(additive_coupling(part, nn.Tanh(), split_dim=1))
        holder = nn.Module()
        holder.part, holder.block = part, block
        for _ in range(5):
            block(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        part.balance = None
        copied = copy.deepcopy(holder)
        copied.block(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        assert (part.calls, copied.part.calls) == (5, 6)

    def test_that_is_set_before_the_backward_pass_is_kept(self):
        def gradient(block):
            torch.manual_seed(0)
            part = Part("counter")
            net = WAYS["a checkpoint"](part, part, block)
            x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
            y = net(x).sum()
            part.calls = 100
            return torch.autograd.grad(y, x)[0], part.calls

        (found, left), (wanted, _) = gradient(invertible_checkpoint), gradient(without)
        assert_trees_close(found, wanted, 1e-9)
        assert left == 100


class TestLossesInAttributes:
    """A loss that a part leaves in an attribute, as experts do for their balance."""

    @pytest.mark.parametrize("check", ["warn", "off", True, 1e-4])
    @pytest.mark.parametrize("way", WAYS)
    def test_have_gradients_before_and_after_that_of_the_net(self, check, way):
        def gradients(block):
            torch.manual_seed(0)
            F, G = Part("counter"), Part("counter")
            x = torch.randn(5, 6, dtype=torch.float64)
            loss = WAYS[way](F, G, block)(x).square().mean()
            together = torch.autograd.grad(loss + F.balance, F.lin.weight, retain_graph=True)
            alone = torch.autograd.grad(F.balance, F.lin.weight)
            return [*together, *alone, F.balance.detach()]

        found = gradients(lambda *f: invertible_checkpoint(*f, check=check))
        assert_trees_close(found, gradients(without), 1e-8)

    @pytest.mark.filterwarnings("ignore::invfunc.errors.InvFuncWarning")
    def test_in_functional_call(self):
        def gradient(block):
            torch.manual_seed(0)
            net = nn.Module()
            net.part = Part("counter")
            net.forward = WAYS["a checkpoint"](net.part, net.part, block)
            x, params = torch.randn(5, 6, dtype=torch.float64), {k: v.detach() for k, v in net.named_parameters()}
            return grad(lambda p: functional_call(net, p, (x,)).sum())(params), net.part.calls

        (found, left), (wanted, state) = gradient(invertible_checkpoint), gradient(without)
        assert_trees_close(found, wanted, 1e-8)
        assert left == state
