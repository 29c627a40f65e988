"""Networks that run backwards as the steps do that they are made of: of dynamics, and towards a fixed point."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.moves import Move, Moves
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import as_part


def momentum(f: Callable, gamma: float = 0.9) -> Invertible:
    """The pair `(x, v) -> (x', v')` of a residual network with momentum, for any f, without splitting x.

        v' = gamma * v + (1 - gamma) * f(x, p)          x = x' - v'
        x' = x + v'                                     v = (v' - (1 - gamma) * f(x, p)) / gamma

    Args:
        f: any function that keeps the shape of x, or a module. f is pure in torch.func's sense (see the conventions).
        gamma: between 0 and 1, without them. The inverse divides by it: errors grow by 1 / gamma at each step.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`; zeros start v. Its log-determinant is the
        logarithm of gamma for each entry of v, [N].

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: gamma is not between 0 and 1, f changes the shape, or the state is not a pair of one shape.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.momentum(lambda x: 2 * x, gamma=0.5)
        >>> pair((torch.ones(2), torch.zeros(2)))
        (tensor([2., 2.]), tensor([1., 1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: f once in either direction, and once in a backward pass.

    Source: M. Sander et al., Momentum Residual Neural Networks, 2021.
    """
    f = as_part("momentum(f)", "f", f)
    call = f"momentum({describe(f)}, gamma={gamma})"
    if not isinstance(gamma, (int, float)) or not 0 < gamma < 1:
        raise ArgumentError(f"{call}: gamma has to be between 0 and 1.")
    v_by_f, x_by_v = Move(1, 0, gamma, 1 - gamma), Move(0, None)
    return Moves(call, ("f",), "xv", (v_by_f, x_by_v)).pair_of(f)


def leapfrog(force: Callable, step: float) -> Invertible:
    """The pair `(x, v) -> (x', v')` of one step of a particle in a field of forces, which runs backwards as well.

        w = v + step / 2 * force(x, p)
        x' = x + step * w
        v' = w + step / 2 * force(x', p)

    Args:
        force: any function that keeps the shape of x, or a module. force is pure in torch.func's sense (see the
            conventions).
        step: the length of the step in time.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: force is not a function, or step is not a number.
        ArgumentError: the state is not a pair of one shape, or force changes it.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.leapfrog(lambda x: -x, step=0.5)
        >>> pair((torch.ones(1), torch.zeros(1)))
        (tensor([0.8750]), tensor([-0.4688]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: two forces in either direction, and two in a backward pass.

    Source: L. Verlet, 1967; B. Chang et al., Reversible Architectures for Arbitrarily Deep Residual Networks, 2018.
    """
    force = as_part("leapfrog(force, step)", "force", force)
    call = f"leapfrog({describe(force)}, step={step})"
    if not isinstance(step, (int, float)):
        raise ArgumentTypeError(f"{call}: step is of type {type(step).__name__}, but has to be a number.")
    v_by_force, x_by_v = Move(1, 0, by=step / 2), Move(0, None, by=step)
    return Moves(call, ("force",), "xv", (v_by_force, x_by_v, v_by_force)).pair_of(force)


def fixed_point(f: Callable, beta: float = 0.5) -> Invertible:
    """The pair `(y, z) -> (y', z')` of a step towards the fixed point x = f(x, p), which runs backwards as well.

        y' = (1 - beta) * y + beta * f(z, p)        z = (z' - beta * f(y', p)) / (1 - beta)
        z' = (1 - beta) * z + beta * f(y', p)       y = (y' - beta * f(z, p)) / (1 - beta)

    y and z are two copies of the state, which begin as the same, `(x, x)`, and both come to rest at the fixed point.
    `equilibrium` takes as many steps as a tolerance asks for.

    Args:
        f: any function that keeps the form of x, a tensor or any pytree of tensors; or a module. f is pure in
            torch.func's sense (see the conventions).
        beta: between 0 and 1, without them: how far a step goes. The inverse divides by 1 - beta: errors grow by 1 /
            (1 - beta) at each step, and by up to the square of that where f is steep (`drift`). Many steps back need
            float64 or `anchor_every=`.

    Returns:
        An `Invertible`, called as `pair((y, z), p, *args, **kwargs)`; `repeated(pair)((x, x), [p] * n)` takes n steps.
        As in every pair, p of a module is that of `functional(module)`, or None for its own, and its further inputs
        stand behind p. Its log-determinant is twice the logarithm of 1 - beta for each entry of y, [N].

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: beta is not between 0 and 1, f gives another form, or the state is not a pair of one form.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.fixed_point(torch.cos)
        >>> y, z = invfunc.repeated(pair)((torch.ones(1), torch.ones(1)), [None] * 40)
        >>> y, y.cos()
        (tensor([0.7391]), tensor([0.7391]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`, `drift`.

    Cost: f twice in either direction, and twice in a backward pass.

    Source: Reversible Deep Equilibrium Models, arXiv 2509.12917, 2025.
    """
    f = as_part("fixed_point(f)", "f", f)
    call = f"fixed_point({describe(f)}, beta={beta})"
    if not isinstance(beta, (int, float)) or not 0 < beta < 1:
        raise ArgumentError(f"{call}: beta has to be between 0 and 1.")
    return Moves(call, ("f",), "yz", tuple(Move(part, 0, 1 - beta, beta) for part in (0, 1))).pair_of(f)
