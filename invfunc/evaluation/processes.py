"""Messages of processes that compute one result, each of its own samples, and texts that tell values from others."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from invfunc import tree
from invfunc._torch.sharded import gathered, laid_out, sharded
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError, ProcessError
from invfunc.reductions import Reduction

T = TypeVar("T")
M = TypeVar("M")


@dataclass(frozen=True)
class Processes:
    """A group of them, and which of them this one is; one alone, where there is no group."""

    group: Any = None
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, group: Any) -> Processes:
        """Processes of a group of torch.distributed; without one, all that were started."""
        if not _started():
            if group is not None:
                raise ArgumentError("group is given, but torch.distributed.init_process_group was not called.")
            return cls()
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                raise ArgumentError("this process is not in the group, and gets no result. Leave the call out here.")
            kind = type(group).__name__
            raise ArgumentTypeError(
                f"group is of type {kind}, but has to be a process group (of a DeviceMesh: mesh.get_group())."
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def told(self, at: str, work: Callable[[], tuple[T, M]]) -> tuple[T, list[M]]:
        """Result of this process, and what each says of its own; where one fails, or is `at` another step, all do."""
        if self.size == 1:
            own, message = work()
            return own, [message]
        own, error, each = None, None, [None] * self.size
        try:
            own, message = work()
            said = pickle.dumps((at, None, message))
        except BaseException as caught:  # Ctrl-C, too: the others would wait
            error, said = caught, pickle.dumps((at, shown(caught), None))
        with connected():
            dist.all_gather_object(each, said, group=self.group)
        if error is not None:
            raise error
        heard: list[Any] = [pickle.loads(one) for one in each]  # pyright: ignore[reportArgumentType]
        failed = [f"process {rank} failed with {text}" for rank, (_, text, _) in enumerate(heard) if text is not None]
        failed = failed or [
            f"process {rank} is at {step!r}, and process {self.rank} at {at!r}: all have to make the same calls"
            for rank, (step, _, _) in enumerate(heard)
            if step != at
        ]
        if failed:
            raise ProcessError(f"{'; '.join(failed)}\nThe result needs all processes, so that none gets one.")
        return own, [message for _, _, message in heard]  # pyright: ignore[reportReturnType]

    def merged(self, own: T, join: Callable[[T, T], T], device: torch.device) -> T:
        """The trees of all processes joined in their order, in each of them: of neighbours first, then of pairs."""
        found: Any = own
        step = 1
        with connected():
            while step < self.size:
                if self.rank % (2 * step) == step:
                    self._give(found, self.rank - step)
                elif self.rank % (2 * step) == 0 and self.rank + step < self.size:
                    found = _joined(join, found, self._taken(self.rank + step, device))
                step *= 2
            while step > 1:
                step //= 2
                if self.rank % (2 * step) == step:
                    found = self._taken(self.rank - step, device)
                elif self.rank % (2 * step) == 0 and self.rank + step < self.size:
                    self._give(found, self.rank + step)
        if isinstance(found, ProcessError):
            raise found
        return found

    def _give(self, x: Any, rank: int) -> None:
        tensors, form = tree.separate(x)
        kinds = [(y.shape, y.dtype, y.device.type) for y in tensors]
        dist.send_object_list([(form.structure, form.others, form.places, kinds)], group=self.group, group_dst=rank)
        for y in tensors:
            if y.numel():
                dist.send(
                    _bytes(y.detach().clone(memory_format=torch.contiguous_format)), group=self.group, group_dst=rank
                )

    def _taken(self, rank: int, device: torch.device) -> Any:
        head: list[Any] = [None]
        dist.recv_object_list(head, group=self.group, group_src=rank)
        structure, others, places, kinds = head[0]
        tensors = [torch.empty(shape, dtype=d, device="cpu" if at == "cpu" else device) for shape, d, at in kinds]
        for y in tensors:
            if y.numel():
                dist.recv(_bytes(y), group=self.group, group_src=rank)
        return tree.Form(structure, others, places).join(tensors)


ALONE = Processes()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as not all dtypes travel."""
    return x.view(-1).view(torch.uint8)


def _joined(join: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """Two trees joined, or why they cannot be: other processes wait for what comes of them."""
    for one in (first, second):
        if isinstance(one, ProcessError):
            return one
    try:
        return join(first, second)
    except Exception as error:
        return ProcessError(f"what the processes have kept cannot be joined: {shown(error)}")


@contextmanager
def connected() -> Iterator[None]:
    """A context in which the loss of a connection is an error that says what it means."""
    try:
        yield
    except InvFuncError:
        raise
    except RuntimeError as error:
        raise ProcessError(
            "the connection to another process is lost: it has ended, or did not come within the timeout of the group "
            f"({str(error).splitlines()[0]})."
        ) from error


def _started() -> bool:
    return dist.is_available() and dist.is_initialized()


def shown(error: BaseException) -> str:
    """An error, with its notes."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}".removesuffix(": ") + notes


def same(each: Sequence[dict[str, str]]) -> None:
    """Check that what all processes say of themselves is the same."""
    for rank, said in enumerate(each):
        for name in {**each[0], **said}:
            first, other = each[0].get(name, "none"), said.get(name, "none")
            if first != other:
                raise ArgumentError(
                    f"{name} has to be the same in all processes, but is {first} in process 0, and {other} in process "
                    f"{rank}."
                )
        for own, first in zip(said, each[0], strict=True):
            if own != first:
                raise ArgumentError(
                    f"{own} comes first in process {rank}, where {first} does in process 0: the order differs."
                )


# Texts and numbers that are the same in every process


def fingerprint(x: Any) -> int:
    """A number of 63 bits that depends on all numbers, names and shapes in a tree."""
    told = " ".join(f"{path} {described(leaf)}" for path, leaf in tree.named_leaves(x))
    return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "big") >> 1


def named(name: str, x: Any) -> dict[str, str]:
    """The leaves of a tree by name, as texts."""
    return {name + path: described(leaf) for path, leaf in tree.named_leaves(x)}


def described(x: Any) -> str:
    """A value as a text that is the same in every process."""
    if isinstance(x, torch.Tensor):
        placed = f" with placements {x.placements}" if sharded(x) else f" with hash {_hash(x):x}"  # pyright: ignore[reportAttributeAccessIssue]
        return f"{x.dtype} {tuple(x.shape)}{placed}"
    if isinstance(x, Reduction):
        return f"{type(x).__name__}{described(vars(x))}"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}={described(y)}" for name, y in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(described, x))})"
    if callable(x):
        return re.sub(" at 0x[0-9a-f]+", "", getattr(x, "__name__", repr(x)))
    plain = x is None or isinstance(x, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))
    return repr(x) if plain else type(x).__name__


def _hash(x: torch.Tensor) -> int:
    """The sum of the bits of all numbers, times odd numbers by their places: made where they are, some at a time."""
    if x.is_meta:
        return 0
    kinds, most = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}, 2**20
    x = (x if x.layout == torch.strided else x.to_dense()).detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    numbers = x.contiguous().flatten().view(kinds[x.itemsize])
    odd = 2 * torch.arange(min(most, len(numbers)), device=x.device) + 1
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, some in enumerate(numbers.split(most)):
        found = found + (2 * k + 1) * (some * odd[: len(some)]).sum()
    return int(found) % 2**64


# Tensors of which each process has a part, made whole in all of them and taken apart again

Mesh = tuple[tuple[int, ...], tuple[int, ...]]
"""Its shape, and its processes."""


def whole(processes: Processes, name: str, x: Any) -> Any:
    """A tree, the same in all processes, whose tensors they have as a whole: DTensors are gathered, one by one."""
    if not any(map(sharded, tree.tensors((x,)))):
        return x
    _, each = processes.told(f"the parts of {name}", lambda: (None, _meshes(name, x)))
    _check_meshes(processes, each)
    with connected():
        found = tree.map_tensors(lambda y: gathered(y) if sharded(y) else y, x)
    same(processes.told(f"the whole {name}", lambda: (None, named(name, found)))[1])  # replicas may differ
    return found


def parts(results: Sequence[torch.Tensor], params: Sequence[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
    """Parts of results that this process has, as of the parameters there, with `lead` axes in front."""
    pairs = zip(results, params, strict=True)
    return [laid_out(x, p, lead) if sharded(p) else x for x, p in pairs]


def _meshes(name: str, x: Any) -> dict[str, Mesh]:
    """The mesh of each DTensor."""
    found = dict[str, Mesh]()
    for path, y in tree.named_leaves(x):
        if sharded(y):
            if any(p.is_partial() for p in y.placements):
                raise ArgumentError(
                    f"{name}{path} has placements {y.placements}, so that the numbers are not known before a sum over "
                    "processes. Pass p.redistribute(placements=[Replicate()] * p.device_mesh.ndim)."
                )
            found[name + path] = tuple(y.device_mesh.mesh.shape), tuple(y.device_mesh.mesh.flatten().tolist())
    return found


def _check_meshes(processes: Processes, each: list[dict[str, Mesh]]) -> None:
    """Check that each process of the group is in one mesh, and no other process: all have to be there to gather."""
    ranks = [dist.get_rank() if _started() else 0]
    if processes.size > 1:
        ranks = dist.get_process_group_ranks(processes.group)
    for name in each[0]:
        meshes = dict.fromkeys(one[name] for one in each)
        if sorted(rank for _, mesh in meshes for rank in mesh) != sorted(ranks):
            shown = " and ".join(f"{mesh} in shape {shape}" for shape, mesh in meshes)
            raise ArgumentError(
                f"{name} is a DTensor over the processes {shown}, which have to be those of the group, {ranks}, each "
                "in one mesh. Give that group, or pass p.full_tensor()."
            )
