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
from invfunc.linear_algebra.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call, Mixed, Place, Unknown
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors import Part, Recipe, Site
from invfunc.recording import Trace

ShareRule = Callable[..., tuple[Any, ...]]


def operation(fn: Callable) -> Operation:
    """Make a function of tensors one operation in the eyes of all transforms.

    Its body is not looked into: not what it computes with inside (a kernel of one's own, a custom
    `autograd.Function`), nor whether it keeps the samples apart. Sample n's gradient of a parameter among its arguments
    is

        grad(lambda p: (op(x, p)[n] * cotangent[n]).sum())(p)        # cotangent: the cotangent at the output

    which `torch.vmap` computes sample by sample, until `share_of` gives a rule that is faster.

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
        if not under((Trace, Run)):
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

    def follow(self, call: Call) -> Place:
        """Samples go in and out along axis 0."""
        if not isinstance(call.out, torch.Tensor):
            raise Unknown("it returns something else than one tensor")
        for _, axis in call.samples:
            if axis != Axis(0):
                raise Mixed(f"its samples have to lie along axis 0, and come along {axis}")
        if call.out.ndim == 0 or call.out.shape[0] != call.n:
            raise Mixed(f"it returned shape {tuple(call.out.shape)} for {call.n} samples along axis 0")
        return Axis(0)

    def recipe(self, site: Site, param: torch.Tensor) -> Recipe | None:
        """The user's rule as a factored share."""
        call = site.call
        given = {**dict(enumerate(call.args)), **call.kwargs}
        if self._signature is not None:
            given |= self._signature.bind(*call.args, **call.kwargs).arguments
        at = [key for key, x in given.items() if x is param]
        rule = next((self.rules[key] for key in at if key in self.rules), None)
        if rule is None or sum(x is param for x in tree.tensors((call.args, call.kwargs))) != 1:
            return None

        def factors(cotangent: torch.Tensor, part: Part) -> tuple[Any, ...]:
            def shown(x: torch.Tensor) -> torch.Tensor:
                axis = call.place(x)
                return site.exposed(x, axis, part).squeeze(1) if isinstance(axis, Axis) else site.value(x)

            args, kwargs = tree.map_tensors(shown, (call.args, call.kwargs))
            return rule(cotangent.squeeze(2), *args, **kwargs)

        nothing = torch.zeros(1, 1, 1, *call.out.shape[1:], dtype=param.dtype, device=param.device)
        answer = factors(nothing, slice(0, 1))
        inputs, output = self._labels(param, *(answer if isinstance(answer, (tuple, list)) else (answer,)))

        def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
            _, *operands = factors(cotangent, part)
            return list(zip(inputs, operands, strict=True))

        reads = tuple(x for x in tree.tensors((call.args, call.kwargs)) if x is not param)
        return Recipe(output, build=build, reads=reads)

    def _labels(self, param: torch.Tensor, equation: Any, *operands: torch.Tensor) -> tuple[list[str], str]:
        """Those of the core: V and N for v and n, other lower-case letters for the rest."""
        answer = Answer(equation, operands)
        if not answer.gives(param.shape):
            shapes = ", ".join(str(shape) for _, shape in answer.pairs)
            raise ArgumentError(
                f"the rule of {self!r} returned the equation {equation!r} with operands of shapes {shapes} (for one "
                "cotangent of one sample). It has to be an einsum whose operands have v and n where they depend "
                "on cotangents and samples, and whose output has the dimensions of the parameter, "
                f"{tuple(param.shape)}. What else has an entry for each sample has to be an argument of the operation, "
                "and samples one of f."
            )
        return [answer.renamed(labels) for labels in answer.inputs], answer.renamed(answer.output)

    def position(self, argument: str | int) -> int:
        """Where an argument stands among the positional ones."""
        return argument if isinstance(argument, int) else self._named.index(argument)

    @property
    def _most(self) -> float:
        """How many positional arguments there can be."""
        kinds = [] if self._signature is None else [p.kind for p in self._signature.parameters.values()]
        return math.inf if inspect.Parameter.VAR_POSITIONAL in kinds or not kinds else len(kinds)

    @property
    def _named(self) -> list[str]:
        return [] if self._signature is None else list(self._signature.parameters)


class Answer:
    """What a rule returned when it was asked about one column of one sample: an equation, and its operands."""

    def __init__(self, equation: Any, operands: tuple[Any, ...]) -> None:
        left, _, self.output = str(equation).replace(" ", "").partition("->")
        self.inputs = left.split(",")
        self.complete = len(self.inputs) == len(operands)
        shapes = [tuple(getattr(x, "shape", ())) for x in operands]
        self.pairs = list(zip(self.inputs, shapes, strict=False))
        """The labels of each operand, and its shape."""
        others = sorted({c for c in left if c.isalpha()} - {"v", "n"})
        self._names = {"v": "V", "n": "N", **dict(zip(others, LETTERS, strict=False))}

    def gives(self, shape: torch.Size) -> bool:
        """Whether it is an einsum that sums over columns and samples, and whose result has this shape."""
        if not self.complete or not all(self._labelled(labels, sizes) for labels, sizes in self.pairs):
            return False
        sizes = [pair for labels, sizes in self.pairs for pair in zip(labels, sizes, strict=True)]
        if any(size != 1 for label, size in sizes if label in "vn") or {"v", "n"} & set(self.output):
            return False
        return [dict(sizes).get(label) for label in self.output] == list(shape)

    def _labelled(self, labels: str, shape: tuple[int, ...]) -> bool:
        """Whether each dimension has a label of its own."""
        return len(shape) == len(labels) == len(set(labels)) and set(labels) <= self._names.keys()

    def renamed(self, labels: str) -> str:
        return "".join(self._names[label] for label in labels)
