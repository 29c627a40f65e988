"""Tensors that the function of a block leaves behind: states that it replaces, what it keeps, losses on the side."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from invfunc import (
    Invertible,
    InvFuncWarning,
    ReplayError,
    additive_coupling,
    chain,
    invertible_checkpoint,
    layers,
    with_log_det,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X = Numbers(0)(3, 4)
EXACT = 1e-9


def as_it_is(pair):
    return pair


class Counting(nn.Module):
    """A state that is replaced, or written in place."""

    def __init__(self, in_place):
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))
        self.in_place = in_place

    def forward(self, b):
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return b.sin() / self.count.clone()


class Keeping(nn.Module):
    """A table that the first call computes."""

    def __init__(self):
        super().__init__()
        self.table, self.angle = None, nn.Parameter(Numbers(1)(4))

    def forward(self, b):
        if self.table is None:
            self.table = torch.arange(4.0, dtype=torch.float64).cos()
        return (b * self.angle).sin() * self.table


def steps(part, wrap, calls=1):
    """Gradients and states of some steps of training."""
    block, found = wrap(additive_coupling(lambda b: part(b), torch.tanh)), []
    for i in range(3):
        x = (X * (i + 1)).requires_grad_()
        state = (x, x.cos())
        for _ in range(calls):
            state = block(state)
        (state[0].sin() * state[1]).sum().backward()
        found += [x.grad, *(b.clone() for b in part.buffers())]
    return found


class TestStates:
    @pytest.mark.parametrize("in_place", [False, True])
    def test_of_one_call_for_each_backward_pass(self, in_place):
        assert_trees_close(*(steps(Counting(in_place), wrap) for wrap in (invertible_checkpoint, as_it_is)), EXACT)

    def test_that_are_replaced_by_several_calls_are_refused(self):
        """What is evaluated again would set them back. The way out is to write them in place."""
        with pytest.raises(ReplayError, match="made in an earlier call and left behind.*in place \\(self.count.add_"):
            steps(Counting(False), invertible_checkpoint, calls=2)
        assert_trees_close(*(steps(Counting(True), wrap, calls=2) for wrap in (invertible_checkpoint, as_it_is)), EXACT)

    def test_in_torch_func(self):
        block = invertible_checkpoint(additive_coupling(Counting(False), torch.tanh))
        with pytest.raises(ReplayError, match="made in an earlier call and left behind"):
            grad(lambda x: block(block((x, x)))[0].sum())(X)


class TestWhatIsKept:
    @pytest.mark.parametrize("calls", [1, 2])
    def test_is_computed_before(self, calls):
        with pytest.raises(ReplayError, match="kept.* before, by a call under torch.no_grad\\(\\)"):
            steps(Keeping(), invertible_checkpoint, calls)
        found = []
        for wrap in (invertible_checkpoint, as_it_is):
            part = Keeping()
            with torch.no_grad():
                part(X)
            found.append(steps(part, wrap, calls))
        assert_trees_close(*found, EXACT)


class TestOnTheSide:
    """A loss that the function puts into a list."""

    def loss(self, wrap, side):
        def part(b):
            h = b.sin()
            if side == "list":
                losses.append(h.square().mean())
            elif side == "detached":
                losses.append(h.detach().mean())
            return h

        def returned(x, _):
            a, b = x
            return (a + b.sin(), b), b.sin().square().mean()

        def back(y, _):
            return (y[0][0] - y[0][1].sin(), y[0][1])

        losses, block = [], wrap(additive_coupling(part, torch.tanh))

        def loss(x):
            losses.clear()
            if side == "returned":
                g = invertible_checkpoint(returned, back) if wrap is invertible_checkpoint else returned
                (a, b), extra = g((x, x.cos()), None)
                return (a * b).sum() + extra
            a, b = block((x, x.cos()))
            return (a * b).sum() + sum(losses)

        return loss

    @pytest.mark.parametrize("of", [grad, lambda f: vmap(grad(f))], ids=["grad", "vmap"])
    def test_is_told_of_in_torch_func(self, of):
        with pytest.warns(
            InvFuncWarning, match="leaves a tensor of shape \\[\\] behind .* return it with y, or detach"
        ):
            of(self.loss(invertible_checkpoint, "list"))(X)

    @pytest.mark.parametrize("side", ["returned", "detached", "nothing"])
    def test_what_is_returned_or_detached_is_right(self, side):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, wanted = (grad(self.loss(wrap, side))(X) for wrap in (invertible_checkpoint, as_it_is))
        assert_trees_close(found, wanted, EXACT)

    def test_has_its_gradient_in_plain_autograd(self):
        found = []
        for wrap in (invertible_checkpoint, as_it_is):
            x = X.clone().requires_grad_()
            found.append(torch.autograd.grad(self.loss(wrap, "list")(x), x))
        assert_trees_close(*found, EXACT)


def test_parts_of_a_narrower_dtype_than_they_become():
    """The inverse gives them in the wider one; shared functions get them in the dtype that they had."""

    def wide(b):
        return b.sin() + torch.ones(4, dtype=torch.float64)

    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        x, w = X.float().requires_grad_(), torch.ones(4, requires_grad=True)
        block = wrap(additive_coupling(lambda b, w=w: (b * w).tanh(), wide))
        a, b = block((x, x * 2))
        found.append(torch.autograd.grad((a * b).sum(), [x, w]))
    assert_trees_close(*found, 1e-5)


def test_what_all_of_a_batch_share_is_compared_as_such():
    """Statistics of an x that is the same for all of a vmap are those of each, however often they are computed."""
    x = Numbers(2)(6, 3)
    weights = Numbers(3)(2, 3).exp()

    def loss(check):
        block = invertible_checkpoint(layers.batch_norm(), check=check)
        return lambda w: (block(x, (w, w)) * x.sin()).sum()

    found, wanted = (vmap(grad(loss(check)))(weights) for check in (True, "off"))
    assert_trees_close(found, wanted, EXACT)


@pytest.mark.parametrize("form", ["custom", "coupling"])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_an_operation_saves_before_it_fills_it_is_filled(form, inplace):
    """`rrelu` saves its noise, and draws it then; nothing comes behind it in the block that autograd saves."""
    matrix = Numbers(4)(4, 4)

    def part(b):
        return nn.functional.rrelu(b @ matrix, training=True, inplace=inplace)

    pairs = {
        "custom": Invertible(lambda x: (x[0] + part(x[1]), x[1]), lambda y: (y[0] - part(y[1]), y[1])),
        "coupling": additive_coupling(part, torch.sin),
    }
    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        a, b = wrap(pairs[form])((x, x.cos()))
        found.append(torch.autograd.grad((a.sin() * b).sum(), x))
    assert_trees_close(*found, EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_determinant_that_is_nothing_but_rounding_comes_back(dtype):
    """That of a rotation is some 1e-16 beside a state of size 1."""
    Q = torch.linalg.qr(Numbers(5)(4, 4))[0].to(dtype)
    flow = with_log_det(chain(*[p for _ in range(3) for p in (layers.linear(), layers.leaky_relu(0.9))]))
    x = X.to(dtype, copy=True).requires_grad_()
    params = [p for _ in range(3) for p in (Q, None)]
    y, s = invertible_checkpoint(flow, check="error")((x, torch.full((3,), 1e-17, dtype=dtype)), params)
    found = torch.autograd.grad(y.square().sum() + s.sum(), x)
    z = x
    for _ in range(3):
        z = nn.functional.leaky_relu(z @ Q.mT, 0.9)
    assert_trees_close(found, torch.autograd.grad(z.square().sum(), x), EXACT if dtype == torch.float64 else 1e-4)


class Averaging(nn.Module):
    """A state that is replaced by one of the data, which no gradient goes through."""

    def __init__(self, in_place=False):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, b):
        new = 0.9 * self.mean + b.detach().mean(0)
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return (b - self.mean.clone()).sin()


class Twice(nn.Module):
    """Two blocks that evaluate the same part."""

    def __init__(self, part, wrap):
        super().__init__()
        self.part = part
        self.blocks = [wrap(additive_coupling(lambda b: part(b), torch.tanh)) for _ in range(2)]

    def forward(self, x, number=1):
        state = (x, x.cos())
        for block in self.blocks[:number]:
            state = block(state)
        return (state[0].sin() * state[1]).sum()


def both_at_once(net, x):
    net(x, 2).backward()


def backward_once_more(net, x):
    first = net(x)
    first.backward(retain_graph=True)
    net(2 * x).backward()
    first.backward()


def without_a_graph_in_between(net, x):
    first = net(x)
    with torch.no_grad():
        net(2 * x)
    first.backward()


def with_the_state_of_another(net, x):
    functional_call(net, {"part.mean": net.part.mean + 1}, (x,)).backward()


class TestStatesThatAreReplacedInBetween:
    """What is evaluated again would set them back, in silence."""

    def done(self, program, in_place, wrap):
        net, x = Twice(Averaging(in_place), wrap), X.clone().requires_grad_()
        program(net, x)
        return x.grad, net.part.mean

    @pytest.mark.parametrize("check", ["warn", True])
    @pytest.mark.parametrize(
        "program", [both_at_once, backward_once_more, without_a_graph_in_between, with_the_state_of_another]
    )
    def test_are_refused_and_right_where_they_are_written_in_place(self, program, check):
        wrap = partial(invertible_checkpoint, check=check)
        with pytest.raises(ReplayError, match="Write a state in place"):
            self.done(program, False, wrap)
        assert_trees_close(*(self.done(program, True, w) for w in (wrap, as_it_is)), EXACT)

    @pytest.mark.parametrize("check", ["warn", True])
    def test_are_refused_where_gradients_go_through_them(self, check):
        """What a check evaluates again would cut them off."""

        class Attached(Averaging):
            def forward(self, b):
                self.mean = 0.9 * self.mean + b.mean(0)
                return (b - self.mean).sin()

        net = Twice(Attached(), partial(invertible_checkpoint, check=check))
        with pytest.raises(ReplayError, match="Write a state in place"):
            both_at_once(net, X.clone().requires_grad_())

    @pytest.mark.parametrize("check", ["warn", True])
    def test_are_right_where_the_same_call_has_replaced_them(self, check):
        def program(net, x):
            for i in range(3):
                y = net((i + 1) * x)
                y.backward(retain_graph=True)
                y.backward()

        wraps = partial(invertible_checkpoint, check=check), as_it_is
        assert_trees_close(*(self.done(program, False, w) for w in wraps), EXACT)


class TestStatesOfSeveralBlocks:
    def test_that_share_a_module_are_refused(self):
        part = Averaging()
        blocks = [invertible_checkpoint(additive_coupling(lambda b: part(b), torch.tanh)) for _ in range(2)]
        x = X.clone().requires_grad_()
        with pytest.raises(ReplayError, match="made in an earlier call and left behind"):
            blocks[1](blocks[0]((x, x)))
        block = invertible_checkpoint(chain(*(additive_coupling(lambda b: part(b), torch.tanh) for _ in range(2))))
        with pytest.raises(ReplayError, match="made in an earlier call and left behind"):
            block((x, x), [None, None])

    def test_that_the_inverse_reads_anew_are_refused(self):
        part = Averaging()
        block = invertible_checkpoint(
            lambda x: (x[0] + part(x[1]), x[1]), lambda y: (y[0] - part(y[1]), y[1]), check="off"
        )
        x = X.clone().requires_grad_()
        a, b = block((x * 1, x.cos()))
        with pytest.raises(ReplayError, match="made in an earlier call and left behind"):
            (a.sin() * b).sum().backward()


@pytest.mark.parametrize("draws", [False, True])
def test_an_expanded_input_is_expanded_when_it_is_computed_again(draws):
    """Kernels and what they save, and the order in which `rand_like` draws, are those of its strides."""
    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        torch.manual_seed(0)
        base = Numbers(6)(1, 5, 8).requires_grad_()
        F, G = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        block = wrap(
            additive_coupling(lambda b, F=F: F(b) * (torch.rand_like(b) if draws else b), lambda a, G=G: G(a).tanh())
        )
        a, b = block(tuple((base.expand(3, 5, 8)).chunk(2, -1)))
        found.append(torch.autograd.grad((a.sin() * b).sum(), [base, *F.parameters(), *G.parameters()]))
    assert_trees_close(*found, EXACT)
