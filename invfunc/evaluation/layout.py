"""Tensors of which each process has a part: made whole in all of them, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._sharded import sharded
from invfunc.errors import ArgumentError
from invfunc.evaluation.processes import Processes, bits, connected, same


def whole(processes: Processes, name: str, x: Any) -> Any:
    """A tree, the same in all processes, whose tensors they have as a whole: DTensors are gathered, one by one."""
    if not any(map(sharded, tree.tensors((x,)))):
        return x
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    with connected():
        found = tree.map_tensors(lambda y: y.detach().full_tensor() if sharded(y) else y, x)
    _, said = processes.told(f"the whole {name}", lambda: (None, bits(name, found)))
    same(said)  # replicas may differ
    return found


def parts(results: Sequence[torch.Tensor], params: Sequence[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
    """Of what all processes have as a whole, what this one has of the parameter in its place; `lead` axes are in front
    of its own."""
    return [_part(x, p, lead) if sharded(p) else x for x, p in zip(results, params, strict=True)]


def _part(x: torch.Tensor, like: Any, lead: int) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    placements = [_behind(p, lead) for p in like.placements]
    own = distribute_tensor(x, like.device_mesh, placements, src_data_rank=None)
    local = own.to_local().clone()  # which does not keep the whole alive
    return DTensor.from_local(local, own.device_mesh, own.placements, run_check=False, shape=x.shape, stride=x.stride())


def _behind(placement: Any, lead: int) -> Any:
    """A placement whose dimension comes behind some more."""
    if not (lead and placement.is_shard()):
        return placement
    return type(placement)(placement.dim + lead)


def _meshes(name: str, x: Any) -> dict[str, tuple[int, ...]]:
    """The processes over which each DTensor is laid out."""
    found: dict[str, tuple[int, ...]] = {}
    known: dict[Any, tuple[int, ...]] = {}
    for path, y in tree.named_leaves(x):
        if sharded(y):
            if any(p.is_partial() for p in y.placements):
                raise ArgumentError(
                    f"{name}{path} has placements {y.placements}, so that the numbers are not known before a sum over "
                    "processes. Pass p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)."
                )
            mesh = y.device_mesh
            found[name + path] = known.setdefault(mesh, tuple(mesh.mesh.flatten().tolist()))
    return found


def _check_meshes(processes: Processes, each: list[dict[str, tuple[int, ...]]]) -> None:
    """Check that each process of the group is in one mesh, and no other process: all have to be there to gather."""
    ranks = processes.ranks
    for name in each[0]:
        meshes = dict.fromkeys(one[name] for one in each)
        if sorted(rank for mesh in meshes for rank in mesh) != sorted(ranks):
            raise ArgumentError(
                f"{name} is a DTensor over the processes {' and '.join(map(str, meshes))}, which have to be those of "
                f"the group, {ranks}, each once. Give that group, or pass p.full_tensor()."
            )
