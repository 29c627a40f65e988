"""An x that does not come back is told of; honest nets are not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from invfunc import Invertible, additive_coupling, affine_coupling, invert, invertible_checkpoint, tree, with_log_det
from invfunc.errors import InexactWarning, InverseError
from invfunc.pairs import momentum
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X = Numbers()(6, 5)


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


WRONG = {
    "no inverse": (lambda x: x.exp(), lambda y: y.log() + 1.0),
    "not at all places": (lambda x: F.relu(x).square(), lambda y: y.sqrt()),
    "no number": (lambda x: x.exp(), lambda y: y.log() / 0),
}
RUNS = {"backward": backward, "torch.func": slope, "vmap": slopes}
CUBED = invertible_checkpoint(cubed, None)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
class TestWrong:
    @pytest.mark.parametrize(("f", "f_inv"), WRONG.values(), ids=WRONG)
    def test_inverses_are_errors(self, run, f, f_inv):
        with pytest.raises(InverseError, match=r"invertible_checkpoint\(.*gives x back"):
            run(invertible_checkpoint(f, f_inv), CUBED)

    def test_small_errors_are_told_of_once_a_block(self, run):
        block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4))
        other = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4))
        (text,) = warned(lambda: (run(block, CUBED), run(block, CUBED)))
        assert "1.0e-04" in text and "<lambda>" in text
        assert len(warned(run, other, CUBED)) == 1

    def test_check_chooses(self, run):
        def block(check):
            return invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + 1e-4), check=check)

        with pytest.raises(InverseError, match="1.0e-04"):
            run(block("error"), CUBED)
        wrong = invertible_checkpoint(lambda x: x.exp(), lambda y: 0 * y, check="off")
        for silent in (block("off"), block(False), wrong):
            assert not warned(run, silent, CUBED)


def test_an_output_that_was_written_by_data_is_an_error():
    """A write by `.data` changes no version counter."""
    block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log())
    y = block(X.clone().requires_grad_() * 1)
    y.data.mul_(2)
    with pytest.raises(InverseError, match=r"y was written by `\.data`"):
        CUBED(y).sum().backward()


@pytest.mark.parametrize("off", [1.0, 0.2], ids=["error", "warning"])
def test_a_state_in_half_precision_is_told_the_way_out(off):
    """As autocast makes it of a convolution or a linear layer in front."""
    block = invertible_checkpoint(lambda x: x.exp(), lambda y: y.log() * (1 + off))
    with torch.autocast("cpu", torch.bfloat16):
        state = nn.Linear(5, 5)(X.float())
    text = r"state is in torch\.bfloat16.*`stem\(x\)\.float\(\)`"
    with pytest.raises(InverseError, match=text) if off == 1 else pytest.warns(InexactWarning, match=text):
        backward(block, CUBED, x=state.detach(), dtype=torch.bfloat16)


def told(block, x):
    """True if a block after one that frees its input warns or fails."""
    try:
        return bool(warned(lambda: backward(block, x=x)))
    except InverseError:
        return True


class TestWrongEntries:
    @pytest.mark.parametrize("wrong", [1.0, float("nan"), 1e-2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_of_one_sample_of_many_are_not_missed(self, dtype, wrong):
        """Of a sample that is larger than the others, as an outlier is."""
        x = Numbers()(300, 64).to(dtype)
        x[217] *= 30

        def back(y):
            return torch.where(torch.arange(300)[:, None] == 217, (y / 2) * (1 + wrong), y / 2)

        assert all(told(invertible_checkpoint(lambda x: x * 2 + 0 * x.sin(), back), x) for _ in range(4))

    @pytest.mark.parametrize("shape", [(32, 64, 8, 8), (64, 512), (100, 100), (4096,)], ids=str)
    def test_of_a_half_of_any_axis_are_not_missed(self, shape):
        """Also where strides divide each other."""
        x = Numbers()(*shape)
        for axis, size in enumerate(shape):
            for half in (range(size // 2), range(size // 2, size), range(0, size, 2), range(1, size, 2)):
                by = torch.zeros(shape).index_fill(axis, torch.tensor(list(half)), 0.5).double()
                assert told(invertible_checkpoint(lambda x: x.sinh(), lambda y, by=by: y.asinh() + by), x)

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_beside_entries_that_are_no_numbers_are_not_missed(self, value):
        x = Numbers()(6, 5)
        x[1, 1] = value
        assert told(invertible_checkpoint(lambda x: x * 2 + 0 * x.sin(), lambda y: y * 0.51), x)


def forward(x, p):
    a = x[0] + torch.tanh(x[1] @ p)
    return a, x[1] + torch.tanh(a @ p)


def inverse(y, p):
    """One that is wrong by what an entry of its parameters says."""
    b = y[1] - torch.tanh(y[0] @ p)
    return (y[0] - torch.tanh(b @ p)) * (1 + p[0, 0]), b


@pytest.mark.parametrize("at", [0, 2, 4])
class TestInAStack:
    """Blocks of which a single one is wrong."""

    @staticmethod
    def weights(at, by):
        ws = [(0.1 * Numbers(i)(4, 4)).index_fill(0, torch.tensor([0]), 0.0) for i in range(5)]
        ws[at][0, 0] = by
        return ws

    @staticmethod
    def value(ws, **options):
        block = invertible_checkpoint(forward, inverse, **options)
        state = Numbers(9)(40, 4), Numbers(8)(40, 4)
        state = tuple(t * (1 + 0 * ws[0].sum()) for t in state)
        for w in ws:
            state = block(state, w)
        return torch.stack(state).sin().sum()

    def test_is_an_error_each_time(self, at):
        ws = self.weights(at, 0.5)
        with pytest.raises(InverseError, match=r"invertible_checkpoint\(forward, "):
            grad(self.value)(ws)
        value = self.value([w.requires_grad_() for w in ws])
        for _ in range(2):
            with pytest.raises(InverseError, match=r"invertible_checkpoint\(forward, "):
                torch.autograd.grad(value, ws, retain_graph=True)


def net(dtype):
    layers = [nn.Linear(16, 16).to(dtype) for _ in range(2)]
    return lambda b: layers[1](F.gelu(layers[0](b)))


def deep(depth, dtype):
    torch.manual_seed(0)
    return [invertible_checkpoint(additive_coupling(net(dtype), net(dtype), split_dim=1)) for _ in range(depth)]


WIDE = Numbers()(4, 32)


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

    def test_integers_and_what_is_empty(self):
        pair = Invertible(lambda x: (x[0].exp(), x[1] + 1, x[2]), lambda y: (y[0].log(), y[1] - 1, y[2]))
        block = invertible_checkpoint(pair)
        x = Numbers()(3, 4).requires_grad_()
        y = block(block((x * 1, torch.arange(5), x[:0])))
        assert_trees_close(torch.autograd.grad(y[0].sum(), x), (x.exp() * x.exp().exp(),), 1e-9)


def test_zeros_beside_numbers_have_none():
    """A state that begins at zeros, whose sum has no size of its own, comes back with roundings of the other one."""
    step = invertible_checkpoint(momentum(lambda b, w: torch.tanh(b @ w)))
    for dtype in (torch.float32, torch.float64):
        x = Numbers()(64, 8).to(dtype)
        weights = [(0.3 * Numbers(i)(8, 8).to(dtype)).requires_grad_() for i in range(4)]
        state = x * 1, torch.zeros_like(x)
        for w in weights:
            state = step(state, w)
        assert not warned(state[0].square().sum().backward)
