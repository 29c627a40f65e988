"""Programs of processes that stop and resume, for `tests/data_sets/test_distributed_checkpoint.py`."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import invfunc
from invfunc import distributed, streamed, tree
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, batches, linear, losses
from tests.strategies import Numbers

SIZES = [[2, 3, 0, 1, 2], [1, 4], []]
"""Of the batches of each process."""


class Lost(Exception):
    pass


def data() -> tuple[Any, list[Any]]:
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
        self.params, self.parts = data()
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
    told, params = Told(folder), data()[0]

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
