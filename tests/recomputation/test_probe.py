"""An x that does not come back is told of, with the cause; honest nets are not."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from invfunc import (
    InexactWarning,
    InverseError,
    Invertible,
    ReplayError,
    additive_coupling,
    affine_coupling,
    invert,
    invertible_checkpoint,
    momentum,
    thresholds,
    tree,
    with_log_det,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X = Numbers()(6, 5)
TABLE = Numbers(2)(7).requires_grad_()


def warned(run, *args):
    """The texts of warnings."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(*args)
    return [str(w.message) for w in told if issubclass(w.category, InexactWarning)]


def backward(*blocks, x=None, dtype=torch.float64):
    """The gradients of x through blocks that hold no input."""
    x = X.to(dtype) if x is None else x
    x = tree.map_tensors(lambda t: t.clone().requires_grad_(), x)
    y = tree.map_tensors(lambda t: t * 1, x)
    for block in blocks:
        y = block(y)
    return torch.autograd.grad(sum(t.float().sin().sum() for t in tree.tensors(y)), tree.tensors(x))


def slope(*blocks):
    """The same in torch.func."""

    def loss(x):
        x = x * 1
        for block in blocks:
            x = block(x)
        return x.sin().sum()

    return grad(loss)(X)


def slopes(*blocks):
    return vmap(lambda _: slope(*blocks))(torch.zeros(3))


def cubed(x):
    return x * x.square().add(1)


def halves(part, other=torch.sin):
    return additive_coupling(part, other, split_dim=0)


def drawn(draw):
    return halves(lambda b: b.tanh() * 10 * draw() * b)


class Counter:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return float(self.count)


WRONG = {
    "no inverse": (lambda x: x.exp(), lambda y: y.log() + 1.0, InverseError, "is not an inverse of f"),
    "not at all places": (lambda x: F.relu(x).square(), lambda y: y.sqrt(), InverseError, "f has no inverse there"),
    "no number": (lambda x: x.exp(), lambda y: y.log() / 0, InverseError, "error of inf"),
}


def seeded(seed, draw):
    seed(1)  # whose first numbers are not near each other
    return draw


CHANGING = {
    "Python": lambda: seeded(random.seed, random.random),
    "numpy": lambda: seeded(np.random.seed, np.random.rand),
    "a counter": Counter,
}
RUNS = {"backward": backward, "torch.func": slope, "vmap": slopes}
CUBED = invertible_checkpoint(cubed, None)


HELD = {
    "backward": lambda block, x: torch.autograd.grad(block(x.requires_grad_()).sin().sum(), x),
    "torch.func": lambda block, x: grad(lambda x: block(x).sin().sum())(x),
    "vmap": lambda block, x: vmap(grad(lambda x: block(x).sin().sum()))(torch.stack([x, x])),
}


@pytest.mark.parametrize("run", HELD.values(), ids=HELD)
@pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING)
def test_numbers_that_change_while_the_caller_holds_x(run, change):
    """The inverse is not asked for x then, so that its error does not tell."""
    for block in (invertible_checkpoint(drawn(change())), invertible_checkpoint(drawn(change()), keep=True)):
        with pytest.raises(ReplayError, match="something that changes"):
            run(block, X.clone())


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
class TestWrong:
    @pytest.mark.parametrize(("f", "f_inv", "kind", "told"), WRONG.values(), ids=WRONG)
    def test_inverses_are_errors(self, run, f, f_inv, kind, told):
        block = invertible_checkpoint(f, f_inv)
        with pytest.raises(kind, match=rf"^invertible_checkpoint\(.*the inverse gives x back.*{told}"):
            run(block, CUBED)

    @pytest.mark.parametrize("change", CHANGING.values(), ids=CHANGING)
    def test_numbers_that_change_are_told_as_such(self, run, change):
        with pytest.raises(ReplayError, match="something that changes: random numbers of Python or numpy, a counter"):
            run(invertible_checkpoint(drawn(change())), CUBED)

    def test_inverses_that_change_are_errors_however_little_x_is_off(self, run):
        count = Counter()
        block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4 * count()))
        with pytest.raises(ReplayError, match="with an error of [1-9].*e-04.*something else each time"):
            run(block, CUBED)

    def test_small_errors_are_told_of_once_a_block(self, run):
        block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4))
        other = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4))
        (text,) = warned(lambda: (run(block, CUBED), run(block, CUBED)))
        assert "error of 1.0e-04" in text and "not an inverse" in text and "<lambda>" in text
        assert len(warned(run, other, CUBED)) == 1

    def test_check_chooses(self, run):
        def block(check):
            return invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4), check=check)

        with pytest.raises(InverseError, match="error of 1.0e-04"):
            run(block("error"), CUBED)
        wrong = invertible_checkpoint(lambda x: x.exp(), lambda y: 0 * y, check="off")
        for silent in (block("off"), block(False), wrong):
            assert not warned(run, silent, CUBED)

    def test_drift_is_told_as_such(self, run):
        """Each block makes errors of y a hundred times larger in x."""
        block = invertible_checkpoint(lambda x: x * 0.01 + 3 + x.square() * 1e-9, lambda y: (y - 3) * 100)
        text = warned(lambda: pytest.raises(InverseError, run, *[block] * 7, CUBED).match("drift.*anchor_every"))
        assert text


class TestChanges:
    def test_in_a_plain_checkpoint(self):
        """Where nothing is inverted, what autograd saves is compared."""
        for make in CHANGING.values():
            change = make()
            block = invertible_checkpoint(lambda x, c=change: (x * c()).sin().square(), None)
            with pytest.raises((ReplayError, InexactWarning), match="computes other numbers.*something that changes"):
                backward(block)

    def test_of_masks_and_indices_that_are_saved(self):
        """Beside a number that f reads from x, after which no numbers are compared."""
        shares = itertools.cycle((0.8, 0.2))

        def masked(x):
            scale = x.abs().max().item()
            return torch.where(torch.rand_like(x) < next(shares), x.sin() / scale, 0.0)

        ids = np.arange(30)

        def looked_up(x):
            return x * TABLE[torch.from_numpy(ids) % 7 + 0].view(6, 5)

        for f in (masked, looked_up):
            block = invertible_checkpoint(f, None)
            x = X.clone().requires_grad_()
            y = block(x)
            ids += 1
            with pytest.raises(ReplayError, match="computes other numbers.*something that changes"):
                y.sum().backward()

    def test_that_do_not_matter_for_the_gradient_are_let_be(self):
        """A factor in the graph is that of the first time."""
        counter = Counter()
        found = backward(invertible_checkpoint(lambda x: counter() * x.exp(), None))
        assert_trees_close(found, backward(lambda x: x.exp()), 1e-12)

    def test_between_forward_and_backward(self):
        scale = [1.0]
        block = invertible_checkpoint(halves(lambda b: b.tanh() * scale[0] * b))
        x = X.clone().requires_grad_()
        y = block(x * 1)
        scale[0] = 1.5
        with pytest.raises(ReplayError, match="other numbers: `mul`.* has other arguments.*the mode of a module"):
            y.sum().backward()

    def test_of_the_order_in_which_tensors_are_saved(self):
        """Two tensors of one shape; shapes alone would not tell."""
        turns = []

        def either(x):
            turns.append(1)
            a, b = (x.exp(), x.sigmoid()) if len(turns) % 2 else (x.sigmoid(), x.exp())
            return a * b

        with pytest.raises(ReplayError, match="computes other numbers"):
            backward(invertible_checkpoint(either, None))


def net(dtype):
    layers = [nn.Linear(16, 16).to(dtype) for _ in range(2)]
    return lambda b: layers[1](F.gelu(layers[0](b)))


def deep(depth, dtype):
    torch.manual_seed(0)
    return [invertible_checkpoint(additive_coupling(net(dtype), net(dtype), split_dim=1)) for _ in range(depth)]


WIDE = Numbers()(4, 32)


def _around_one(x):
    """Ends with a tensor that is saved, and nothing but rounding."""
    return x.sin() + (x.softmax(-1).sum(-1, keepdim=True) - 1).square()


class TestHonest:
    @pytest.mark.parametrize(
        ("dtype", "depth"), [(torch.float64, 100), (torch.float32, 100), (torch.bfloat16, 20), (torch.float16, 20)]
    )
    def test_nets_have_no_warning(self, dtype, depth):
        blocks = deep(depth, dtype)
        assert not warned(lambda: backward(*blocks, x=WIDE.to(dtype)))

    def test_autocast_has_none(self):
        """The state is in float32, what is added to it in bfloat16."""
        blocks = deep(20, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert not warned(lambda: backward(*blocks, x=WIDE.float()))

    def test_a_state_that_begins_with_zeros_has_none(self):
        x = 1e4 * Numbers()(6, 5).float()
        blocks = [invertible_checkpoint(momentum(torch.sin, gamma=0.5)) for _ in range(5)]
        assert not warned(lambda: backward(*blocks, x=(x, 0 * x)))

    @pytest.mark.parametrize("wrap", [lambda pair: pair, invert], ids=["forward", "inverted"])
    def test_a_carried_sum_beside_small_numbers_has_none(self, wrap):
        """It begins at zeros, and comes back with the roundings of the log-determinants, which are larger than x."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8))
        pair = affine_coupling(lambda b: net(b).chunk(2, -1), lambda a: net(a).chunk(2, -1), split_dim=-1)
        block = invertible_checkpoint(wrap(with_log_det(pair)))
        x = 1e-3 * Numbers()(256, 8).float()
        assert not warned(lambda: backward(block, block, x=(x, torch.zeros(256))))

    def test_a_state_of_nothing_but_zeros_has_none(self):
        """Of more entries than are looked at, so that their sum is compared, which has no size."""
        x = torch.zeros(20, 5)
        blocks = [invertible_checkpoint(momentum(torch.cos, gamma=0.7)) for _ in range(3)]
        assert not warned(lambda: backward(*blocks, x=(x, x)))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_what_was_no_number_is_none_again(self, bad):
        x = WIDE.clone()
        x[1, 2] = bad
        blocks = deep(3, torch.float64)
        for found, wanted in zip(backward(*blocks, x=x), backward(*(b.pair for b in blocks), x=x), strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())

    def test_what_overflows_is_what_it_is_without(self):
        block = invertible_checkpoint(lambda x: (x * 1e200) * 1e200, lambda y: y * 1e-200 * 1e-200)
        assert not warned(lambda: backward(CUBED, block, CUBED))

    def test_running_statistics_and_noise_are_not_compared(self):
        norm = nn.BatchNorm1d(5).double()
        block = invertible_checkpoint(halves(lambda b: norm(b), lambda a: F.rrelu(a, training=True)))
        assert not warned(lambda: backward(block, block, CUBED))

    @pytest.mark.parametrize("width", [1, 4, 16])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_what_is_nothing_but_rounding_is_no_change(self, dtype, width):
        """The mean of what has been normalized is some zero, and another one each time."""
        torch.manual_seed(0)
        x = (Numbers()(8, width).to(dtype), Numbers()(8, width).to(dtype))

        def part():
            norms = [nn.BatchNorm1d(width, track_running_stats=False), nn.BatchNorm1d(width, track_running_stats=False)]
            return nn.Sequential(norms[0], nn.Linear(width, width, bias=False), norms[1], nn.Tanh()).to(dtype)

        for couple in (momentum, lambda f: additive_coupling(f, part()), lambda f: additive_coupling(f, _around_one)):
            pairs = [couple(part()) for _ in range(6)]
            found = []
            assert not warned(lambda p=pairs, f=found: f.extend(backward(*map(invertible_checkpoint, p), x=x)))
            assert_trees_close(tuple(found), backward(*pairs, x=x), 1e-2)

    def test_integers_and_what_is_empty(self):
        pair = Invertible(lambda x: (x[0].exp(), x[1] + 1, x[2]), lambda y: (y[0].log(), y[1] - 1, y[2]))
        block = invertible_checkpoint(pair)
        x = Numbers()(3, 4).requires_grad_()
        y = block(block((x * 1, torch.arange(5), x[:0])))
        assert_trees_close(torch.autograd.grad(y[0].sum(), x), (x.exp() * x.exp().exp(),), 1e-9)


class TestOnADevice:
    """Nothing is looked at before the backward pass has ended."""

    @pytest.fixture(autouse=True)
    def unknown(self, monkeypatch):
        monkeypatch.setattr(thresholds, "AT_ONCE", ())

    @pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
    def test_wrong_inverses_are_told_of_in_the_end(self, run):
        block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() + 1)
        with pytest.raises(InverseError, match=r"^invertible_checkpoint\(.*gives x back"):
            run(block, CUBED)
        near = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4))
        assert len(warned(lambda: (run(near, CUBED), run(near, CUBED)))) == 1

    def test_honest_nets_have_no_warning(self):
        blocks, x = deep(3, torch.float64), WIDE.clone()
        assert not warned(lambda: backward(*blocks, x=x))
        x[1, 2] = float("nan")
        assert not warned(lambda: backward(*blocks, x=x))
        pair = affine_coupling(lambda b: (b, b), lambda a: (a, a), split_dim=0)
        assert not warned(lambda: backward(invertible_checkpoint(pair), x=torch.zeros(4, 3)))

    def test_zeros_beside_numbers(self):
        zeros_beside_numbers()


def zeros_beside_numbers():
    """A state that begins at zeros, whose sum has no size of its own, comes back with roundings of the other one."""
    step = invertible_checkpoint(momentum(lambda b, w: torch.tanh(b @ w)))
    for dtype in (torch.float32, torch.float64):
        x = Numbers()(64, 8).to(dtype)
        weights = [(0.3 * Numbers(i)(8, 8).to(dtype)).requires_grad_() for i in range(4)]
        state = x * 1, torch.zeros_like(x)
        for w in weights:
            state = step(state, w)
        assert not warned(state[0].square().sum().backward)


def test_zeros_beside_numbers():
    zeros_beside_numbers()
