"""Tensors of which each process has a part: made whole in all of them, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc._torch.reading import Reading, absent
from invfunc._torch.sharded import sharded
from invfunc.errors import ArgumentError, ProcessError
from invfunc.evaluation.processes import Processes, bits, connected, same, shown


def whole(processes: Processes, name: str, x: Any) -> Any:
    """A tree, the same in all processes, whose tensors they have as a whole: DTensors are gathered, one by one."""
    if not any(map(sharded, tree.tensors((x,)))):
        return x
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    with connected():
        found = tree.map_tensors(_gathered, x)
    _, said = processes.told(f"the whole {name}", lambda: (None, bits(name, found)))
    same(said)  # replicas may differ
    return found


def parted(processes: Processes, name: str, x: Any) -> tuple[Any, Rounds]:
    """The same tree with tensors in the places of DTensors that have no numbers, and what brings these where they are
    read."""
    own = {path: y for path, y in tree.named_leaves(x) if sharded(y)}
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    said = dict[str, str]()
    for path, y in own.items():
        with connected():
            found = _gathered(y)
        said |= bits(name + path, found)
    _, said_by_all = processes.told(f"the whole {name}", lambda: (None, said))
    same(said_by_all)  # replicas may differ
    places = [absent(y) for y in own.values()]
    like = iter(places)
    return tree.map_tensors(lambda y: next(like) if sharded(y) else y, x), Rounds(processes, [*own.values()], places)


def _gathered(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if sharded(x) else x


class Rounds:
    """Brings tensors of which each process has a part to the operations that read them.

    Processes read others, in another order and more or less often, as their samples do not come alike. So they go in
    rounds: each says what it is about to read, or that it reads nothing any more, and all of this is gathered by all.
    """

    def __init__(self, processes: Processes, own: list[Any], places: list[torch.Tensor]) -> None:
        self.processes, self.own, self.places = processes, own, places
        self._before = self._versions()
        self._failed = ""

    def through(self, work: Callable[[], Any]) -> None:
        """Do what reads them, and help others until none of them reads any more; where one fails, all do."""
        try:
            with Reading(self.places, self._bring):
                work()
        except Exception as error:
            if not self._failed:
                self._said(shown(error))
            raise
        while not self._failed and any(place is not None for place in self._round(None)[0]):
            pass
        self._check()

    def _bring(self, place: int) -> torch.Tensor:
        self._check()
        if self._versions() != self._before:
            raise ArgumentError(
                "the parameters were written in place meanwhile (an optimizer beside the loader?), but a result is of "
                "the same ones for all samples. Pass copies: {name: p.clone() for name, p in params.items()}."
            )
        found = self._round(place)[1]
        self._check()
        assert found is not None
        return found

    def _check(self) -> None:
        if self._failed:
            raise ProcessError(self._failed)

    def _round(self, wanted: int | None) -> tuple[list[Any], torch.Tensor | None]:
        """What all want to read, and what this process does."""
        each, found = self._said(wanted), None
        for place in sorted({p for p in each if p is not None}) if not self._failed else ():
            with connected():
                one = _gathered(self.own[place]).contiguous()
            found = one if place == wanted else found
            del one  # before the next one comes
        return each, found

    def _said(self, own: int | str | None) -> list[Any]:
        """What all want to read; or how some have failed."""
        each = self.processes.heard(own)
        failed = [f"process {rank} failed with {said}" for rank, said in enumerate(each) if isinstance(said, str)]
        if failed:
            self._failed = f"{'; '.join(failed)}\nThe result is that of all processes, so that none has one."
        return each

    def _versions(self) -> list[int]:
        return [version(x) for x in self.own]


def parts(results: Sequence[torch.Tensor], params: Sequence[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
    """What this process has of results, as of the parameters in their places, with `lead` axes in front."""
    return [_part(x, p, lead) if sharded(p) else x for x, p in zip(results, params, strict=True)]


def _part(x: torch.Tensor, like: Any, lead: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    placements, x = [_behind(p, lead) for p in like.placements], x.contiguous()
    own = distribute_tensor(x, like.device_mesh, placements, src_data_rank=None)
    local = own.to_local().clone()  # which does not keep the whole alive
    return DTensor.from_local(local, own.device_mesh, own.placements, run_check=False, shape=x.shape, stride=x.stride())


def _behind(placement: Any, lead: int) -> Any:
    """A placement whose dimension comes behind some more."""
    if not (lead and hasattr(placement, "dim")):
        return placement
    options = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(placement.dim + lead, **options)


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
