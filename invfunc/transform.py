"""How a transform is made: from a function and its options to a function that says what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._functorch import storage_of
from invfunc.errors import ArgumentTypeError, InvFuncError
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.explained import joined
from invfunc.functional import Functional
from invfunc.plan import Options
from invfunc.recording.problem import InDims, numpy_arrays, problem
from invfunc.reductions import Reduction
from invfunc.reductions.quantity import Drawing, Of, Quantity
from invfunc.sparsity.report import Explanation


def check_callable(name: str, f: Any) -> None:
    """A transform takes a function; a module needs its parameters taken out first."""
    if isinstance(f, nn.Module):
        kind = type(f).__name__
        raise ArgumentTypeError(
            f"{name}(f): f is a module ({kind}), but has to be a function of its parameters: "
            "f, params = functional(model)."
        )
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f): f is the class {f.__name__}, but has to be a function of parameters: "
            f"f, params = functional({f.__name__}(...))."
        )
    if not callable(f):
        raise ArgumentTypeError(f"{name}(f): f is of type {type(f).__name__}, but has to be a function.")


def check_functions(name: str, f: Any, loss: Any = None) -> None:
    """A model function, or a loss function alone, and the loss of a model function."""
    if loss is not None and _is_loss(f):
        raise ArgumentTypeError(
            f"{name}({describe(f)}, {describe(loss)}): f is a loss, but the model comes first: {name}(f, loss)."
        )
    check_callable(name, f)
    if loss is None:
        return
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f, loss): loss is the class {loss.__name__}, but has to be a function: {loss.__name__}()."
        )
    if isinstance(loss, Functional):
        raise ArgumentTypeError(f"{name}(f, loss): loss is a model, {loss!r}. The model comes first, then its loss.")
    if not callable(loss):
        kind = type(loss).__name__
        raise ArgumentTypeError(f"{name}(f, loss): loss is of type {kind}, but has to be a function.")


def _is_loss(f: Any) -> bool:
    """Whether f is one of torch's losses, as a module or as a function."""
    if isinstance(f, nn.Module):
        return type(f).__module__ == nn.modules.loss.__name__
    name = getattr(f, "__name__", "")
    ours = getattr(f, "__module__", None) == nn.functional.__name__
    return ours and (name.endswith("_loss") or "cross_entropy" in name)


def describe(f: Any) -> str:
    """A function as its name or as the transform that it is, a module as its class."""
    if isinstance(f, nn.Module):
        return type(f).__name__
    return getattr(f, "__name__", None) or repr(f)


@dataclass(eq=False)
class ArgumentNames(Sequence[str]):
    """What the arguments of a call are called in an error; they are looked up when there is one."""

    f: Callable
    count: int
    target: bool = False
    """Whether the last one is that of a loss."""

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, place: Any) -> Any:
        return self._found[place]

    @cached_property
    def _found(self) -> list[str]:
        try:
            parameters = list(inspect.signature(self.f).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        several = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
        names = [*positional, *(f"{several}[{i}]" for i in range(max(0, self.count - len(positional))))]
        if not parameters and self.count:
            names[0] = "params"
        return names[: self.count - self.target] + ["target"] * self.target


@dataclass(frozen=True, repr=False)
class Statistic:
    """A function `(params, *batch) -> pytree like params`, made of a function by a transform."""

    name: str
    f: Callable
    reduction: Reduction
    of: Of = "gradient"
    loss: Callable | None = None
    argnums: int | tuple[int, ...] = 0
    in_dims: InDims = 0
    out_dims: int = 0
    has_aux: bool = False
    samples: Any = None
    drawing: Drawing | None = None
    options: Options = field(default_factory=Options)
    members: tuple[Statistic, ...] = ()
    """The statistics whose results come together."""
    shown: str | None = None
    """What `repr` says, where a relative of `chunked` made it of another statistic."""

    def __post_init__(self) -> None:
        check_functions(self.name, self.f, self.loss)

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", {describe(self.loss)}"
        return self.shown or f"{self.name}({describe(self.f)}{loss})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from invfunc._eager import eagerly  # imports the compiler, which takes a second

            return eagerly(self._call, args, kwargs)
        return self._call(args, kwargs)

    def explained(self, *args: Any, **kwargs: Any) -> Explanation:
        """How a call with these arguments pulls its columns back."""
        members = self.members or (self,)
        each = self._asked(Engine.explained, args, kwargs)
        each = [replace(e, name=repr(m)) for m, e in zip(members, each, strict=True)]
        return (
            joined(repr(self), [m.quantity for m in members], each)
            if self.members
            else replace(each[0], name=repr(self))
        )

    @property
    def quantity(self) -> Quantity:
        """What it reduces, of which columns."""
        return Quantity(self.reduction, self.of, self.drawing)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        results, aux = self._asked(Engine.result, args, kwargs)
        if self.options.reduce is None:
            results = own_memory(results, (args, kwargs))
        several = bool(self.members) or self.reduction.several
        result = tuple(results) if self.members else results[0]
        if not self.has_aux:
            return result
        return (*result, aux) if several else (result, aux)

    def _asked(self, what: Callable[[Engine], Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """What an engine gives for these arguments."""
        names = ArgumentNames(self.f, len(args), self.loss is not None)
        try:
            given = problem(
                self.f,
                self.loss,
                args,
                kwargs,
                self.argnums,
                self.in_dims,
                self.out_dims,
                self.has_aux,
                names,
                self.samples,
            )
            asked = [s.quantity for s in self.members or (self,)]
            return what(Engine(given, self.options, asked))
        except InvFuncError as error:
            raise told(error, f"{self!r}({', '.join(names)})") from error.__cause__
        except TypeError as error:
            wrong = misfit(self, self.f, self.loss, args, kwargs)
            if wrong is None:
                raise
            raise wrong from error

    @property
    def axes(self) -> tuple[str, ...]:
        """What it can be chunked over; the first is what `chunked` takes by itself."""
        if self.members:
            return tuple(a for a in ("outputs", "samples", "params") if all(a in m.axes for m in self.members))
        columns = self.of in ("ggn", "hessian", "jacobian")
        return tuple(a for a in self.reduction.axes if a != "outputs" or columns)


def own_memory(results: Any, given: Any) -> Any:
    """The results with memory of their own for each tensor, so that one can be written without the others."""
    taken = {storage_of(x) for x in tree.tensors(given)}

    def own(x: torch.Tensor) -> torch.Tensor:
        expanded = not x.is_contiguous() and any(map(lambda step, size: step == 0 and size > 1, x.stride(), x.shape))
        memory = storage_of(x)
        if expanded or memory in taken:
            x = x.clone(memory_format=torch.contiguous_format)
            memory = storage_of(x)
        taken.add(memory)
        return x

    return tree.map_tensors(own, results)


def misfit(shown: Any, f: Callable, loss: Any, args: tuple, kwargs: dict[str, Any]) -> InvFuncError | None:
    """The error of a call whose arguments f does not take; None if it takes them."""
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):
        return None
    wanted, given = [*signature.parameters], args[: len(args) - (loss is not None)]
    names = ArgumentNames(f, len(args), loss is not None)
    called = f"{shown!r}({', '.join(names)})"
    if loss is not None and "target" in kwargs and "target" not in wanted:
        why = "target is passed by keyword, but has to be the last positional argument"
    elif _takes(signature, given, kwargs):
        arrays = numpy_arrays(args, names)
        return told(ArgumentTypeError(arrays), called) if arrays else None
    elif unpacked := _unpacked(signature, args, kwargs, loss is not None):
        x = args[unpacked]
        why = f"{names[unpacked]} is one {type(x).__name__} of {len(x)}, which are arguments of their own"
    elif loss is not None and _takes(signature, args, kwargs):
        why = "the target is missing"
    else:
        why = f"f takes ({', '.join(wanted)}), and got {len(given)} positional arguments"
        why += f" and {', '.join(f'{name}=' for name in kwargs)}" if kwargs else ""
        known = {name: x for name, x in kwargs.items() if name in wanted}
        if len(known) < len(kwargs) and _takes(signature, given, known):
            why += ". What is an option of the transform is given where it is made, behind f"
        if loss is None and _takes(signature, args[:-1], kwargs):
            why += ". If the last one is a target, give the loss too, as in `diag_ggn(f, loss)`"
    call = ", ".join([*wanted, *["target"] * (loss is not None)])
    return told(ArgumentTypeError(f"{why}. It is called as ({call})."), called)


def _unpacked(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any], target: bool) -> int:
    """Which argument behind the first is a list of some that the function takes; 0 if none is."""
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


def told(error: InvFuncError, call: str) -> InvFuncError:
    """The error with the call as it was written; the innermost transform that fails says it."""
    if error.told:
        return error
    said = type(error)(f"{call}: {error}")
    said.__dict__.update(error.__dict__)
    said.told = True
    return said
