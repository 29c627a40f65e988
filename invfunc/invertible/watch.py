"""What a function reads and writes that is none of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import innermost, leaf_level, level_of, storage_of, version
from invfunc._scripted import Scripted
from invfunc._uncompiled import compiled_within, here
from invfunc.errors import ClosedOverError, ReplayError
from invfunc.invertible.origins import Origins
from invfunc.invertible.outside import SHARDED, Outside, State, depends, targets, wrote
from invfunc.invertible.recall import Other, Use
from invfunc.invertible.report import Report
from invfunc.invertible.sight import OUTSIDE, Sight
from invfunc.invertible.slots import Hooks
from invfunc.strays import Computed

_NOISY = {torch.nn.functional.rrelu, torch.rrelu, torch.rrelu_}
"""What saves a tensor before it is filled, which its version does not tell either."""


_DROPOUTS = {
    *(
        getattr(torch, f"{kind}dropout{end}")
        for kind in ("", "feature_", "alpha_", "feature_alpha_")
        for end in ("", "_")
    ),
    *(getattr(torch.nn.functional, f"{kind}dropout") for kind in ("", "alpha_", "feature_alpha_")),
    *(getattr(torch.nn.functional, f"dropout{d}d") for d in (1, 2, 3)),
}
"""What gives the numbers that it draws to other entries inside of torch.func, where strides do not count."""


class Watch(Sight):
    """Notes what the function reads and writes from outside, when it is evaluated for the first time.

    Args:
        given: the tensors that the function is given.
        closed: whether no gradient reaches what is not given, so that reading a tensor that needs one is an error.
        generators: grows by the random number generators that the function draws from.
        report: where compiled parts are told of.
        closure: what the function is known to close over.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        closed: bool,
        generators: list[torch.Generator],
        report: Report,
        closure: Closure | None = None,
        origins: Origins | None = None,
    ) -> None:
        super().__init__(given, origins)
        self._closure = closure or Closure()
        self._closed = closed
        self._generators = generators
        self._report = report
        own = given[: len(given) - len(self._closure.tensors)]
        self._computed = Computed(own if closed else ())
        """What was computed from arguments, inside of torch.func; what it closes over is not enough, as modules keep
        what they compute of their parameters alone (weight_norm of old)."""
        self._versions = [version(tensor) for tensor in given]
        self._outside: dict[int, Outside] = {}
        self._order: dict[int, dict[int, tuple[Outside, State]]] = {}
        self._uses: list[tuple[Outside, Callable]] = []
        self.noisy = False
        """Whether what is saved now is not yet what it will be."""
        self.drawn: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators that were not known, with their states before the first draw."""
        self.uses: list[Use] = []
        """The reads and writes of states beside shared functions, in their order."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._report.known.calls and compiled_within(self._entered):
            self._report.compiled()
        if isinstance(func, Scripted):
            func.look()
        generator = kwargs.get("generator")
        if generator is not None and not any(generator is known for known in self._generators):
            self.drawn.append((generator, generator.get_state()))
            self._generators.append(generator)
        self.noisy = func in _NOISY
        looks = getattr(func, "__name__", "") == "__get__"
        if looks and not isinstance(result := func(*args, **kwargs), torch.Tensor):
            return result
        read = tree.tensors((args, kwargs))
        apart = self._closure.tensors or isinstance(func, Scripted) or targets(func, args, kwargs)
        if not apart and all(map(self.knows, read)):  # as most calls are
            result = self._run(func, args, kwargs)
            self._enter(result)
            return result
        read = list({id(t): t for t in read}.values())
        lifted = {id(t): s for t in read if (s := self._instead(t)) is not None} if self._closure.tensors else {}
        if lifted:
            args, kwargs = tree.map_tensors(lambda t: lifted.get(id(t), t), (args, kwargs))
        used = [t for t in read if id(t) in lifted or not self.knows(t)]
        self._not_left(used)
        outer = [t for t in (lifted.get(id(t), t) for t in used) if not self.knows(t)]
        if self._closed and outer:
            self._refuse(func, outer)
        written = targets(func, args, kwargs)
        for t in written:
            if not self.knows(t):
                root = self._met(t).root
                root.now.keep(root.holder)
        before = [version(t) for t in outer]
        for t in used:  # in the order in which it will be read again
            self._note(t, func)
        result = self._run(func, args, kwargs)
        written = wrote(func, args, written)
        if written:
            self._versions = [
                _WRITTEN if any(t is w for w in written) else v
                for t, v in zip(self._given, self._versions, strict=True)
            ]
        for t, then in zip(outer, before, strict=True):
            root = self._met(t).root
            if version(t) != then or any(t is w for w in written):
                root.write(self.part)
                root.read |= depends(func, result, outer)
            elif not looks:
                root.read = True
        self._enter(result, outer)
        return self._named(result)

    def _not_left(self, read: Iterable[torch.Tensor]) -> None:
        for t in read:
            self._report.known.left.refuse(t)

    def _called(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call, which draws as it will when it is differentiated."""
        if not self._closed or func not in _DROPOUTS:
            return func(*args, **kwargs)
        with leaf_level() as (enter, _, leave):
            args, kwargs = tree.map_tensors(lambda t: enter(t) if t.is_floating_point() else t, (args, kwargs))
            return leave(func(*args, **kwargs))

    def _run(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        origins = self.origins
        followed = origins is not None and origins.call(func, args, kwargs)
        result = self._called(func, args, kwargs)
        if origins is not None and followed:
            origins.made(result)
        if self._closed and getattr(func, "__name__", "") != "detach":
            if any(t in self._computed for t in tree.tensors((args, kwargs))):
                self._computed.add(tree.tensors(result))
        return result

    def __enter__(self) -> Watch:
        self._entered = 0 if self._report.known.calls else here()
        return super().__enter__()

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor that stands for one which the function is known to close over; None for any other."""
        lift = self._closure.place(tensor)
        if lift is None:
            return None
        root = self._met(tensor)
        root.lift = lift
        if lift not in self._closure.written:
            return self.lifts[lift]
        if root.holder is tensor:  # it was written when it was found out what is closed over
            root.holder = self.lifts[lift].detach().clone()
            self._outside[id(root.holder)] = Outside(root.holder, root)
        return root.holder

    def closure(self) -> Closure:
        """What gradients may be asked for that the function was not given, and what it writes."""
        roots = [o for o in self._outside.values() if o.root is o]
        written = [o for o in roots if o.written]
        needed = [o.tensor for o in roots if o.read and not o.written and _has_gradient(o.tensor)]
        values = {i: o.first.value for i, o in enumerate(written, len(needed))}
        return Closure((*needed, *(o.tensor for o in written)), values)

    def _met(self, tensor: torch.Tensor) -> Outside:
        return self._outside.setdefault(id(tensor), Outside(tensor))

    def _note(self, tensor: torch.Tensor, func: Callable) -> None:
        """Note that a call uses a tensor from outside."""
        known = self._met(tensor)
        root, state = known.root, known.root.use(self.part)
        if tensor is root.tensor or tensor is root.holder:
            self._order.setdefault(self.part, {}).setdefault(id(root), (root, state))
            if self.part == OUTSIDE:
                self._uses.append((root, func))

    def _named(self, result: Any) -> Any:
        """What writes a copy gives out the tensor that it is of, which a module may take for its new state."""
        known = self._outside.get(id(result))
        return known.root.tensor if known is not None and result is known.root.holder else result

    def _enter(self, result: Any, outer: Sequence[torch.Tensor] = ()) -> None:
        for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            source = next((o for o in outer if o is t or storage_of(o) == storage_of(t)), None) if outer else None
            if source is None:
                self.know(t)
            elif id(t) not in self._outside:  # another name of it
                self._outside[id(t)] = Outside(t, self._outside[id(source)].root)

    def _refuse(self, func: Callable, outer: Iterable[torch.Tensor]) -> None:
        name = getattr(func, "__name__", repr(func))
        for t in outer:
            if t.requires_grad or level_of(t) is not None:
                why = "needs a gradient" if t.requires_grad else "belongs to a transform of torch.func"
                raise ClosedOverError(
                    f"`{name}` reads a tensor of shape {list(t.shape)} that {why} and is not an argument. Inside of "
                    "torch.func only arguments get gradients: pass it as one (of a module: functional(model)), or "
                    "detach it."
                )

    def left(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the function made, did not return, and somebody still has."""
        left = self.made(outputs)
        memory = {storage_of(innermost(t)) for t in (*self._given, *outputs)} if left and self._closed else set()
        for t in left:
            if t in self._computed and t.is_floating_point() and storage_of(innermost(t)) not in memory:
                self._report.left(t)
        return left

    def wrote(self) -> bool:
        """Whether anything was written that outlives the function."""
        own = any(version(t) != then for t, then in zip(self._given, self._versions, strict=True))
        return own or any(o.written for o in self._outside.values())

    def outside(self, number: int, hooks: Hooks | None) -> dict[int, list[Other]]:
        """What each part used from outside, in order. What is read and written would not be the same the next time,
        nor would the arguments if they were written, of which the first `number` are x."""
        for i, (t, then) in enumerate(zip(self._given, self._versions, strict=True)):
            if version(t) != then:
                raise _writes("x" if i < number else "a further argument", t)
        others: dict[int, Other] = {}
        for o, state in (used for order in self._order.values() for used in order.values()):
            kept = o.written and o.kept(state)
            if o.read and o.written and (o.crossed or not kept):
                raise ReplayError(
                    f"the function reads and writes a tensor of shape {list(o.tensor.shape)} that is none of its "
                    "arguments, in a way that cannot be repeated: within one operation, or by functions that both "
                    "directions share and what is beside them. Pass it as an argument and return its new value; of a "
                    f"module in train mode, use eval mode. {SHARDED}"
                )
            others.setdefault(id(state), Other(o, state if kept else None, hooks))
        beside = self._order.get(OUTSIDE, {})
        self.uses = [(others[id(beside[id(o)][1])], func) for o, func in self._uses if o.read and o.written]
        return {part: [others[id(state)] for _, state in order.values()] for part, order in self._order.items()}


@dataclass(frozen=True)
class Closure:
    """What a function closes over that is made an argument."""

    tensors: tuple[torch.Tensor, ...] = ()
    written: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    """Which of them it writes, with what they held before, where that matters; an argument is copied first."""

    def arguments(self) -> list[torch.Tensor]:
        """The arguments that stand for the tensors: views, as a statistic that records f sees how they are made."""
        before = {
            i: t.detach().clone() if (v := self.written[i]) is None else v
            for i, t in enumerate(self.tensors)
            if i in self.written
        }
        return [before[i] if i in before else t.view_as(t) for i, t in enumerate(self.tensors)]

    def place(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor among those closed over."""
        return next((i for i, known in enumerate(self.tensors) if known is tensor), None)


_WRITTEN = -1
"""The version of a tensor that was written."""


def _writes(which: str, tensor: torch.Tensor) -> ReplayError:
    return ReplayError(
        f"the function writes into {which} (a tensor of shape {list(tensor.shape)}) in place, so that it cannot be "
        "evaluated again. Write x = x + z in place of x += z."
    )


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or level_of(tensor) is not None
