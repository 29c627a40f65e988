"""Faults of other processes, and memory of each: programs for `tests/data_sets`."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import invfunc
from invfunc import distributed, streamed, tree
from invfunc.data_sets.visits import VisitWork
from invfunc.evaluation.processes import Processes
from tests.data_sets.test_streamed import linear, losses
from tests.many_processes import Example, composed, data, hold, mesh


def told_of_all(examples: list[Example]) -> tuple:
    """The programs that go on with each other, as it takes seconds to start processes."""
    return hold(examples), composed(), faults()


# Faults: what each process raises, and after how many seconds

Calls = dict[str, Callable[[], Any]]


def faults() -> dict[str, tuple[str, str, float]]:
    """By name: the type of the error, what it says, and the seconds that it took."""
    found, (params, (x, y)) = dict[str, tuple[str, str, float]](), data()
    given = dist.get_rank(), params, x, y
    for name, call in {**of_calls(*given), **of_losses(*given), **of_loaders(*given), **of_parts(*given)}.items():
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            found[name] = type(error).__name__, str(error), time.monotonic() - began
    finite = tree.map_tensors(lambda v: v.isfinite().all(), distributed(OF)(params, x, y))
    return {**found, "then all is well": ("", str(finite), 0.0)}


OF, PRODUCT = invfunc.variance(losses), invfunc.hvp(losses)


def fails(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")
    return losses(params, x, y)


def late(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Two batches, of which the loader of one process has one only."""
    yield x, y
    if dist.get_rank() == 1:
        raise OSError("the disk is gone")
    yield x, y


def of_calls(rank: int, params: Any, x: torch.Tensor, y: torch.Tensor) -> Calls:
    """Other functions, arguments and steps in one process."""
    own, short = {"w": params["w"] + rank, "b": params["b"]}, {**params, "w": params["w"][:3]}

    def gathered() -> Any:
        return distributed(invfunc.batch_grad(losses), each="gather" if rank else "local")(params, x, y)

    return {
        "f fails": lambda: distributed(invfunc.variance(fails))(params, x, y),
        "other parameters": lambda: distributed(OF)(own, x, y),
        "another statistic": lambda: distributed(OF if rank else invfunc.diag_ggn(losses))(params, x, y),
        "permuted parameters": lambda: distributed(OF)({**params, "b": params["b"].roll(rank)}, x, y),
        "another order": lambda: distributed(OF)(params if rank else dict(reversed(params.items())), x, y),
        "gathered in one": gathered,
        "another vector": lambda: distributed(PRODUCT)(params, own, x, y),
        "a vector of another shape": lambda: distributed(PRODUCT)(params, short if rank else params, x, y),
        "of another shape later": lambda: distributed(PRODUCT).linearize(params, x, y)(short if rank else params),
        "another step": lambda: distributed(OF if rank else PRODUCT)(*[params] * (1 if rank else 2), x, y),
        "another moment": lambda: Processes.of(None).told(f"step {rank}", lambda: (None, None)),
        "no argument": lambda: distributed(OF)(params, x) if rank else distributed(OF)(params, x, y),
        "no samples": lambda: distributed(OF)(params, x[:0], y[:0]),
        "others that are other ones": lambda: distributed(invfunc.gram(losses, others=(x + rank, y)))(params, x, y),
    }


def of_losses(rank: int, params: Any, x: torch.Tensor, y: torch.Tensor) -> Calls:
    """Losses and outputs that are others in one process."""

    def weighted(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z, y, weight=torch.tensor([1.0, 2.0, 5.0]).to(z))

    def of_means(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z, y, reduction="sum" if rank else "mean")

    def turned(params: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {"one": linear(params, x), "two": 2 * linear(params, x)}
        return dict(reversed(found.items())) if rank else found

    return {
        "a sum and a mean": lambda: distributed(invfunc.diag_ggn(linear, of_means))(params, x, y),
        "weighted means": lambda: distributed(invfunc.diag_ggn(linear, weighted))(params, x[: 1 + rank], y[: 1 + rank]),
        "outputs in another order": lambda: distributed(invfunc.batch_jacobian(turned), each="gather")(params, x),
    }


class Once:
    """A loader that gives its batches once, and does not look so."""

    def __init__(self, *batches: Any) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Any:
        return self.batches


def not_resumed(rank: int, params: Any, x: torch.Tensor, y: torch.Tensor, of: Any = OF) -> Any:
    """All have a file, but one has no room for what is in it."""
    given = [params] * (2 if of is PRODUCT else 1)
    with TemporaryDirectory() as folder:
        t = distributed(streamed(of, checkpoint=Path(folder, "state")))
        with suppress(invfunc.errors.ProcessError, OSError):
            t(*given, lambda: late(x, y))
        no_room = mock.patch.object(VisitWork, "resume", side_effect=MemoryError("no room"))
        with no_room if rank else nullcontext():
            return t(*given, [(x, y)] * 2)


def of_loaders(rank: int, params: Any, x: torch.Tensor, y: torch.Tensor) -> Calls:
    """Loaders that do not give what they should in one process."""

    drawn = invfunc.kfac(linear, F.cross_entropy, generator=torch.Generator().manual_seed(0))
    twice = invfunc.ekfac(linear, F.cross_entropy, fisher="exact")
    batch = [(x, y)]
    return {
        "the loader fails": lambda: distributed(streamed(OF))(params, lambda: late(x, y)),
        "counted and gone": lambda: distributed(streamed(drawn))(params, Once((x, y)) if rank else batch),
        "a file that cannot be gone on with": lambda: not_resumed(rank, params, x, y),
        "used up": lambda: distributed(streamed(twice))(params, iter(batch) if rank else batch),
    }


def of_parts(rank: int, params: Any, x: torch.Tensor, y: torch.Tensor) -> Calls:
    """Parameters of which each process has a part."""

    def placed(placement: Any, w: torch.Tensor = params["w"]) -> Any:
        return {**params, "w": DTensor.from_local(w, mesh(2), [placement], run_check=False)}

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    twice, replicas = placed(Shard(0)), placed(Replicate())
    parts = placed(Shard(0), params["w"][2 * rank :][:2].clone())
    return {
        "parts alone": lambda: OF(twice, x, y),
        "parts explained": lambda: invfunc.explain(distributed(OF))(twice, x, y),
        "a sum to come": lambda: distributed(OF)(placed(Partial()), x, y),
        "other placements": lambda: distributed(OF)(placed(Shard(rank)), x, y),
        "other replicas": lambda: distributed(OF)(placed(Replicate(), params["w"] + rank), x, y),
        "parts of a vector in one": lambda: distributed(PRODUCT)(params, params if rank else replicas, x, y),
        "a mesh of others": lambda: distributed(OF, alone)(twice, x, y),
        "f fails beside parts": lambda: distributed(invfunc.variance(fails))(parts, x, y),
        "the loader fails beside parts": lambda: distributed(streamed(OF))(parts, lambda: late(x, y)),
        "a file that cannot be gone on with beside parts": lambda: not_resumed(rank, parts, x, y, PRODUCT),
    }


def after_one_is_gone(rank: int, folder: str) -> None:
    """Writes to a file the error of a process that waits for one that is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    params, (x, y) = data()

    def f(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(params, x, y)

    began = time.monotonic()
    try:
        distributed(invfunc.variance(f))(params, x, y)
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__} {time.monotonic() - began:.3f} {error}")
