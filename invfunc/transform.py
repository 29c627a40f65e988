"""Transforms: functions that say what they are, and in an error which call it is of."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc._torch.functorch import memories, storage_of
from invfunc._torch.values import checked_at_the_end
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError, SampleAxisError
from invfunc.problem import numpy_arrays

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY


@dataclass(eq=False)
class ArgumentNames(Sequence[str]):
    """The names of the arguments of a call in an error; they are looked up when there is one."""

    f: Callable
    count: int
    target: bool = False
    """True if the last one is that of a loss, not of f."""
    vector: str = ""
    """Name of the one behind the parameters, if it is not one of f's."""

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    @property
    def without_vector(self) -> ArgumentNames:
        return ArgumentNames(self.f, max(self.count - 1, min(self.count, 1)), self.target) if self.vector else self

    @cached_property
    def _found(self) -> list[str]:
        if self.vector:
            names = self.without_vector
            return [*names[:1], self.vector, *names[1:]]
        try:
            parameters = list(inspect.signature(self.f).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
        names = [*positional, *(f"{several}[{i}]" for i in range(max(0, self.count - len(positional))))]
        if not parameters and self.count:
            names[0] = "params"
        target = self.target and self.count > 1
        return names[: self.count - target] + ["target"] * target

    def signature(self) -> inspect.Signature:
        """The signature of a call: the arguments of f, with a vector behind the parameters, or a target behind the
        batch.
        """
        own = inspect.signature(self.f)
        if not self.vector and not self.target:
            return own
        batch, constants = list[inspect.Parameter](), list[inspect.Parameter]()
        for p in own.parameters.values():
            (batch if p.kind <= p.VAR_POSITIONAL and p.default is p.empty else constants).append(p)
        if any(p.kind == p.VAR_POSITIONAL for p in batch):  # behind which nothing can have a name
            front = [inspect.Parameter(name, _POSITIONAL) for name in ("params", self.vector) if name]
            batch = [*front, inspect.Parameter("batch", inspect.Parameter.VAR_POSITIONAL)]
        elif not batch:
            raise ValueError("f takes nothing that has to be given by place")
        else:
            if self.vector:
                batch.insert(1, inspect.Parameter(self.vector, batch[0].kind))
            if self.target:
                batch.append(inspect.Parameter("target", batch[-1].kind))
        by_name = [p.replace(kind=p.KEYWORD_ONLY) if p.kind < p.VAR_POSITIONAL else p for p in constants]
        return own.replace(parameters=[*batch, *by_name])


Compute = Callable[[tuple, dict[str, Any], Any], tuple[Any, Any]]
"""From the arguments of a call and their names to the result and aux."""


class OfInstance:
    """An attribute that an object computes, and that its class has otherwise, if at all."""

    def __init__(self, compute: Callable[[Any], Any], of_class: Any = None) -> None:
        self.compute, self.of_class = compute, of_class

    def __get__(self, owner: Any, kind: Any) -> Any:
        if owner is not None:
            return self.compute(owner)
        if self.of_class is None:
            raise AttributeError
        return self.of_class


Kind = TypeVar("Kind", bound=type)


def shown(kind: Kind) -> Kind:
    """A class whose objects say in `help(x)` what they are, and who has made them."""
    if hasattr(kind, "signature"):
        kind.__signature__ = OfInstance(lambda x: x.signature())
    kind.__doc__ = OfInstance(help_of, kind.__doc__)  # pyright: ignore[reportAttributeAccessIssue]
    return kind


class Transform(ABC):
    """A function that a transform has made.

    A subclass is a dataclass of what it is made of: of `f`, perhaps with its `loss`, or of something else that says its
    `names`. In `compute` it says what it gives.
    """

    f: Callable
    loss: Callable | None = None
    vector: str = ""
    """Name of the argument behind the parameters, if it is not one of f's."""
    has_aux: bool = False
    several: bool = False
    """True if aux comes behind several results, not beside one."""
    owned: bool = True
    """True if what it gives has memory of its own."""
    memory: Any = ()
    """Objects that are the caller's, beside the arguments."""
    outermost: bool = False
    """True if no part of what it gives is computed by itself: `chunked` comes inside of it."""
    of_one_batch: str = ""
    """The reason why it does not add up over batches, and what does; empty where that is said elsewhere."""
    budgeted: bool = False
    """True if it chooses its chunks by the memory that one call may take."""

    def __init_subclass__(cls) -> None:
        shown(cls)

    def signature(self) -> inspect.Signature:
        """The signature of a call."""
        names = self.names(_ALL)
        if isinstance(names, ArgumentNames):
            return names.signature()
        known = [name for name in names if name.isidentifier()]
        return inspect.Signature([inspect.Parameter(name, _POSITIONAL) for name in known])

    def __dir__(self) -> list[str]:
        """The names for users; all else may change."""
        return [name for name in ("f", "loss", "t", "product", "linearize") if getattr(self, name, None) is not None]

    @abstractmethod
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        """The result, and aux."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.compute, self.names, args, kwargs)

    def names(self, count: int) -> Any:
        """The names of so many arguments in an error."""
        return ArgumentNames(self.f, count, self.loss is not None, self.vector)

    def run(self, compute: Compute, names: Callable[[int], Any], args: tuple, kwargs: dict, method: str = "") -> Any:
        """The result of a call, also of a method; torch.compile does not look into it."""
        if torch.compiler.is_exporting():
            raise ArgumentError(
                f"{self!r}{method}: torch.export writes operations, and not what this makes of f. Call it outside of "
                "the program."
            )
        if torch.compiler.is_compiling():
            from invfunc._torch.eager import eagerly  # imports the compiler, which takes a second

            return eagerly(partial(self.run, compute, names, method=method), args, kwargs)
        called = names(len(args))
        with _Telling(self, called, args, kwargs, method), checked_at_the_end(own=True):
            result, aux = compute(args, kwargs, called)
        made: Any = result
        if self.owned and not isinstance(made, Transform):  # whose results are made so in its calls
            result = own_memory(result, (args, kwargs, self.memory))
        if not self.has_aux:
            return result
        return (*result, aux) if self.several else (result, aux)

    def told(self, compute: Compute, names: Callable[[int], Any], args: tuple, kwargs: dict, method: str = "") -> Any:
        """The computation of a call; an error says which call it is of."""
        called = names(len(args))
        with _Telling(self, called, args, kwargs, method), checked_at_the_end(own=True):
            return compute(args, kwargs, called)


class _Telling:
    """A context in which an error says of which call of a transform it is."""

    def __init__(self, t: Transform, names: Any, args: tuple, kwargs: dict, method: str) -> None:
        self.t, self.names, self.args, self.kwargs, self.method = t, names, args, kwargs, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception):
            return
        hint, own, why = data_first(self.t, self.args), error if isinstance(error, InvFuncError) else None, ""
        if own is None or isinstance(own, SampleAxisError):
            of_types = isinstance(error, TypeError)
            why = misfit(self.names, self.args, self.kwargs) if of_types else numpy_arrays(self.args, self.names)
        own = ArgumentTypeError(why) if why else own
        if own is not None:
            call = f"{self.t!r}{self.method}({', '.join(self.names)})"
            raise told(own, call, hint) from (error.__cause__ if own is error else error)
        if hint:
            error.add_note(hint)


_ALL = 99
"""More arguments than there are names for."""


def help_of(t: Any) -> str:
    """The help of an object that can be called, with that of the public function that has made it."""
    try:
        call = f"{t!r}{inspect.signature(t)}"
    except (TypeError, ValueError):  # of a function that does not say what it takes
        call = f"{t!r}(params, ...)"
    name = repr(t).partition("(")[0]
    places = [sys.modules.get(module) for module in ("invfunc", "invfunc.layers", "invfunc.pairs", "invfunc.kronecker")]
    made_by = next((found for place in places if (found := getattr(place, name, None)) is not None), None)
    return f"{call}\n\n{inspect.getdoc(made_by) or ''}"


def own_memory(results: Any, given: Any) -> Any:
    """The results with memory of their own for each tensor, so that one can be written without the others."""
    taken = {*memories(tree.tensors(given))}
    leaves, structure = tree.flatten(results)
    found, shared = memories(leaves), False
    if taken.isdisjoint(found) and len({*found}) == len(leaves) and None not in found:
        if all(map(torch.Tensor.is_contiguous, leaves)):  # the most frequent ones
            return results
    for i, memory in enumerate(found):
        x = leaves[i]
        if memory is not None and (memory in taken or (not x.is_contiguous() and _expanded(x))):
            leaves[i] = x = x.clone(memory_format=torch.contiguous_format)
            shared, memory = True, storage_of(x)
        taken.add(memory)
    return tree.unflatten(leaves, structure) if shared else results


def _expanded(x: torch.Tensor) -> bool:
    return any(map(lambda step, size: step == 0 and size > 1, x.stride(), x.shape))


def misfit(names: Sequence[str], args: tuple, kwargs: dict[str, Any]) -> str:
    """The reason why a function does not take the arguments of a call; empty if it takes them, or does not say."""
    if not isinstance(names, ArgumentNames):
        return ""
    args = (*args[:1], *args[2:]) if names.vector else args
    names, f, loss = names.without_vector, names.f, names.target
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return ""
    wanted, given = [*signature.parameters], args[: len(args) - loss]
    if loss and "target" in kwargs and "target" not in wanted:
        why = "target is passed by keyword, but has to be the last positional argument"
    elif _takes(signature, given, kwargs):
        return numpy_arrays(args, names)
    elif unpacked := _unpacked(signature, args, kwargs, loss):
        x = args[unpacked]
        why = f"{names[unpacked]} is one {type(x).__name__} of {len(x)}, which are arguments of their own"
    elif loss and _takes(signature, args, kwargs):
        why = "the target is missing"
    else:
        why = f"f takes ({', '.join(wanted)}), and got {len(given)} positional arguments"
        why += f" and {', '.join(f'{name}=' for name in kwargs)}" if kwargs else ""
        known = {name: x for name, x in kwargs.items() if name in wanted}
        if len(known) < len(kwargs) and _takes(signature, given, known):
            why += ". Options of the transform come with f, as in `variance(f, in_dims=0)`, not with the arguments"
        if not loss and _takes(signature, args[:-1], kwargs):
            why += ". If the last one is a target, give the loss too, as in `diag_ggn(f, loss)`"
    return f"{why}. It is called as ({', '.join([*wanted, *['target'] * loss])})."


def _unpacked(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any], target: bool) -> int:
    """The number of the argument behind the first that is a list of some that the function takes; 0 if none is."""
    for i, x in enumerate(args[1:], 1):
        apart = (*args[:i], *x, *args[i + 1 :]) if isinstance(x, (list, tuple)) else ()
        if apart and _takes(signature, apart[: len(apart) - target], kwargs):
            return i
    return 0


def _takes(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def data_first(t: Transform, args: tuple) -> str:
    """A hint where the first argument is a tensor, and one behind it looks like the parameters; else empty."""
    if not args or not isinstance(args[0], torch.Tensor) or getattr(t, "argnums", 0) not in (0, (0,)):
        return ""
    for i, x in enumerate(args[1:], 2):
        if isinstance(x, Mapping) and x and all(isinstance(p, torch.Tensor) for p in x.values()):
            return f"Is argument {i}, a {type(x).__name__} of tensors, the parameters? They come first."
    return ""


def told(error: InvFuncError, call: str, hint: str = "") -> InvFuncError:
    """The error with the call as it was written, and a hint; the innermost transform that fails says it."""
    if error.told:
        return error
    said = type(error)(f"{call}: {hint and f'{hint} If not: '}{error}")
    said.__dict__.update(error.__dict__)
    said.told = True
    return said


def check_adds_up(name: str, t: Any) -> None:
    """Check that t is not of one batch alone, for what takes it batch by batch."""
    check_no_budget(name, t)
    if isinstance(t, Transform) and t.of_one_batch:
        raise ArgumentTypeError(f"{name}({t!r}): {t.of_one_batch}.")


def check_no_budget(name: str, t: Any) -> None:
    """Check that t is in no chunks of its own choice, where what it is for adds its results up."""
    if isinstance(t, Transform) and t.budgeted:
        raise ArgumentTypeError(
            f"{name}({t!r}): a budget (memory=) covers the call of one statistic, not what {name} does with its "
            "results. Give the number of chunks, as in chunked(t, n)."
        )
