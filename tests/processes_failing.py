"""Faults of other processes, and memory of each: programs for `tests/data_sets`."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
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
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, batches, linear, losses
from tests.many_processes import Example, composed, data, hold, mesh
from tests.strategies import Numbers


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
        else:
            found[name] = "no error", "", time.monotonic() - began
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


# Programs of processes that stop and resume, for `tests/data_sets/test_distributed.py`

SIZES = [[2, 3, 0, 1, 2], [1, 4], []]
"""Of the batches of each process."""


class Lost(Exception):
    pass


def batches_of_data() -> tuple[Any, list[Any]]:
    """Parameters, and the batches of this process."""
    rand = Numbers(0)
    params = {"w": rand(4, 3), "b": rand(3)}
    edges = [sum(SIZES[0]), sum(map(sum, SIZES[:2]))]
    own = [part[dist.get_rank()] for part in (batches(edges, rand(13, 4)), batches(edges, torch.arange(13) % 3))]
    x, y = (one[0] for one in own)
    sizes = SIZES[dist.get_rank()]
    return params, batches([sum(sizes[: k + 1]) for k in range(len(sizes) - 1)], x, y) if sizes else []


def rows_of(*xs: torch.Tensor) -> set[float]:
    """First entries, which tell samples apart, read without a function mode."""
    with torch._C.DisableTorchFunction():
        return {row for x in xs for row in x[:, 0].tolist()}


def cases(seen: list[float], seed: int = 0) -> dict[str, Callable[[], Any]]:
    """Makers of some statistics and products, of functions that record the samples they get."""

    def noted(f: Callable) -> Callable:
        def named(params: Any, x: torch.Tensor, *rest: Any) -> Any:
            seen.extend(rows_of(x))
            return f(params, x, *rest)

        named.__name__ = f.__name__
        return named

    f, g = noted(losses), noted(linear)
    drawn = partial(torch.Generator().manual_seed, seed + dist.get_rank())  # the first one's counts
    return {
        "variance": lambda: invfunc.variance(f),
        "several": lambda: invfunc.together(
            invfunc.batch_grad(f), invfunc.ekfac(f, generator=drawn()), invfunc.variance(f)
        ),
        "mean": lambda: invfunc.diag_ggn(g, F.cross_entropy),
        "hvp": lambda: invfunc.hvp(f),
        "drawn product": lambda: invfunc.ggnvp(g, F.cross_entropy, mc_samples=1, generator=drawn(), fisher="mc"),
    }


class Told:
    """Collects what is wrong, in words."""

    def __init__(self, folder: str) -> None:
        self.folder, self.wrong, self.seen = Path(folder), list[str](), list[float]()
        self.params, self.parts = batches_of_data()
        self.rank = dist.get_rank()
        self.own = self.folder / f"state.{self.rank}"

    def check(self, what: str, right: Any) -> None:
        if not right:
            self.wrong.append(what)

    def call(self, t: Any, loader: Any, **options: Any) -> Any:
        v = [self.params] if hasattr(t, "linearize") else []
        return distributed(streamed(t, **options))(self.params, *v, loader)

    def broken(self, t: Any, rank: int, sweep: int, at: int) -> str:
        """The way in which a call ends whose loader fails."""
        begun, counts = [], bool(getattr(t, "drawings", None) or getattr(t, "drawing", None))  # the samples, first

        def loader() -> Iterator[Any]:
            begun.append(0)
            fails = self.rank == rank and len(begun) == counts + sweep + 1
            yield from self.parts[:at] if fails else self.parts
            if fails:
                raise Lost

        try:
            self.call(t, loader, checkpoint=self.folder / "state")
        except Exception as error:
            return type(error).__name__ if isinstance(error, (Lost, invfunc.errors.ProcessError)) else repr(error)
        return "nothing"

    def resumed(self, what: str, t: Any, wanted: Any) -> None:
        """Go on, and compare to the last bit."""
        self.seen.clear()
        dist.barrier()
        found = self.call(t, self.parts, checkpoint=self.folder / "state")
        pairs = zip(tree.tensors((found,)), tree.tensors((wanted,)), strict=True)
        self.check(f"{what}: another result", all(torch.equal(x, y) for x, y in pairs))
        dist.barrier()
        self.check(f"{what}: a file is left", not list(self.folder.iterdir()))


def go_on(folder: str) -> list[str]:
    """Every case, broken off in each process and sweep."""
    told = Told(folder)
    for name in ("several", "mean", "hvp", "drawn product"):
        make = cases(told.seen)[name]
        wanted, sweeps = told.call(make(), told.parts), getattr(make(), "sweeps", 1)
        for rank, sweep, at in [(r, s, k) for r in (0, 1) for s in range(sweeps) for k in ((1, 3), (0, 1))[r]]:
            what = f"{name}, process {rank} in sweep {sweep} at {at}"
            said = told.broken(make(), rank, sweep, at)
            told.check(f"{what}: {said}", said == ("Lost" if rank == told.rank else "ProcessError"))
            told.resumed(what, make(), wanted)
            left = told.parts[at:] if rank == told.rank else []
            if sweep < sweeps - 1:
                left = told.parts
            first = told.parts[:1] if name in ("mean", "drawn product") else []  # which shows the scale
            again = rows_of(*(x for x, _ in [*left, *first]))
            told.check(f"{what}: batches were computed again", set(told.seen) <= again)
    return told.wrong


def lose(folder: str) -> list[str]:
    """Files that are lost, late, or of something else."""
    told = Told(folder)
    first, second, copy = told.folder / "state.0", told.folder / "state.1", told.folder.parent / "copy"
    several, wanted = cases(told.seen)["several"], {}
    for name in ("several", "drawn product"):
        wanted[name] = told.call(cases(told.seen)[name](), told.parts)

    def moved(source: Path, to: Path) -> None:
        dist.barrier()
        if told.rank == 1:
            shutil.move(source, to)
        dist.barrier()

    def says(what: str, text: str, t: Any) -> None:
        try:
            told.call(t, told.parts, checkpoint=told.folder / "state")
        except (invfunc.errors.ArgumentError, invfunc.errors.ProcessError) as error:
            told.check(f"{what}: {error}", text in str(error))
        else:
            told.check(what, False)

    for sweep in (0, 1):
        told.broken(several(), 0, sweep, 1)
        moved(second, copy)
        told.resumed(f"a file that is lost in sweep {sweep}", several(), wanted["several"])

    told.broken(several(), 0, 0, 2)
    if told.rank == 1:
        shutil.copy(second, copy)
    told.broken(several(), 0, 1, 1)
    moved(copy, second)
    told.resumed("a file of the first sweep, where others are in the second", several(), wanted["several"])
    told.check("the second sweep is not of all", set(told.seen) == rows_of(*(x for x, _ in told.parts)))

    told.broken(several(), 0, 1, 1)
    if told.rank == 1:  # as another machine may find them
        found = torch.load(second, weights_only=False)
        for one in found["state"]["known"][1][1].values():
            one.factors[0].mul_(-1)
        torch.save(found, second)
    says("eigenvectors that are not those of the others", "are of different calls. Remove them", several())
    dist.barrier()
    told.own.unlink(missing_ok=True)

    told.broken(cases(told.seen)["drawn product"](), 1, 0, 1)
    moved(first, copy)
    other = cases(told.seen, seed=7)["drawn product"]
    told.resumed("keys are those of the file that is left", other(), wanted["drawn product"])

    told.broken(several(), 0, 1, 1)
    moved(second, copy)
    moved(first, second)
    says("another process's file", "another value of the process: 0 of 3, and not 1 of 3", several())
    dist.barrier()
    told.own.unlink(missing_ok=True)
    told.broken(several(), 0, 1, 1)
    moved(copy, second)
    says("files of two calls", "are of different calls. Remove them", several())
    dist.barrier()
    told.own.unlink(missing_ok=True)

    failing = [told.rank == 1]

    def last(path: str, x: torch.Tensor) -> torch.Tensor:
        if any(failing):
            raise Lost
        return x.clone()

    summed = invfunc.reduced(cases(told.seen)["variance"](), last)
    said = told.broken(summed, -1, 0, 0)
    told.check(f"no result in one process: {said}", said == ("Lost" if any(failing) else "ProcessError"))
    failing.clear()
    told.resumed("where one had no result", summed, told.call(cases(told.seen)["variance"](), told.parts))
    told.check("where one had no result: batches were computed again", not told.seen)
    return told.wrong


def rows(folder: str) -> list[str]:
    """Results with a sample axis that go elsewhere in each process."""
    told, params = Told(folder), batches_of_data()[0]

    def compare(what: str, found: Any, wanted: Any) -> None:
        try:
            assert_trees_close(found, wanted, EXACT)
        except AssertionError as error:
            told.wrong.append(f"{what}: {error}")

    drawn = partial(torch.Generator().manual_seed, 0)
    made: dict[str, Callable[[], Any]] = {
        "losses": lambda: invfunc.batch_grad(losses),
        "a mean": lambda: invfunc.sqrt_ggn(linear, F.cross_entropy),
        "a mean of several": lambda: invfunc.together(
            invfunc.diag_ggn(linear, F.cross_entropy, per_sample=True), invfunc.sqrt_ggn(linear, F.cross_entropy)
        ),
        "drawn": lambda: invfunc.diag_ggn(losses, mc_samples=2, generator=drawn(), per_sample=True),
    }
    for name, make in made.items():
        wanted = told.call(make(), told.parts)
        out = tree.map_tensors(lambda x: torch.full_like(x, torch.nan), wanted)
        compare(name, told.call(make(), told.parts, out=out), wanted)
        compare(name, out, wanted)
        if "mean" in name:
            continue
        starts, kept = [], list[Any]()
        found = told.call(
            make(), told.parts, out=lambda start, x, kept=kept, to=starts: (to.append(start), kept.append(x))
        )
        sizes = [n for n in SIZES[told.rank] if n]
        told.check(f"{name}: starts {starts}", found is None and starts == [sum(sizes[:k]) for k in range(len(sizes))])
        for path in params if sizes else ():
            compare(name, torch.cat([x[path] for x in kept]), wanted[path])
    for rank, size in ((0, 8), (2, 0)):
        small = tree.map_tensors(lambda x: x.new_empty(size - (told.rank == rank == 0), *x.shape), params)  # noqa: B023
        try:
            told.call(invfunc.batch_grad(losses), told.parts, out=small)
        except (invfunc.errors.ArgumentError, invfunc.errors.ProcessError) as error:
            told.check(f"no room: {error}", "there are" in str(error))
        else:
            told.check("no room", False)
    return told.wrong


def all_of_it(folder: str) -> list[str]:
    return go_on(folder) + lose(folder) + rows(folder)
