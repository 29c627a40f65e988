"""Parts without a gradient, backward passes in inference mode, and parameters that data initialises."""

import pytest
import torch
from torch.func import grad_and_value, vmap

from invfunc import ReplayError, additive_coupling, invertible_checkpoint, momentum
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


def hard(z, w):
    """A part without a gradient, as those of quantisers."""
    with torch.no_grad():
        rounded = (z @ w).round()
    return rounded + 0.3 * z @ w


START = Numbers()(2, 3), Numbers(1)(2, 3)
W = Numbers(2)(3, 3)
PAIRS = {
    "coupling": lambda f: additive_coupling(lambda b, w: f(b, w), lambda a, w: f(a, w)),
    "momentum": lambda f: momentum(f, 0.9),
}
BLOCKS = {
    "inverse": invertible_checkpoint,
    "kept": lambda pair: invertible_checkpoint(pair, keep=True),
    "checked": lambda pair: invertible_checkpoint(pair, check=True),
}


def results(step, w, run):
    p = (w, w) if "coupling" in repr(step) else w

    def loss(p):
        a, b = step(step(step(START, p), p), p)
        return (a * b).sin().sum()

    if run == "vmap":
        return vmap(grad_and_value(loss))(torch.utils._pytree.tree_map(lambda t: t[None], p))
    return grad_and_value(loss)(p)


@pytest.mark.parametrize("run", ["grad", "vmap"])
@pytest.mark.parametrize("made", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_value_and_gradient_are_of_one_function_in_torch_func(pair, made, run):
    assert_trees_close(results(made(pair(hard)), W, run), results(pair(hard), W, run), 1e-9)


@pytest.mark.parametrize("made", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_and_in_plain_autograd(made, frozen):
    """A block whose gradient needs nothing that is saved is inverted by itself."""
    pair = momentum(hard, 0.9)
    step, w = made(pair), W.clone().requires_grad_()

    def found(step):
        q = w.detach() if frozen else w
        a, b = step(step(step(step(START, w), q), q), w)
        loss = (a * b).sin().sum()
        return loss.detach(), torch.autograd.grad(loss, w)

    assert_trees_close(found(step), found(pair), 1e-9)


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("made", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_backward_pass_may_be_in_inference_mode(pair, made, calls):
    """As that of torch; calls that are watched, and such that need not be."""
    w = W.clone().requires_grad_()

    def found(step, mode):
        p = (w, w) if "coupling" in repr(step) else w
        for _ in range(calls):
            a, b = step(step(step(START, p), p), p)
            loss = (a * b).sin().sum()
        with mode:
            torch.autograd.grad(loss, w, retain_graph=True)
            return torch.autograd.grad(loss, w)[0].clone()

    pair = pair(lambda z, w: (z @ w).tanh())
    wanted = found(pair, torch.enable_grad())
    assert_trees_close(found(made(pair), torch.inference_mode()), wanted, 1e-9)


def test_nothing_is_saved_in_inference_mode_with_gradients():
    """Where torch makes no graph."""
    pair = momentum(hard, 0.9)
    with torch.inference_mode(), torch.enable_grad():
        assert_trees_close(invertible_checkpoint(pair)(START, W), pair(START, W), 1e-9)


class ActNorm(torch.nn.Module):
    """Glow's, whose first batch gives it its scale."""

    def __init__(self, buffer):
        super().__init__()
        self.scale, self.buffer, self.filled = torch.nn.Parameter(torch.ones(3, dtype=W.dtype)), buffer, False
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x):
        if not (self.done if self.buffer else self.filled):
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.done.fill_(True)
            self.filled = True
        return x * self.scale

    def inverse(self, y):
        return y / self.scale


@pytest.mark.parametrize("buffer", [True, False])
def test_parameters_that_are_initialised_by_data_name_the_way_out(buffer):
    plain = ActNorm(buffer)
    (wanted,) = torch.autograd.grad(plain(START[0]).sin().sum(), plain.scale)
    norm = ActNorm(buffer)
    with pytest.raises(ReplayError, match="no_grad"):
        invertible_checkpoint(norm, norm.inverse)(START[0]).sin().sum().backward()
    norm = ActNorm(buffer)
    block = invertible_checkpoint(norm, norm.inverse)
    with torch.no_grad():
        block(START[0])
    (found,) = torch.autograd.grad(block(START[0]).sin().sum(), norm.scale)
    assert_trees_close(found, wanted, 1e-12)
