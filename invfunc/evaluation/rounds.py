"""Parameters that are nowhere as a whole: gathered where they are read, and what is kept of them is given away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc._torch.functorch import number_of, version
from invfunc._torch.reading import AbsentReading, absent
from invfunc._torch.sharded import divided_along, gathered, local_part, of_part, sharded
from invfunc.errors import ArgumentError, ProcessError
from invfunc.evaluation.batches import written_meanwhile
from invfunc.evaluation.processes import Processes, bits, connected, failed_with, same, shown
from invfunc.reductions import Reduction, State, States

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessState:
    """Says what a process has kept of a parameter: all but the numbers."""

    key: tuple[int, int, int]
    """Numbers of the quantity and the parameter, and the place of its parts among those of all that are divided."""
    state: State
    """On the meta device."""


class Rounds:
    """Brings tensors of which each process has a part to the operations that read them.

    Processes read others, in another order and more or less often, as their samples do not come alike. So they go in
    rounds: each says what it is about to read, or that it reads nothing any more, and all of this is gathered by all.
    In such a round, it may also add up what it keeps of a parameter with what others do, and keeps its part of that.
    """

    def __init__(self, processes: Processes, own: list[Any], places: list[torch.Tensor]) -> None:
        """`own` are DTensors, and `places` the tensors without numbers that stand for them."""
        self.processes, self.own, self.places = processes, own, places
        self.reductions: list[Reduction] = []
        """Of each quantity, what adds up what is kept of it."""
        self._params = len(own)
        self._reading = AbsentReading(places, self._bring)
        self._of, self._before = self._known()
        self._failed = ""
        self._states: dict[tuple[int, int, int], State] = {}
        self._seen: Counter[tuple[int, int, int]] = Counter()

    def beside(self, own: list[Any], places: list[torch.Tensor]) -> None:
        """Bring these as well, which are no parameters, in place of those that came before beside them."""
        self.own[self._params :], self.places[self._params :] = own, places
        self._reading.of(self.places)
        self._of, before = self._known()
        self._before[self._params :] = before[self._params :]

    def _known(self) -> tuple[dict[int, int], list[int]]:
        return {number_of(x): place for place, x in enumerate(self.places)}, self._versions()

    def through(self, work: Callable[[], T]) -> T:
        """Do what reads them, and help others until none of them reads any more; where one fails, all do."""
        self._failed = ""
        try:
            with self._reading:
                found = work()
        except BaseException as error:  # Ctrl-C, too: the others would wait
            self._check()  # another one failed first, and what f, or who called it, makes of that says less
            self._said(shown(error))
            raise
        while not self._failed and any(said is not None for said in self._round(None)[0]):
            pass
        self._check()
        return found

    def present(self, x: Any) -> Any:
        """A tree with the numbers of those that are in it, to be kept."""
        return self._reading.present(x)

    def place_of(self, x: torch.Tensor) -> int | None:
        """The place of a tensor without numbers, or of a view of one; None of others."""
        return self._of.get(number_of(x))

    def takes(self, quantity: int, leaf: torch.Tensor) -> bool:
        """Tells whether this process keeps its part of what all keep of a parameter."""
        known = 0 <= quantity < len(self.reductions) and self.reductions[quantity].entrywise
        return known and self.place_of(leaf) is not None

    def keep(self, quantity: int, number: int, leaf: torch.Tensor, state: State, n: int) -> None:
        """Give away what was kept of a parameter, the one with a number, and n samples."""
        meta = tree.map_tensors(lambda x: torch.empty_like(x, device="meta"), state)
        said = ProcessState((quantity, number, self._of[number_of(leaf)]), meta)
        self._check()
        self._round(said, state)
        self._seen[said.key] += n
        self._check()

    def whole(self, leaf: torch.Tensor, state: State) -> State:
        """State of a parameter, of the part that this process has of it: all ask for that at once."""
        like = self.own[self._of[number_of(leaf)]]
        with connected():
            self._check()
            self._said(None)
            self._check()
            return tuple(gathered(of_part(x, like)) if x.shape == like.to_local().shape else x for x in state)

    def kept(self, n: int) -> dict[int, States]:
        """The parts of what all have kept, of n samples in this process, by quantity and parameter."""
        if not self.reductions:
            return {}
        _, each = self.processes.told("parts", lambda: (None, (n, self._seen)))
        found: dict[int, States] = {}
        for key, state in self._states.items():
            quantity, leaf, place = key
            missing = sum(own - seen[key] for own, seen in each)  # which do not reach the parameter
            if missing > 0:
                reduction = self.reductions[quantity]
                state = reduction.merge(state, reduction.init(self.own[place].to_local(), missing, 1), "samples")
            found.setdefault(quantity, {})[leaf] = state
        self._states, self._seen = {}, Counter()
        return found

    def _bring(self, place: int) -> torch.Tensor:
        self._check()
        if self._versions() != self._before:
            raise written_meanwhile()
        found = self._round(place)[1]
        self._check()
        assert found is not None
        return found

    def _check(self) -> None:
        if self._failed:
            raise ProcessError(self._failed)

    def _round(
        self, own: int | ProcessState | None, state: State | None = None
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Requests of all processes, and the tensor that this one wanted to read; all see to all requests."""
        each, found = self._said(own), None
        if self._failed:
            return each, None
        for place in sorted({said for said in each if isinstance(said, int)}):
            with connected():
                one = gathered(self.own[place])
            found = one if place == own else found
            del one  # before the next one comes
        given = {rank: said for rank, said in enumerate(each) if isinstance(said, ProcessState)}
        for key in dict.fromkeys(said.key for said in given.values()):
            mine = state if isinstance(own, ProcessState) and own.key == key else None
            self._join(key, mine, {rank: said.state for rank, said in given.items() if said.key == key})
        return each, found

    def _join(self, key: tuple[int, int, int], own: State | None, each: Mapping[int, State]) -> None:
        """Add up what some processes have kept of a parameter, and keep a part of it."""
        quantity, leaf, place = key
        reduction, like, states = self.reductions[quantity], self.own[place], [*each.values()]
        own = None if own is None else as_wide(own, states)
        if (along := divided_along(like, self.processes.ranks)) is not None:
            part = reduce(partial(reduction.merge, over="samples"), self._dealt(own, each, like, along))
        else:
            own = own or as_wide(reduction.init(self.places[place], 0, 1), states)
            (whole,) = self.processes.exchanged([reduction.across(leaf, own, states)])
            # numbers of all entries travel with them, and are not to keep them alive
            part = tuple(local_part(x, like) if x.shape == like.shape else x.clone() for x in whole)
        before = self._states.get(key)
        self._states[key] = part if before is None else reduction.merge(before, part, "samples")

    def _dealt(self, own: State | None, each: Mapping[int, State], like: Any, along: int) -> Iterator[State]:
        """States that some processes have kept of the part of a parameter that this one has: no sum is formed of the
        whole."""
        (first, *_), states = each.values(), [*each.values()]
        given, device = [*each], like.device
        found = [
            self.processes.dealt(x, along if x.shape == like.shape else None, given, device)
            for x in own or as_wide(first, states)
        ]
        return zip(*found, strict=True)

    def _said(self, own: int | ProcessState | str | None) -> list[Any]:
        """Messages of all processes; those that have failed say how."""
        each = [failed_with(said) or said for said in self.processes.heard(own)]
        failed = [f"process {rank} failed with {said}" for rank, said in enumerate(each) if isinstance(said, str)]
        if failed:
            self._failed = f"{'; '.join(failed)}\nThe result is that of all processes, so that none has one."
        return each

    def _versions(self) -> list[int]:
        return [version(x) for x in self.own]


def through(rounds: Rounds | None, work: Callable[[], T]) -> T:
    """Do what may read parameters of which each process has a part."""
    return work() if rounds is None else rounds.through(work)


def as_wide(state: State, each: Sequence[State]) -> State:
    """A state in the dtypes of all: zeros of half precision stand beside sums that are kept in float32."""
    dtypes: dict[str, torch.dtype] = {}
    for path, x in (leaf for one in each for leaf in tree.named_leaves(one)):
        if isinstance(x, torch.Tensor):
            dtypes[path] = torch.promote_types(dtypes.get(path, x.dtype), x.dtype)
    leaves = [
        x.to(dtypes.get(path, x.dtype)) if isinstance(x, torch.Tensor) else x for path, x in tree.named_leaves(state)
    ]
    return tree.unflatten(leaves, tree.flatten(state)[1])


# Tensors of which each process has a part, made whole in all of them and taken apart again


def whole(processes: Processes, name: str, x: Any) -> Any:
    """A tree, the same in all processes, whose tensors they have as a whole: DTensors are gathered, one by one."""
    if not any(map(sharded, tree.tensors((x,)))):
        return x
    found = iter(_gathered(processes, name, x, keep=True))
    return tree.map_tensors(lambda y: next(found) if sharded(y) else y, x)


def parted(processes: Processes, name: str, x: Any) -> tuple[Any, Rounds]:
    """The same tree with tensors in the places of DTensors that have no numbers, and what brings these where they are
    read."""
    found, own, places = _absent(processes, name, x)
    return found, Rounds(processes, own, places)


def parted_beside(rounds: Rounds, name: str, x: Any) -> Any:
    """The same of another tree, whose numbers come in the rounds of the parameters."""
    found, own, places = _absent(rounds.processes, name, x)
    rounds.beside(own, places)
    return found


def _absent(processes: Processes, name: str, x: Any) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """A tree with tensors without numbers in the places of DTensors, these, and those."""
    _gathered(processes, name, x, keep=False)
    own = [y for y in tree.tensors((x,)) if sharded(y)]
    places = absent(own)
    like = iter(places)
    return tree.map_tensors(lambda y: next(like) if sharded(y) else y, x), own, places


def _gathered(processes: Processes, name: str, x: Any, keep: bool) -> list[torch.Tensor]:
    """The DTensors of a tree as a whole, one by one, which have to be the same ones in all processes; none, unless they
    are kept."""
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    said, found = dict[str, str](), list[torch.Tensor]()
    for path, y in tree.named_leaves(x):
        if sharded(y):
            with connected():
                whole = gathered(y)
            said |= bits(name + path, whole)
            found += [whole] * keep
    same(processes.told(f"the whole {name}", lambda: (None, said))[1])  # replicas may differ
    return found


def parts(results: Sequence[torch.Tensor], params: Sequence[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
    """Parts of results that this process has, as of the parameters there, with `lead` axes in front; these may be
    its parts already."""
    pairs = zip(results, params, strict=True)
    return [of_part(local_part(x, p, lead), p, lead) if sharded(p) else x for x, p in pairs]


Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""Its shape, and its processes."""


def _meshes(name: str, x: Any) -> dict[str, Mesh]:
    """The mesh of each DTensor."""
    found, known = dict[str, Mesh](), dict[Any, Mesh]()
    for path, y in tree.named_leaves(x):
        if sharded(y):
            if any(p.is_partial() for p in y.placements):
                raise ArgumentError(
                    f"{name}{path} has placements {y.placements}, so that the numbers are not known before a sum over "
                    "processes. Pass p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)."
                )
            mesh = y.device_mesh
            found[name + path] = known.setdefault(mesh, (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist())))
    return found


def _check_meshes(processes: Processes, each: list[dict[str, Mesh]]) -> None:
    """Check that each process of the group is in one mesh, and no other process: all have to be there to gather."""
    ranks = processes.ranks
    for name in each[0]:
        meshes = dict.fromkeys(one[name] for one in each)
        if sorted(rank for _, mesh in meshes for rank in mesh) != sorted(ranks):
            shown = " and ".join(f"{mesh} in shape {shape}" for shape, mesh in meshes)
            raise ArgumentError(
                f"{name} is a DTensor over the processes {shown}, which have to be those of the group, {ranks}, each "
                "in one mesh. Give that group, or pass p.full_tensor()."
            )
