"""Messages of processes that compute one result, each of its own samples."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from invfunc import tree
from invfunc._torch.sharded import pieces_of, sharded
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError, ProcessError
from invfunc.reductions import State
from invfunc.reductions.exchange import Exchange, ExchangedRows

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

    @property
    def ranks(self) -> list[int]:
        """Their numbers among all that were started."""
        return dist.get_process_group_ranks(self.group) if self.size > 1 else [dist.get_rank() if _started() else 0]

    def told(self, at: str, work: Callable[[], tuple[T, M]]) -> tuple[T, list[M]]:
        """Result of this process, and what each says of its own; where one fails, or is `at` another step, all do."""
        if self.size == 1:
            own, message = work()
            return own, [message]
        own, error = None, None
        try:
            own, message = work()
            said = pickle.dumps((at, None, message))
        except BaseException as caught:  # Ctrl-C, too: the others would wait
            error, said = caught, pickle.dumps((at, shown(caught), None))
        heard = self.heard(said)
        while not all(isinstance(one, bytes) for one in heard):  # others read parameters, and have just heard it
            heard = self.heard(said)
        each = [*map(pickle.loads, heard)]
        if error is not None:
            raise error
        failed = [f"process {rank} failed with {text}" for rank, (_, text, _) in enumerate(each) if text is not None]
        failed = failed or [
            f"process {rank} is at {step!r}, and process {self.rank} at {at!r}: all have to make the same calls"
            for rank, (step, _, _) in enumerate(each)
            if step != at
        ]
        if failed:
            raise ProcessError(f"{'; '.join(failed)}\nThe result needs all processes, so that none gets one.")
        return own, [message for _, _, message in each]  # pyright: ignore[reportReturnType]

    def from_first(self, first: int, value: Any) -> Any:
        """The value of a process, in all of them."""
        if self.size == 1:
            return value
        found = [value]
        with connected():
            dist.broadcast_object_list(found, group=self.group, group_src=first)
        return found[0]

    def exchanged(self, exchanges: Sequence[Exchange]) -> list[State]:
        """Results of exchanges, one step of all at a time, so that what they ask for travels together."""
        answers: list[Any] = [None] * len(exchanges)
        found: dict[int, State] = {}
        while len(found) < len(exchanges):
            asked = list[tuple[int, torch.Tensor, int | None]]()
            for i, exchange in enumerate(exchanges):
                if i in found:
                    continue
                try:
                    request = exchange.send(answers[i])
                except StopIteration as stop:
                    found[i] = stop.value
                    continue
                axis = request.axis if isinstance(request, ExchangedRows) else None
                asked += [(i, x.detach(), axis) for x in request.tensors]
            answers = [[] for _ in exchanges]
            for (i, *_), x in zip(asked, self._together([(x, axis) for _, x, axis in asked]), strict=True):
                answers[i].append(x)
        return [found[i] for i in range(len(exchanges))]

    def _together(self, asked: list[tuple[torch.Tensor, int | None]]) -> list[torch.Tensor]:
        """The sums of tensors over all processes, or those of all one behind the other along an axis."""
        found = [x for x, _ in asked]
        if self.size == 1 or not found:
            return found
        _, each = self.told("exchange", lambda: (None, [(x.dtype, x.shape, axis) for x, axis in asked]))
        known = [[(dtype, shape if axis is None else len(shape), axis) for dtype, shape, axis in one] for one in each]
        if any(one != known[0] for one in known):  # torch would mix up, or end them
            raise ProcessError(
                "the processes have kept tensors of different shapes or dtypes, which is a fault of this library that "
                "we would like to know of, or their functions are different ones."
            )
        sums: dict[Any, list[int]] = {}
        for k, (x, axis) in enumerate(asked):
            if axis is None:
                sums.setdefault((x.dtype, x.device), []).append(k)
            else:
                found[k] = self._rows(x, axis, [one[k][1] for one in each])
        for places in sums.values():
            flat = torch.cat([found[k].reshape(-1) for k in places])
            with connected():
                dist.all_reduce(flat, group=self.group)
            for k, part in zip(places, flat.split([found[k].numel() for k in places]), strict=True):
                found[k] = part.view(found[k].shape)
        return found

    def _rows(self, x: torch.Tensor, axis: int, shapes: list[torch.Size]) -> torch.Tensor:
        """A tensor of each process, as bytes (not all dtypes travel) and as long as the longest."""
        sizes = [shape.numel() * x.itemsize for shape in shapes]
        padded = x.new_zeros(max(sizes), dtype=torch.uint8)
        padded[: sizes[self.rank]] = x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        each = [torch.empty_like(padded) for _ in shapes]
        with connected():
            dist.all_gather(each, padded, group=self.group)
        rows = zip(each, sizes, shapes, strict=True)
        return torch.cat([part[:size].view(x.dtype).view(shape) for part, size, shape in rows], axis)

    def dealt(self, x: torch.Tensor, along: int | None, given: Sequence[int], device: Any) -> list[torch.Tensor]:
        """The parts of this process of what some processes give, which are divided along an axis, or are for all.

        x is what this one gives, or tells its shape and dtype without numbers. A part travels once: in gloo, a
        reduce-scatter is a sum of the whole in all processes. What is no sum may be merged, too.
        """
        pieces = [x] * self.size if along is None else pieces_of(x, self.size, along)
        own, gives = pieces[self.rank], self.rank in given
        sent = [piece.numel() * gives for piece in pieces]
        got = [own.numel() * (rank in given) for rank in range(self.size)]
        found = torch.empty(sum(got), dtype=x.dtype, device=device)
        flat = found[:0]
        if gives:  # without a copy where parts are rows
            flat = x.detach().reshape(-1) if along == 0 else torch.cat([piece.detach().reshape(-1) for piece in pieces])
        with connected():
            dist.all_to_all_single(found, flat, got, sent, group=self.group)
        parts = found.split(got)
        return [parts[rank].view(own.shape) for rank in given]

    def heard(self, said: Any) -> list[Any]:
        """Messages of all processes."""
        if self.size == 1:
            return [said]
        each: list[Any] = [None] * self.size
        with connected():
            dist.all_gather_object(each, said, group=self.group)
        return each


def failed_with(said: Any) -> str | None:
    """Text of the failure in a process that is `told` of a step, in place of saying something else."""
    return pickle.loads(said)[1] if isinstance(said, bytes) else None


ALONE = Processes()


@contextmanager
def connected() -> Iterator[None]:
    """Says of a connection that is lost what that means."""
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


def bits(name: str, x: Any) -> dict[str, str]:
    """The tensors of a tree by name: what they are, and a hash of their numbers."""

    def shown(y: Any) -> str:
        if sharded(y):
            return f"{y.dtype} {tuple(y.shape)} with placements {y.placements}"
        return f"{y.dtype} {tuple(y.shape)} with hash {_hash(y):x}"

    return {name + path: shown(y) for path, y in tree.named_leaves(x) if isinstance(y, torch.Tensor)}


def _hash(x: torch.Tensor) -> int:
    """The sum of the bits of all numbers, times odd numbers by their places: made where they are, some at a time."""
    kinds, most = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}, 2**20
    numbers = x.detach().contiguous().flatten().view(kinds[x.itemsize])
    odd = 2 * torch.arange(min(most, len(numbers)), device=x.device) + 1
    found = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, some in enumerate(numbers.split(most)):
        found = found + (2 * k + 1) * (some * odd[: len(some)]).sum()
    return int(found) % 2**64


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


def on_cpu(x: Any) -> Any:
    """A tree whose tensors are on the CPU, as those that travel as objects have to be."""
    return tree.map_tensors(lambda y: y.detach().cpu(), x)
