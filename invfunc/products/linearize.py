"""A function and its Jacobian at one point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from invfunc.callables import check_functions, describe
from invfunc.products.curvature import of_jacobian
from invfunc.products.given import Given
from invfunc.products.product import Linearised, Space
from invfunc.transform import ArgumentNames, Transform, own_memory


def linearize(f: Callable, *, has_aux: bool = False) -> Linearization:
    """A function with products of its Jacobian J and of `J^T`, both from one forward pass.

        outputs, jvp = torch.func.linearize(lambda p: f(p, *inputs), params)
        outputs, vjp = torch.func.vjp(lambda p: f(p, *inputs), params)

    Args:
        f: any function `f(params, *inputs)` that returns a floating-point tensor or a pytree of them. f is pure in
            torch.func's sense (see the conventions).
        has_aux: f returns `(outputs, aux)`; aux comes last.

    Returns:
        A function `(params, *inputs) -> (outputs, jvp, vjp)`: `jvp(v)`, of a tree like the parameters, is a tree like
        the outputs, and `vjp(c)`, of a tree like the outputs, one like the parameters.

    Raises:
        ArgumentError, ArgumentTypeError: f returns something else than floating-point tensors, or v or c is not a tree
            like the parameters or the outputs.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x * w).sin()
        >>> outputs, jvp, vjp = invfunc.linearize(f)(torch.zeros(2), torch.tensor([1.0, 3.0]))
        >>> outputs, jvp(torch.ones(2)), vjp(torch.tensor([0.0, 1.0]))
        (tensor([0., 0.]), tensor([1., 3.]), tensor([0., 3.]))

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around `jvp` and `vjp`.

    Cost: one gradient to record, half of one for each product, and the memory of two gradients, which is kept.

    Source: JAX's `linearize`; J v from the derivative of `u -> J^T u` is Townsend's trick of 2017.
    """
    check_functions("linearize", f)
    return Linearization(f, has_aux)


@dataclass(frozen=True, repr=False)
class Linearization(Transform):
    """A function `(params, *inputs) -> (outputs, jvp, vjp)`."""

    f: Callable
    has_aux: bool = False
    several, owned = True, False  # the outputs are made so, the maps are no tensors
    of_one_batch = (
        "its outputs are those of one batch. Call it for each, or take a product that adds up, as ggnvp(f, loss)"
    )

    def __repr__(self) -> str:
        return f"linearize({describe(self.f)})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[tuple, Any]:
        given = Given(self.f, None, args, kwargs, names, has_aux=self.has_aux)
        with given.scope:
            there, values, structure = of_jacobian(given)
            outputs, aux = given.scope.result((values, given.aux))
        shown, memory = f"{self!r}({', '.join(names)})", (args, kwargs)
        params = Space(names, given.structure, there.back.into)
        images = Space(["outputs"], structure, there.there.into)
        jvp = Linearised(f"{shown}[1]", there, params, images, memory=memory)
        vjp = Linearised(f"{shown}[2]", there.transposed, images, params, "c", memory=memory)
        return (own_memory(images.tree(outputs), memory), jvp, vjp), aux
