"""Modules that know their inverse, as libraries of normalizing flows write them, as pairs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.couplings import OfModule, per_sample
from invfunc.pairs.pair import Invertible
from invfunc.pairs.value import Value


def from_module(module: nn.Module, *, log_det: bool = True) -> Invertible:
    """The pair of a module that has an inverse, as libraries of normalizing flows write them.

        y, log_det = module(x, *args)                  x, _ = module.inverse(y, *args)            # normflows, nflows
        y, log_det = module(x, *args)                  x, _ = module(y, *args, rev=True)          # FrEIA
        y, log_det = module(*args).call_and_ladj(x)    x = module(*args).inv(y)                   # zuko

    Args:
        module: one that has a method `inverse` like its forward, an argument `rev` of its forward, or an attribute
            `inv` and a forward that returns a `torch.distributions.Transform`. Of FrEIA, a tensor is given as `(x,)`.
        log_det: whether a module with an `inverse` returns a log-determinant beside each result, as the libraries do;
            False for one that returns the result alone.

    Returns:
        An `Invertible`, called as `pair(x)` with the module's own parameters, which get their gradients, or as
        `pair(x, params, *args, **kwargs)` with those of `functional(module)`, or None for its own, in front of what the
        module gets beside x. Its log-determinant `[N]` is that of the module, summed over what it has of each sample.

    Raises:
        ArgumentTypeError: `module` is no module.
        ArgumentError: it has none of these three; it does not return what they return, or a log-determinant that is
            neither a number nor `[N, ...]`.

    Example:
        >>> import torch, invfunc
        >>> class Scale(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return x * self.weight[0], self.weight.abs().log().sum()
        ...     def inverse(self, y):
        ...         return y / self.weight[0], -self.weight.abs().log().sum()
        >>> flow = invfunc.pairs.from_module(Scale(2, 1))
        >>> params = {"weight": torch.tensor([[1.0, 2.0]])}
        >>> flow(torch.ones(1, 2), params), invfunc.invert(flow)(torch.ones(1, 2), params)
        (tensor([[1., 2.]]), tensor([[1.0000, 0.5000]]))
        >>> invfunc.with_log_det(flow)((torch.ones(1, 2), torch.zeros(1)), params)
        (tensor([[1., 2.]]), tensor([0.6931]))

    Composes with: `chain` of several, `invertible_checkpoint` (whose check finds a wrong inverse), `invert`,
    `with_log_det`, which evaluates the module once for both; `testing.laws.check_pair` says whether the
    log-determinant is that of the Jacobian.

    A module that starts from its first batch (normflows' and FrEIA's ActNorm) has to be called once before.

    Cost: that of the module in either direction; the log-determinant alone is another forward pass.

    Source: the interfaces of normflows, nflows, FrEIA and zuko.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"from_module(module): module is of type {type(module).__name__}, but has to be an nn.Module. Of two "
            "functions: Invertible(f, f_inv)."
        )
    call = f"from_module({type(module).__name__})"
    run = _interface(call, module)
    if not log_det and run is not _by_inverse:
        raise ArgumentError(f"{call[:-1]}, log_det=False): only a module with a method `inverse` may leave it out.")
    part = OfModule(_Directed(module, run, log_det))
    forward, inverse, both, both_back = (_Way(call, part, *way) for way in product(("y", "both"), (False, True)))
    if not log_det:
        return Invertible(forward, inverse, name=call)
    carried = Invertible(both, both_back, name=f"with_log_det({call})", carries_a_sum=True)
    return Invertible(forward, inverse, log_det=_Way(call, part, "log_det", False), name=call, carried=carried)


class _Directed(nn.Module):
    """A module in both directions."""

    def __init__(self, module: nn.Module, run: Callable, log_det: bool) -> None:
        super().__init__()
        self.module, self.run, self.log_det = module, run, log_det

    def forward(self, x: Any, *args: Any, backwards: bool, **kwargs: Any) -> tuple[Any, Any]:
        """The result, and the log-determinant of this direction."""
        found = self.run(self.module, backwards, x, *args, **kwargs)
        return found if self.log_det else (found, None)


@dataclass(frozen=True, eq=False)
class _Way(Value):
    """A direction of a module.

    Args:
        gives: the result alone ("y"), the log-determinant of each sample alone, or "both" on a state `(x, s)` with the
            sum of log-determinants.
    """

    call: str
    part: OfModule
    gives: str
    backwards: bool

    def __call__(self, x: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        x, s = x if self.gives == "both" else (x, None)
        if isinstance(params, dict):
            params = {f"module.{name}": p for name, p in params.items()}
        found = self.part(x, params, *args, backwards=self.backwards, **kwargs)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            what = f"{len(found)} results" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
            raise ArgumentError(
                f"{self.call}: {'the inverse' if self.backwards else 'forward'} has to return (result, log_det), but "
                f"returns {what}. Pass log_det=False where both directions return the result alone."
            )
        if self.gives == "y":
            return found[0]
        log_det = self._of_each(tree.tensors(x)[0], found[1])
        return log_det if s is None else (found[0], s + log_det)

    def _of_each(self, x: torch.Tensor, found: Any) -> torch.Tensor:
        """The log-determinant of each sample: `[N]`."""
        found = found.to(x.device) if isinstance(found, torch.Tensor) else x.new_tensor(found)
        if not found.ndim or found.shape == (1,):
            return found.reshape(1).expand(len(x))
        if found.shape[0] != len(x):
            raise ArgumentError(
                f"{self.call}: the log-determinant has shape {list(found.shape)}, but there are {len(x)} samples."
            )
        return per_sample(found)


# The interfaces


def _interface(call: str, module: nn.Module) -> Callable:
    if "rev" in inspect.signature(module.forward).parameters:
        return _by_argument
    if callable(getattr(module, "inverse", None)):
        return _by_inverse
    if hasattr(type(module), "inv"):
        return _by_transform
    raise ArgumentError(
        f"{call}: it has no method `inverse`, its forward no argument `rev`, and it has no `inv` as transforms have. "
        "Of two functions: Invertible(f, f_inv)."
    )


def _by_inverse(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    return (module.inverse if backwards else module)(x, *args, **kwargs)


def _by_argument(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    single = not isinstance(x, (tuple, list))
    found, log_det = module((x,) if single else x, *args, rev=backwards, **kwargs)
    return found[0] if single and isinstance(found, (tuple, list)) else found, log_det


def _by_transform(module: Any, backwards: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    transform = module(*args, **kwargs)
    transform = transform.inv if backwards else transform
    if hasattr(transform, "call_and_ladj"):
        return transform.call_and_ladj(x)
    y = transform(x)
    return y, transform.log_abs_det_jacobian(x, y)
