"""Checkpointing in plain autograd: hooks in the place of saved tensors, so that the graph is that of f itself.

The graph of `y = f(x)` saves nothing. The first of its nodes that asks for a saved tensor has the block rebuilt: x from
the slot of y by the inverse, and what f saves by evaluating f at it again; what shared functions save is taken from
their evaluation by the inverse. Tensors that f closes over get their gradients as ever, as it is f's own graph that is
run backwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from invfunc import thresholds, tree
from invfunc._torch.functorch import plainly, pointer, saving_hooks, unwatched
from invfunc._torch.precision import doubled
from invfunc._torch.values import differentiable
from invfunc.errors import ReplayError
from invfunc.recomputation.block import Block
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.like import Geometry, Memory, all_of, geometry
from invfunc.recomputation.noted import metadata_of
from invfunc.recomputation.origins import OUTSIDE, Key, Origins
from invfunc.recomputation.probe import Probe
from invfunc.recomputation.recording import Enough, Found, Recording, Saved
from invfunc.recomputation.released import release
from invfunc.recomputation.report import CHANGES, OTHER
from invfunc.recomputation.rounding import finite, known_at_once, mean_size, near, rounded
from invfunc.recomputation.shared import Evaluation
from invfunc.recomputation.slots import Held, fetch
from invfunc.recomputation.straight_learning import learn, looked


class HookedBlock(Block):
    """A call of f in plain autograd."""

    def __init__(self, call: Call, xs: Tensors, rest: Tensors) -> None:
        super().__init__(call.kept, call.report)
        self._call = call
        hooks = saving_hooks()
        self._rest = [Held(t, hooks=hooks) for t in rest]
        self._needs = [t.requires_grad for t in (*xs, *rest)]
        self._count = len(xs)
        self._shared_needs: dict[int, list[bool]] = {}
        self._to_the_end = call.tolerance is not None
        """Whether it is evaluated again to its end, and not until all is saved."""
        self.origins = Origins()
        self._like: dict[Key, Saved] = {}
        self._probes: dict[Key, Probe] = {}
        self._probed = call.report.check != "off" and (call.report.known.calls <= _FIRST or len(call.kept) == len(xs))
        inputs, pointers = set(map(pointer, xs)), list(map(pointer, rest))
        self._apart = [i for i, t in enumerate(rest) if t.numel() and pointers[i] not in inputs]
        self._places = {pointers[i]: i for i in reversed(self._apart)}
        self._saved: dict[Key, Found] = {}
        self._memory: dict[Key, tuple[Memory, Geometry]] | None = {} if call.followed else None

    def pack(self, tensor: torch.Tensor) -> tuple[HookedBlock, Key]:
        """What autograd saves in place of a tensor: this block, and the key under which it gives the tensor back."""
        key, call = self.origins.save()
        self._to_the_end |= self._call.watch is not None and self._call.watch.noisy  # is filled when it was saved
        with unwatched():  # a custom autograd.Function saves beside all calls
            place = self._places.get(pointer(tensor))
        self._like[key] = Saved(tensor.shape, tensor.dtype, place, call)
        if self._probed and place is None and self._to_be_probed(tensor):
            most = thresholds.PROBED if call.kinked else thresholds.PROBED_SAVED
            self._probes[key] = Probe((tensor,), most, sums=not tensor.is_floating_point())
        if self._memory is not None:
            self._memory[key] = Memory(tensor), geometry(tensor)
        return self, key

    def _to_be_probed(self, tensor: torch.Tensor) -> bool:
        watch = self._call.watch
        own = not (tensor.is_leaf and tensor.requires_grad) and not (watch and watch.noisy)
        values = tensor.is_floating_point() or len(self.kept) == self._count  # of an exact x all are the same again
        return own and values and known_at_once(tensor.device)

    def given_back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """A function that computes a saved tensor again, for a statistic that records f; None if it was not saved."""
        for key, (memory, laid) in reversed((self._memory or {}).items()):
            if memory.holds(tensor) and (laid == geometry(tensor) or all_of(tensor, laid)):
                shape = tensor.shape
                return lambda: self.looked_up(key).reshape(shape)
        return None

    def looked_up(self, key: Key) -> torch.Tensor:
        """A saved tensor, which autograd may ask for as well."""
        found = self._saved.get(key)
        if found is None:
            made = self._rebuild()
            found, self._saved = made[key], made
        return found.get(self._call)

    def evaluate(self, index: int, evaluation: Evaluation) -> Any:
        """Evaluate a function that f shares with its inverse, for the first time."""
        self._shared_needs[index] = [t.requires_grad for t in evaluation.tensors]
        self.origins.begin(evaluation.tensors)
        result = evaluation.at(evaluation.tensors)
        self.origins.gives(result)
        return result

    def invert(self) -> None:
        with plainly(), torch.no_grad(), self._call.named():
            rest = self._arguments()
            xs = self._call.inverse(fetch(self.sources), rest)
            if self._call.reads_outside:
                self._call.run(xs, rest, None)  # which says if it reads something else by now
            self.give_back_and_tell(xs)

    def names(self, of: str = "x") -> list[str]:
        return self._call.names(of)

    def dtypes(self) -> list[torch.dtype]:
        return [*self._call.dtypes(), *(saved.dtype for saved in self._like.values())]

    def once_more(self, sources: Tensors, xs: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rest = self._arguments()
        back = self._call.inverse(sources, rest)
        return back, tree.tensors(self._call.run(xs, rest, None, compare=False))

    def learn(self, xs: Tensors, rest: Tensors) -> None:
        """Note what the call is like, where it was seen to do nothing but to compute."""
        saved = [(s.shape, s.dtype) for s in self._like.values()]
        needs = [self._shared_needs[i] for i in range(len(self._call.moments))]
        learn(self._call, xs, rest, saved, list(self._like), needs, self.dtypes())

    def _arguments(self) -> list[torch.Tensor]:
        """The further arguments of f, as leaves that need the gradients that they needed."""
        return _as_then([held.get().detach() for held in self._rest], self._needs[self._count :])

    def saved(self, key: Key) -> torch.Tensor:
        """A saved tensor; it is handed out once, and computed again for whoever asks again."""
        found = self._saved.pop(key, None)
        if found is None:
            made = self._rebuild()  # of this thread alone, until it is done
            found = made.pop(key)
            self._saved = made
        return found.get(self._call)

    def forget(self) -> None:
        self._saved = {}

    def _rebuild(self) -> dict[Key, Found]:
        if not self._ys:
            raise ReplayError("the function differentiates within itself by torch.autograd; let it use torch.func.")
        for block in self.behind():
            block.forget()  # autograd is done with it
        rest = self._arguments()
        with plainly(), self._call.named():
            xs = self.xs()
            exact = xs is not None and self.exact()
            recorded = self._recording(rest, self._probes)
            outputs, tell = None, None
            if xs is None:
                xs, outputs, tell = self._invert_recording(recorded, rest)
            if outputs is None or outputs or recorded.misses() or self._call.reads_outside:
                self._run_recording(recorded, xs, rest, outputs)
            if (kink := recorded.kink()) is not None:
                self.report.kink(kink)
            if tell is not None:
                tell()
            else:  # of an inexact x all has been told
                apart = recorded.apart(self.report.tolerated(self.dtypes()) if exact else OTHER)
                if apart and (max(apart.values()) < math.inf or finite((*xs, *fetch(self._ys)))):
                    self.report.saved(apart, exact, self.dtypes(), lambda: self._rounding(xs, apart))
        for held in self._rest:
            held.let_go()
        release(self._ys)
        return recorded.found

    def _rounding(self, xs: Tensors, errors: dict[Key, float]) -> dict[Key, float] | None:
        """How far saved tensors move where x is rounded in other ways; None if they are others at this very x."""
        sizes = {key: self._probes[key].size() for key in errors}
        found = self._again(xs)

        def moves(xs: Tensors) -> dict[Key, float]:
            other = self._again(xs)
            return {key: mean_size(_numbers(other[key]) - _numbers(found[key])) / size for key, size in sizes.items()}

        if any(moves(xs).values()):
            return None
        most = dict.fromkeys(errors, 0.0)
        for seed in range(_ROUNDINGS):
            try:
                most = {key: max(most[key], move) for key, move in moves(rounded(xs, seed)).items()}
            except ReplayError:  # even what is saved depends on it
                return dict.fromkeys(errors, math.inf)
            if all(map(near, errors.values(), most.values())):
                break
        return most

    def _again(self, xs: Tensors) -> dict[Key, torch.Tensor]:
        """The tensors that f saves at some x."""
        rest = self._arguments()
        recorded = self._recording(rest, {})
        self._run_recording(recorded, xs, rest, None, compare=False)
        return {key: found.tensor for key, found in recorded.found.items()}

    def _recording(self, rest: Tensors, probes: dict[Key, Probe]) -> Recording:
        return Recording(self._like, probes, _places(rest, self._apart), self._to_the_end, self.origins.again())

    def _invert_recording(self, recorded: Recording, rest: Tensors) -> tuple[list[torch.Tensor], dict[int, Any], Tell]:
        """Invert; what the shared functions save meanwhile is what they saved in forward."""
        outputs: dict[int, Any] = {}

        def evaluate(index: int, evaluation: Evaluation) -> Any:
            tensors = _as_then(evaluation.tensors, self._shared_needs[index])
            with torch.enable_grad(), recorded.keeping():
                self._begin(recorded, tensors, self._call.moments[index].places)
                output = recorded.gives(evaluation.at(tensors))
            if (OUTSIDE, 0) in self._like or self._call.tolerance is not None or self._call.reads_outside:
                outputs[index] = output
            return tree.map_tensors(torch.Tensor.detach, output)

        with torch.no_grad():
            xs = self._call.inverse(fetch(self.sources), rest, evaluate, recorded.origins)
        return xs, outputs, self.give_back(xs)

    def _run_recording(
        self, recorded: Recording, xs: Tensors, rest: Tensors, outputs: dict[int, Any] | None, compare: bool = True
    ) -> None:
        """Evaluate f again, with the known outputs of shared functions, as long as something saved is missing."""

        def evaluate(index: int, evaluation: Evaluation) -> Any:
            if outputs:
                return tree.map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), outputs[index])
            if outputs is not None:
                raise self._differs(recorded)
            self._begin(recorded, evaluation.tensors, self._call.moments[index].places)
            return recorded.gives(evaluation.at(evaluation.tensors))

        given = _as_then((*xs, *rest), self._needs)
        xs, rest, known = given[: len(xs)], given[len(xs) :], bool(outputs)
        try:
            with torch.enable_grad(), recorded.keeping():
                self._begin(recorded, given, [*[None] * len(xs), *range(len(rest))])
                self._call.run(xs, rest, evaluate, known, compare, origins=recorded.origins)
        except Enough:
            pass
        if recorded.misses():
            raise self._differs(recorded)

    def _begin(self, recorded: Recording, given: Tensors, places: Sequence[int | None]) -> None:
        """A part begins at these tensors, of which some are arguments of f; these it may close over, too."""
        recorded.origins.begin(given)
        for t, i in zip(given, places, strict=True):
            if i is not None and (beside := self._call.beside[i]()) is not None:
                recorded.origins.alias(beside, t)

    def _differs(self, recorded: Recording) -> ReplayError:
        return ReplayError(
            f"autograd saved {len(self._like)} tensors when the function was evaluated, and {len(recorded.found)} "
            f"when it was evaluated again: it does not do the same thing twice. {CHANGES}"
        )


Tell = Callable[[], None] | None
_ROUNDINGS = 16
"""How many ways to round x are tried at most."""
_FIRST = 4
"""How many calls compare values of what is saved, if x comes from the inverse; x itself is compared in all of them.
The values show what no call tells, such as an unseen change of a tensor; how a tensor came about is always compared.
"""


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if differentiable(tensor) else doubled(tensor)


def _places(rest: Tensors, indices: Sequence[int]) -> dict[int, int]:
    """The numbers of further arguments by their places in memory."""
    return {pointer(rest[i]): i for i in reversed(indices)}


def _as_then(tensors: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[torch.Tensor]:
    return [
        t if t.requires_grad is need and t.is_leaf else t.detach().requires_grad_(need)
        for t, need in zip(tensors, needs, strict=True)
    ]


def _unpack(packed: tuple[HookedBlock, Key]) -> torch.Tensor:
    block, key = packed
    return block.saved(key)


def hooked(call: Call, xs: Tensors, rest: Tensors) -> tuple[Any, list[torch.Tensor]]:
    """The result of a call whose graph saves nothing, and its tensors."""
    block = HookedBlock(call, xs, rest)
    call.look = look = looked(call)
    with saved_tensors_hooks(block.pack, _unpack):
        block.origins.begin((*xs, *rest))
        y = call.first(xs, rest, closed=False, evaluate=block.evaluate, origins=block.origins)
    block.origins = block.origins.again()  # how single tensors came about is not kept
    ys = call.flat(y)
    if any(t.requires_grad for t in ys):
        block.connect(xs, ys, [metadata_of(t) for t in ys])
        if look is not None and look.harmless:
            block.learn(xs, rest)
    return y, ys
