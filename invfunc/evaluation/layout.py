"""Tensors of which each process has a part: made whole in all of them, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.reading import absent
from invfunc._torch.sharded import gathered, local_part, of_part, sharded
from invfunc.errors import ArgumentError
from invfunc.evaluation.processes import Processes, bits, connected, same
from invfunc.evaluation.rounds import Rounds


def whole(processes: Processes, name: str, x: Any) -> Any:
    """A tree, the same in all processes, whose tensors they have as a whole: DTensors are gathered, one by one."""
    if not any(map(sharded, tree.tensors((x,)))):
        return x
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    with connected():
        found = tree.map_tensors(lambda y: gathered(y) if sharded(y) else y, x)
    _, said = processes.told(f"the whole {name}", lambda: (None, bits(name, found)))
    same(said)  # replicas may differ
    return found


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
    own = {path: y for path, y in tree.named_leaves(x) if sharded(y)}
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    said = dict[str, str]()
    for path, y in own.items():
        with connected():
            found = gathered(y)
        said |= bits(name + path, found)
    _, said_by_all = processes.told(f"the whole {name}", lambda: (None, said))
    same(said_by_all)  # replicas may differ
    places = absent([*own.values()])
    like = iter(places)
    return tree.map_tensors(lambda y: next(like) if sharded(y) else y, x), [*own.values()], places


def parts(results: Sequence[torch.Tensor], params: Sequence[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
    """What this process has of results, as of the parameters in their places, with `lead` axes in front; these may be
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
