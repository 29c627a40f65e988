"""Tensors of which each process has a part: made whole in all of them, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.errors import ArgumentError
from invfunc.evaluation.processes import Processes, bits, connected, same


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


def _gathered(x: Any) -> torch.Tensor:
    return x.detach().full_tensor() if sharded(x) else x


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
