"""Blocks whose numbers have several dtypes: under autocast, in half precision, where a function changes the dtype."""

import pytest
import torch
from torch import nn

from invfunc import (
    additive_coupling,
    affine_coupling,
    chain,
    check_inverse,
    invertible_checkpoint,
    layers,
    with_log_det,
)
from invfunc.errors import InverseError
from invfunc.pairs import drift, fixed_point, leapfrog, momentum
from invfunc.testing import assert_trees_close
from tests.meter import Meter
from tests.strategies import Numbers

HALVES = [torch.bfloat16, torch.float16]
SINGLE, CHANNELS = 1e-5, 4


def normal(*shape: int) -> torch.Tensor:
    return Numbers(len(shape))(*shape).float()


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(normal(n, n))[0]


ROWS, IMAGES, BIAS = normal(6, CHANNELS), normal(3, CHANNELS, 2, 4), normal(CHANNELS)
LAYERS = {
    "linear": (layers.linear(), ROWS, (orthogonal(CHANNELS), BIAS)),
    "tall": (layers.linear(), ROWS, (orthogonal(2 * CHANNELS)[:, :CHANNELS], None)),
    "orthogonal_linear": (layers.orthogonal_linear(), ROWS, (normal(CHANNELS, CHANNELS), BIAS)),
    "conv1x1": (layers.conv1x1(), IMAGES, (orthogonal(CHANNELS), BIAS)),
    "rotation": (layers.conv1x1(orthogonal=True), IMAGES, (normal(CHANNELS, CHANNELS), BIAS)),
    "patch_conv": (layers.patch_conv(), IMAGES, orthogonal(4 * CHANNELS).reshape(-1, CHANNELS, 2, 2)),
    "batch_norm": (layers.batch_norm(statistics=(BIAS, BIAS.exp())), IMAGES, (BIAS.exp(), BIAS)),
}


def network(outputs: int) -> nn.Module:
    torch.manual_seed(outputs)
    net = nn.Sequential(nn.Linear(CHANNELS, 8), nn.Tanh(), nn.Linear(8, outputs * CHANNELS))
    return net.requires_grad_(False)


ONE, TWO = network(1), network(2)


def scale_and_shift(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, t = TWO(x).chunk(2, -1)
    return s, t


PAIRS = {
    "additive": additive_coupling(ONE, ONE),
    "affine": affine_coupling(scale_and_shift, scale_and_shift),
    "momentum": momentum(ONE, 0.8),
    "leapfrog": leapfrog(ONE, 0.5),
    "fixed_point": fixed_point(ONE, 0.2),
}


@pytest.mark.parametrize("half", HALVES)
class TestUnderAutocast:
    @pytest.mark.parametrize("kind", LAYERS)
    def test_layers_compute_in_full_precision(self, kind, half):
        layer, x, params = LAYERS[kind]
        y = layer(x, params)
        with torch.autocast("cpu", half):
            assert_trees_close(layer(x, params), y, SINGLE)
            assert_trees_close(layer.inverse(y, params), x, SINGLE)
            assert layer(x.to(half), params).dtype == half  # what came out of an operation under autocast

    @pytest.mark.parametrize("kind", PAIRS)
    def test_what_is_rounded_in_both_directions_leaves_no_error(self, kind, half):
        with torch.autocast("cpu", half):
            errors = drift(chain(*[PAIRS[kind]] * 3), (ROWS, ROWS.sin()), None)
        assert max(errors) < SINGLE

    def test_flows_have_the_gradients_of_plain_ones(self, half):
        F, G = (nn.Conv2d(CHANNELS // 2, CHANNELS, 3, padding=1) for _ in range(2))
        coupling = affine_coupling(lambda x: F(x).chunk(2, 1), lambda x: G(x).chunk(2, 1), split_dim=1)
        norm = layers.batch_norm(statistics=(BIAS, BIAS.exp()))

        def gradients(wrap):
            blocks = [wrap(with_log_det(pair)) for pair in (norm, layers.conv1x1(), coupling)]
            given = [t.clone().requires_grad_() for t in (IMAGES, BIAS.exp(), BIAS, orthogonal(CHANNELS), BIAS)]
            x, *params = given
            state = (x * 1, torch.zeros(len(x)))
            with torch.autocast("cpu", half):
                for _ in range(2):
                    for block, p in zip(blocks, (params[:2], params[2:], None), strict=True):
                        state = block(state, p)
            loss = (state[0].square().flatten(1).sum(1) / 2 - state[1]).mean()
            return torch.autograd.grad(loss, [*given, *F.parameters(), *G.parameters()])

        plain = gradients(lambda pair: pair)
        assert_trees_close(gradients(invertible_checkpoint), plain, 4 * torch.finfo(half).eps)


def test_autocast_around_a_backward_pass_keeps_nothing_of_it():
    """Its cache would keep all that was cast, to the end of autocast."""

    def peak(depth):
        layers = [nn.Linear(CHANNELS, CHANNELS) for _ in range(2)]
        block, x = invertible_checkpoint(additive_coupling(*layers)), torch.randn(500, CHANNELS)
        with Meter() as meter, torch.autocast("cpu", torch.bfloat16):
            state = x.sin(), x.cos()
            for _ in range(depth):
                state = block(state)
            (state[0] * state[1]).sum().backward()
        return meter.peak()

    assert peak(12) < 1.1 * peak(3)


class TestOtherDtypes:
    def test_an_inverse_may_give_x_in_a_wider_one(self):
        def f(x, w):
            return x.double().sinh() * w

        def f_inv(y, w):
            return (y / w).asinh()

        x, w = ROWS.clone().requires_grad_(), torch.tensor(1.5, requires_grad=True)
        for g in (invertible_checkpoint(f, f_inv), f):
            x.grad = w.grad = None
            g(x * 1, w).square().sum().backward()
            found = torch.func.grad(lambda x, w, g=g: g(x * 1, w).square().sum(), (0, 1))(x.detach(), w.detach())
            assert_trees_close(found, (x.grad, w.grad), SINGLE)
        assert check_inverse((f, f_inv), ROWS, 2.0).x["x"] < SINGLE

    def test_a_narrower_one_is_refused_with_the_way_out(self):
        x = ROWS.clone().requires_grad_()
        rounding = lambda x: x.to(torch.bfloat16).sinh(), torch.asinh
        with pytest.raises(InverseError, match=r"torch.bfloat16, where it was .*keep=\(0,\)"):
            invertible_checkpoint(*rounding)(x * 1).sum().backward()
        invertible_checkpoint(*rounding, keep=(0,))(x * 1).sum().backward()
        assert_trees_close(x.grad, ROWS.to(torch.bfloat16).cosh().float(), SINGLE)
