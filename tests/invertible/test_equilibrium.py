"""Fixed points: where the steps end, what is told of them, and their gradients in the memory of one step."""

import math
import warnings

import pytest
import torch
from torch.func import grad, vmap

from invfunc import InvFuncWarning, invertible_checkpoint, repeated, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs import Equilibrium, drift, equilibrium, fixed_point
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

W, U = Numbers(1)(4, 4) / 4, Numbers(2)(5, 4)
ZERO = torch.zeros(5, 4, dtype=torch.float64)


def layer(x, w, u):
    return torch.tanh(x @ w + u)


def looped(f, beta, steps):
    """The same steps without checkpoints."""

    def solve(x, *args):
        y = z = x
        for _ in range(steps):
            y = (1 - beta) * y + beta * f(z, *args)
            z = (1 - beta) * z + beta * f(y, *args)
        return z

    return solve


def loss_of(solve):
    def loss(w, u, x=ZERO):
        found = solve(x, w, u)
        return (found.value if isinstance(found, Equilibrium) else found).sin().sum()

    return loss


@pytest.mark.quick
class TestValue:
    @pytest.mark.parametrize("beta", [0.3, 0.5, 0.8])
    def test_is_a_fixed_point_up_to_the_tolerance_after_the_evaluations_that_are_told(self, beta):
        calls = []

        def counted(x, w, u):
            calls.append(1)
            return layer(x, w, u)

        value, evaluations, residual = equilibrium(counted, beta, tolerance=1e-8, max_steps=200)(ZERO, W, U)
        assert len(calls) == evaluations and residual <= 1e-8
        assert_trees_close(value, layer(value, W, U), 2e-8)
        assert_trees_close(value, looped(layer, beta, evaluations // 2)(ZERO, W, U), 1e-14)
        with pytest.warns(InvFuncWarning, match="after"):  # with one step less it has not arrived
            equilibrium(layer, beta, tolerance=1e-8, max_steps=evaluations // 2 - 1)(ZERO, W, U)

    def test_is_none_where_both_copies_go_on_beside_each_other(self):
        with pytest.warns(InvFuncWarning, match="residual"):
            equilibrium(lambda x, u: x + u, tolerance=2e-2)(ZERO, torch.ones_like(ZERO))

    def test_two_copies_that_each_are_the_image_of_the_other_have_not_arrived(self):
        """As those of -x, which does not contract: neither copy moves any more."""
        y, z = repeated(fixed_point(torch.neg))((ZERO + 1, ZERO + 1), [None] * 100)
        assert_trees_close(fixed_point(torch.neg)((y, z)), (y, z), 1e-12)
        with pytest.warns(InvFuncWarning, match="residual is 2.0e.00"):
            assert equilibrium(torch.neg, max_steps=100)(ZERO + 1).residual == pytest.approx(2)

    @pytest.mark.parametrize("bad", ["far", "nan", "grows"])
    def test_what_has_not_arrived_is_told(self, bad):
        f = {"far": layer, "nan": lambda x, w, u: x * math.nan, "grows": lambda x, w, u: 3 * x + 1}[bad]
        solve = equilibrium(f, tolerance=1e-12, max_steps=5)
        with pytest.warns(
            InvFuncWarning, match=r"^equilibrium\(.*, beta=0.5\)\(x, ...\): after .* residual is .*max_steps"
        ):
            found = solve(ZERO, W, U)
        assert found.evaluations == (2 if bad == "nan" else 10) and not found.residual <= 1e-12


class TestGradient:
    @pytest.mark.parametrize("beta", [0.3, 0.8])
    def test_is_that_of_the_same_steps_in_every_way(self, beta):
        solve = equilibrium(layer, beta, tolerance=1e-6, max_steps=100)
        steps = solve(ZERO, W, U).evaluations // 2
        plain, args = looped(layer, beta, steps), (W, U)
        wanted = grad(loss_of(plain), (0, 1, 2))(*args, ZERO)
        assert_trees_close(grad(loss_of(solve), (0, 1, 2))(*args, ZERO), wanted, 1e-9, 1e-2)
        leaves = [t.clone().requires_grad_() for t in (*args, ZERO)]
        assert_trees_close(torch.autograd.grad(loss_of(solve)(*leaves), leaves), wanted, 1e-9, 1e-2)
        many = torch.stack([W, W])
        assert_trees_close(vmap(grad(loss_of(solve)), (0, None))(many, U)[1], wanted[0], 1e-9)
        twice = grad(lambda w: grad(loss_of(solve))(w, U).square().sum())(W)
        assert_trees_close(twice, grad(lambda w: grad(loss_of(plain))(w, U).square().sum())(W), 1e-9)

    def test_has_the_digits_of_single_precision(self):
        """The way back multiplies the rounding of each step: the copies of the state are in float64."""
        slow = 1.5 * W  # which takes many steps
        wanted = grad(lambda w: equilibrium(layer)(ZERO, w, U).value.sum())(slow)
        found = grad(lambda w: equilibrium(layer)(ZERO.float(), w, U.float()).value.sum())(slow.float())
        assert_trees_close(found.double(), wanted, 2e-6)

    def test_is_that_of_the_implicit_function_where_it_has_arrived(self):
        """(I - df/dx)^-1 df/dw, which knows nothing of steps."""
        solve = equilibrium(layer, tolerance=1e-10, max_steps=200)
        x = solve(ZERO, W, U).value
        jacobian = torch.func.jacrev(layer)(x, W, U).reshape(20, 20)
        adjoint = torch.linalg.solve(torch.eye(20).double() - jacobian.T, x.cos().flatten()).view_as(x)
        _, pull = torch.func.vjp(lambda w: layer(x, w, U), W)
        assert_trees_close(grad(loss_of(solve))(W, U), pull(adjoint)[0], 1e-8)

    @pytest.mark.parametrize("beta", [0.3, 0.5, 0.8])
    def test_has_the_digits_of_float32(self, beta):
        """Steps in float32 would invert to a state that is far off."""
        x, w, u = (t.float() for t in (ZERO, W, U))
        solve = equilibrium(layer, beta, tolerance=1e-6, max_steps=100)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = grad(loss_of(solve))(w, u, x)
            leaf = w.clone().requires_grad_()
            (plain,) = torch.autograd.grad(loss_of(solve)(leaf, u, x), leaf)
        steps = solve(x, w, u).evaluations // 2
        wanted = grad(loss_of(looped(layer, beta, steps)))(w.double(), u.double())
        assert found.dtype == torch.float32 == solve(x, w, u).value.dtype
        assert_trees_close([found.double(), plain.double()], [wanted, wanted], 3e-6)
        assert max(drift(fixed_point(layer, beta), (x, x), [w] * steps, u)) > 1e-3

    def test_memory_does_not_grow_with_the_steps(self):
        """Memory of plain steps grows with them."""
        x, u, peaks = ZERO.repeat(100, 1), U.repeat(100, 1), {}
        for steps in (4, 12):
            ways = {
                "solve": equilibrium(layer, tolerance=1e-30, max_steps=steps),
                "repeated": lambda x, w, u, n=steps: repeated(fixed_point(layer))((x * 1, x * 1), [w] * n, u)[1],
                "plain": looped(layer, 0.5, steps),
            }
            for name, way in ways.items():
                w = W.clone().requires_grad_()
                with nothing_collected(), Meter() as meter, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loss_of(way)(w, u, x).backward()
                    peaks.setdefault(name, []).append(meter.peak())
        for name, (shallow, deep) in peaks.items():
            assert deep > 2 * shallow if name == "plain" else deep <= 1.05 * shallow

    def test_anchors_keep_states(self):
        """So many that float64 keeps half of its digits, or as they are asked for."""
        every = {beta: equilibrium(layer, beta).anchor_every for beta in (0.1, 0.5, 0.8, 0.999)}
        assert every == {0.1: 85, 0.5: 13, 0.8: 5, 0.999: 1}
        assert equilibrium(layer, anchor_every=3).anchor_every == 3
        errors = []
        for k in (2, 60):
            solve = equilibrium(layer, tolerance=1e-30, max_steps=30, anchor_every=k)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                errors.append((grad(loss_of(solve))(W, U) - grad(loss_of(looped(layer, 0.5, 30)))(W, U)).abs().max())
        assert errors[0] < 1e-12 and errors[1] > 10 * errors[0]


class TestRelaxed:
    def test_block_and_repeated_are_the_formula(self):
        y, z = repeated(fixed_point(layer, 0.3))((ZERO, ZERO), [W] * 3, U)
        assert_trees_close(z, looped(layer, 0.3, 3)(ZERO, W, U), 1e-15)
        g = invertible_checkpoint(fixed_point(layer, 0.3))
        again = g(g(g((ZERO, ZERO), W, U), W, U), W, U)
        assert_trees_close(tree.leaves(again), [y, z], 0)


REFUSED = [
    (lambda: fixed_point(torch.sin, 1.0), r"^fixed_point\(sin, beta=1.0\): beta has to be between 0 and 1"),
    (lambda: fixed_point(torch.sin)(ZERO), "x has to be a pair of tensors"),
    (lambda: equilibrium(torch.sin, tolerance=0), r"^equilibrium\(sin, beta=0.5, tolerance=0\): tolerance has to be"),
    (lambda: equilibrium(lambda x: x[:1])(ZERO), r"fixed_point.*what f returns is a tensor of shape \[1, 4\]"),
    (lambda: equilibrium(lambda x: x)(3), r"fixed_point.*x has to be a pair of tensors, but is tuple of int, int"),
]


@pytest.mark.parametrize(("fn", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_what_is_refused(fn, reason):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=reason):
        fn()
