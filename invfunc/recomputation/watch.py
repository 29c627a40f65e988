"""What a function reads and writes that is none of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import ended, innermost, leaf_level, level_of, levels, storage_of, unwrapped, version
from invfunc._torch.generators import state_of
from invfunc._torch.scripted import Scripted
from invfunc._torch.uncompiled import compiled_within, here
from invfunc._torch.weak import WeakIdSet
from invfunc.errors import ClosedOverError, ReplayError
from invfunc.operations.heard import Function
from invfunc.recomputation.look import Look
from invfunc.recomputation.origins import Origins
from invfunc.recomputation.recall import Other, Use, meant
from invfunc.recomputation.report import Report
from invfunc.recomputation.sight import Sight
from invfunc.recomputation.slots import Hooks
from invfunc.recomputation.surroundings import Closure, Reach, Surroundings


class Watch(Sight):
    """Notes what the function reads and writes from outside, when it is evaluated for the first time.

    Args:
        given: the tensors that the function is given.
        closed: whether no gradient reaches what is not given, so that reading a tensor that needs one is an error.
        generators: grows by the random number generators that the function draws from.
        report: where compiled parts are told of.
        closure: what the function is known to close over.
        look: is told of the calls, where it is to be found out whether they need to be watched.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        closed: bool,
        generators: list[torch.Generator],
        report: Report,
        closure: Closure | None = None,
        origins: Origins | None = None,
        look: Look | None = None,
    ) -> None:
        super().__init__(given, origins)
        self._look = look
        self._around = Surroundings(closure or Closure(), closed)
        self._lifted = bool(self._around.closure.tensors)
        self.closed = closed
        self._generators = generators
        self._report = report
        own = given[: len(given) - len(self._around.closure.tensors)]
        self._computed = WeakIdSet(own if closed else ())
        """What was computed from arguments, inside of torch.func; what it closes over is not enough, as modules keep
        what they compute of their parameters alone (weight_norm of old)."""
        self._versions = self._since()
        self.noisy = False
        """Whether what is saved now is not yet what it will be."""
        self.drawn: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators that were not known, with their states before the first draw."""

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._report.known.calls and compiled_within(self._entered):
            self._report.compiled()
        if kwargs.get("generator") is not None:
            self._draws_from(kwargs["generator"])
        func = function.func
        looks = function.called == "__get__"
        read = tree.tensors((args, kwargs) if kwargs else args)
        if looks and not any(self._of_a_level(t) for t in read):
            if not isinstance(result := func(*args, **kwargs), torch.Tensor):
                self._looked_at(function, args, kwargs, result)
                return result
        if self._lifted or function.renews or "out" in kwargs or not all([self.knows(t) for t in read]):
            return self._reaching(function, args, kwargs, list({id(t): t for t in read}.values()), looks)
        result = self._run(function, args, kwargs)  # as most calls are
        self._looked_at(function, args, kwargs, result)
        self._enter(result, new=self.new(read))
        return result

    def _looked_at(self, function: Function, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if self._look is not None:
            self._look.hears(function, args, kwargs, result)

    def _of_a_level(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is from outside, of a transform of torch.func within which a node does not compute."""
        return self.closed and level_of(tensor) is not None and not self.knows(tensor)

    def _draws_from(self, generator: torch.Generator) -> None:
        if not any(generator is known for known in self._generators):
            self.drawn.append((generator, state_of(generator)))
            self._generators.append(generator)

    def _reaching(
        self, function: Function, args: tuple, kwargs: dict[str, Any], read: list[torch.Tensor], looks: bool
    ) -> Any:
        """A call that may reach what is outside of the function."""
        if isinstance(function.func, Scripted):
            self._look = self._look and self._look.ends(harmless=False)
            function.func.look()
        instead = {id(t): s for t in read if (s := self._around.instead(t, self.lifts)) is not None}
        if instead:
            args, kwargs = tree.map_tensors(lambda t: instead.get(id(t), t), (args, kwargs))
        used = [t for t in read if id(t) in instead or not self.knows(t)]
        used_here = [self._around.wrapped(t, self._above) if unwrapped(t) is not None else t for t in used]
        self._not_left(used_here)
        outer = [t for t in (instead.get(id(t), t) for t in used) if not self.knows(t)]
        if self.closed:
            self._refuse(function, outer)
        reach = Reach(self._around, outer, function, args, kwargs)
        for t in used_here:  # in the order in which it will be read again
            self._around.note(t, self.part, function.func)
        result = self._run(function, args, kwargs)
        self._looked_at(function, args, kwargs, result)
        self._written(reach.made(self.part, result, looks))
        self._enter(result, outer, not used and self.new(read))
        return self._around.named(result)

    def _not_left(self, read: Iterable[torch.Tensor]) -> None:
        for t in read:
            self._report.known.left.refuse(t)

    def _written(self, written: list[torch.Tensor]) -> None:
        """Note which arguments a call has written."""
        if written:
            self._versions = [
                _WRITTEN if any(t is w for w in written) else v
                for t, v in zip(self._given, self._versions, strict=True)
            ]

    @staticmethod
    def _drawn(func: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of a call, which draws as it will when it is differentiated."""
        graph = any(kind == "grad" for kind, _ in levels())  # that of the function itself
        with torch.set_grad_enabled(graph), leaf_level() as (enter, _, leave):
            args, kwargs = tree.map_tensors(lambda t: enter(t) if t.is_floating_point() else t, (args, kwargs))
            return leave(func(*args, **kwargs))

    def _run(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.noisy = function.entry.saves_early
        by_strides = self.closed and function.entry.draws_by_strides
        result = self.called(function, args, kwargs, partial(self._drawn, function.func) if by_strides else None)
        if self.closed and function.called != "detach":
            if any(t in self._computed for t in tree.tensors((args, kwargs))):
                self._computed.update(tree.tensors(result))
        self.noisy = False
        return result

    def __enter__(self) -> Watch:
        self._entered = 0 if self._report.known.calls else here()
        self._above = max((level for _, level in levels()), default=0)
        return super().__enter__()

    def closure(self) -> Closure:
        """What gradients may be asked for that the function was not given, and what it writes."""
        closure = self._around.closed_over()
        if closure.wrapped is not None and self.wrote():
            raise ReplayError(
                f"the function gives a tensor of shape {list(closure.wrapped.shape)} that it closes over to a "
                "transform of torch.func, so that it has to be evaluated in another way, but has written a state "
                "before. Pass the tensor as an argument of the block."
            )
        return closure

    def _enter(self, result: Any, outer: Sequence[torch.Tensor] = (), new: bool = False) -> None:
        for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            source = next((o for o in outer if o is t or storage_of(o) == storage_of(t)), None) if outer else None
            if source is None:
                self.make(t, outer, new)
            else:
                self._around.rename(t, source)

    def _refuse(self, function: Function, outer: Iterable[torch.Tensor]) -> None:
        for t in (meant(t) for t in outer if not self._around.constant(t)):
            root = self._around.root(t)  # a view of a constant is of a transform that f uses itself
            if t.requires_grad or (level_of(t) is not None and level_of(root.tensor) is not None):
                if root.lift is not None:
                    raise ReplayError(
                        f"`{function.called}` reads a tensor of shape {list(t.shape)} that the function writes as well "
                        "and that belongs to torch.func.vmap, where it cannot be kept as it was. Pass it as an "
                        "argument and return its new value; of a module in train mode, use eval mode."
                    )
                why = "needs a gradient" if t.requires_grad else "belongs to a transform of torch.func"
                raise ClosedOverError(
                    f"`{function.called}` reads a tensor of shape {list(t.shape)} that {why}, is not an argument and "
                    "is another one each time. Inside of torch.func only arguments get gradients: pass it as one (of a "
                    "module: functional(model)), or make it before the block is called (of a module that f copies)."
                )

    def left(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function made, did not return, and somebody still has."""
        left = [t for t in self.made(outputs) if not ended(t)]  # which autograd may hold a while longer
        memory = {storage_of(innermost(t)) for t in (*self._given, *outputs)} if left and self.closed else set()
        for t in left:
            if t in self._computed and t.is_floating_point() and storage_of(innermost(t)) not in memory:
                self._report.left(t)
        return left

    def _since(self) -> list[int]:
        """How often the arguments have been written by now."""
        return [version(t) for t in self._given]

    def wrote(self) -> bool:
        """Whether anything was written that outlives the function."""
        return self._since() != self._versions or self._around.wrote

    def outside(self, number: int, hooks: Hooks | None) -> tuple[dict[int, list[Other]], list[Use]]:
        """What each part used from outside, in order, and the uses of states beside shared functions.

        The arguments, of which the first `number` are x, would not be the same the next time if they were written.
        """
        if (since := self._since()) != self._versions:
            i = next(i for i, then in enumerate(self._versions) if since[i] != then)
            raise _writes("x" if i < number else "a further argument", self._given[i])
        return self._around.others(hooks)


_WRITTEN = -1
"""The version of a tensor that was written."""


def _writes(which: str, tensor: torch.Tensor) -> ReplayError:
    return ReplayError(
        f"the function writes into {which} (a tensor of shape {list(tensor.shape)}) in place, so that it cannot be "
        "evaluated again. Write x = x + z in place of x += z."
    )
