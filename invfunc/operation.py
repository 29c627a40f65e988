"""One's own operations, with one's own fast rules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import under
from invfunc.core.run import Run
from invfunc.errors import ArgumentError

ShareRule = Callable[..., tuple[Any, ...]]


def operation(fn: Callable) -> Operation:
    """Make a function of tensors a single operation for all transforms.

    Transforms do not look into its body (a kernel of your own, a custom `autograd.Function`), nor check that it keeps
    the samples apart. Sample n's gradient of a parameter among its arguments is

        grad(lambda p: (op(x, p)[n] * cotangent[n]).sum())(p)        # cotangent: the cotangent at the output

    which `torch.vmap` computes for each sample, unless `share_of` adds a faster rule.

    Args:
        fn: a function of tensors that returns one tensor. The arguments that depend on the samples, and the output,
            have the samples along axis 0, and entry n of the output depends on entry n of these arguments only. It
            draws no random numbers. It is pure in torch.func's sense (see the conventions).

    Returns:
        A function with the signature of `fn`, which is `fn` itself outside of a transform. Its `share_of(argument)`
        takes the name (or the position) of a parameter and decorates its rule, a function
        `rule(cotangent, *args) -> (equation, *operands)`: an einsum, in which v enumerates the vectors that are pulled
        back, n samples, and the labels of the output the dimensions of the parameter. `cotangent` is `[V, n, *out]`,
        the cotangents of some samples; the arguments come as `op` got them, for the same samples. Each dimension of the
        parameter has a label
        of its own: where two of an operand are one in it, flatten the operand. A rule is linear in the cotangent, can
        be differentiated where `fn` can, and draws and writes nothing.

    Raises:
        ArgumentError: in `share_of`, an argument that `fn` does not have; when the rule is used, an equation that does
            not give the parameter's dimensions.

    Example:
        >>> import torch, invfunc
        >>> @invfunc.operation
        ... def scaled(x, weight):
        ...     return x * weight
        >>> @scaled.share_of("weight")
        ... def rule(cotangent, x, weight):
        ...     return "vni,ni->i", cotangent, x
        >>> f = lambda w, x: scaled(x, w).square().sum(1)
        >>> invfunc.batch_grad(f)(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[ 2.,  8.],
                [18., 32.]])

    Composes with: every statistic. `invfunc.testing.check_operation` checks that its rules are right.

    Cost: none outside of a transform.

    Source: BackPACK's extensions of modules, as a function.
    """
    return Operation(fn)


class Operation:
    """A function that a trace sees as a whole, with the shares of its parameters."""

    def __init__(self, fn: Callable) -> None:
        if not callable(fn):
            raise ArgumentError(f"operation(fn): fn is of type {type(fn).__name__}, but has to be a function.")
        self.fn = fn
        called = getattr(fn, "__name__", type(fn).__name__).strip("_")
        self.__name__ = f"operation {called}"  # the blank: no function of torch is called that
        self.__doc__ = fn.__doc__
        self.rules: dict[str | int, ShareRule] = {}
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self._signature = None

    def __repr__(self) -> str:
        return f"operation({self.__name__.removeprefix('operation ')})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not under(Run):
            return self.fn(*args, **kwargs)
        return torch.overrides.handle_torch_function(self, tree.tensors((args, kwargs)), *args, **kwargs)

    def share_of(self, argument: str | int) -> Callable[[ShareRule], ShareRule]:
        """Decorate the rule for the share of an argument, given by its name or its position."""
        known = argument in self._named or (isinstance(argument, int) and 0 <= argument < self._most)
        if not known:
            raise ArgumentError(f"{self!r}.share_of({argument!r}): its arguments are {', '.join(self._named)}.")

        def decorate(rule: ShareRule) -> ShareRule:
            self.rules[argument] = rule
            return rule

        return decorate

    # What the core asks

    def rule_of(self, args: tuple, kwargs: dict[str, Any], param: torch.Tensor) -> Callable | None:
        """The user's rule of a parameter, `(cotangent, args, kwargs, shape) -> equation, operands`, if there is one."""
        given = {**dict(enumerate(args)), **kwargs}
        if self._signature is not None:
            given |= self._signature.bind(*args, **kwargs).arguments
        at = [key for key, x in given.items() if x is param]
        rule = next((self.rules[key] for key in at if key in self.rules), None)
        if rule is None or sum(x is param for x in tree.tensors((args, kwargs))) != 1:
            return None

        def checked(cotangent: torch.Tensor, args: tuple, kwargs: dict, shape: torch.Size) -> Any:
            answer = rule(cotangent, *args, **kwargs)
            equation, *operands = answer if isinstance(answer, (tuple, list)) else (answer,)
            if not gives(equation, operands, shape, cotangent.shape[:2]):
                shapes = ", ".join(str(tuple(getattr(x, "shape", ()))) for x in operands)
                raise ArgumentError(
                    f"the rule of {self!r} returned the equation {equation!r} with operands of shapes {shapes}. It has "
                    "to be an einsum whose operands have v and n where they depend on cotangents and samples, and "
                    f"whose output has the dimensions of the parameter, {tuple(shape)}. What else has an entry for "
                    "each sample has to be an argument of the operation, and samples one of f."
                )
            return equation.replace(" ", ""), operands

        return checked

    def position(self, argument: str | int) -> int:
        """The position of an argument among the positional ones."""
        return argument if isinstance(argument, int) else self._named.index(argument)

    @property
    def _most(self) -> float:
        """The largest number of positional arguments."""
        kinds = [] if self._signature is None else [p.kind for p in self._signature.parameters.values()]
        return math.inf if inspect.Parameter.VAR_POSITIONAL in kinds or not kinds else len(kinds)

    @property
    def _named(self) -> list[str]:
        return [] if self._signature is None else list(self._signature.parameters)


def gives(equation: Any, operands: list[torch.Tensor], shape: torch.Size, count: torch.Size) -> bool:
    """Tells whether an einsum sums over columns and samples, of which there is a `count`, and its result has this
    shape.
    """
    left, _, output = str(equation).replace(" ", "").partition("->")
    inputs, sizes = left.split(","), dict(zip("vn", count, strict=True))
    if len(inputs) != len(operands) or {"v", "n"} & set(output) or not {"v", "n"} <= set(left):
        return False
    for labels, x in zip(inputs, operands, strict=True):
        if not labels.isalpha() or len(set(labels)) < len(labels) or x.ndim != len(labels):
            return False
        if any(sizes.setdefault(label, size) != size for label, size in zip(labels, x.shape, strict=True)):
            return False
    return [sizes.get(label) for label in output] == list(shape)
