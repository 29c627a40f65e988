"""The samples of several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, overload

import torch

from invfunc import tree
from invfunc._functorch import transforming
from invfunc._sharded import sharded
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.across import dealt, share
from invfunc.evaluation.batches import Batches, Feed, check_loader, samples_of, size_of, swept
from invfunc.evaluation.layout import parts, whole
from invfunc.evaluation.processes import Processes, bits, same
from invfunc.products.along import OfAll, space_of
from invfunc.products.product import Linearised, Product
from invfunc.products.streamed import StreamedProduct, Sums, key_of_drawn
from invfunc.recording.problem import InDims
from invfunc.statistic import Statistic
from invfunc.streamed import Streamed, not_by_batches, options_of, twice
from invfunc.transform import Transform
from invfunc.visits import Work


@overload
def distributed(t: Statistic | Streamed, group: Any = None, *, each: str = "local") -> Distributed: ...
@overload
def distributed(t: Product | StreamedProduct, group: Any = None) -> DistributedProduct: ...
def distributed(t: Any, group: Any = None, *, each: Literal["local", "gather"] | str = "local") -> Any:
    """Compute a statistic of the samples of all processes, or a product, in each of them.

        t(params, *(torch.cat(parts) for parts in zip(*batches)))      # batches: those of all processes, in their order

    Processes are started by torch's means (`torchrun --nproc-per-node=2 script.py`, and in the script
    `torch.distributed.init_process_group()`), and all call it with the same parameters. Each reduces its own samples to
    what the statistic keeps of them; these are added up (variances by the formula of Chan, Golub and LeVeque), and all
    processes have the same result. Without an initialised group, the process is alone: a script gives the same numbers
    with torchrun and without.

    The scale is that of all samples, by the rules of `streamed`: `[N]` losses are summed, and a loss that is given
    apart may be a sum or a mean over the samples, which is found out.

    Args:
        t: a statistic of this library, also `chunked` (within each process), `reduced` (after the exchange) or of
            several `together` (which share it); or a product, as `hvp(f)`; or one of these `streamed`.
        group: a process group of torch.distributed; all processes if it is None. That of a DeviceMesh with one
            dimension is `mesh.get_group()`.
        each: "local": results with a sample axis (`batch_grad`, the norms of `clipped_grad`) are those of the samples
            of this process; "gather": of all, in the order of the processes.

    Returns:
        A function `(params, *batch) -> result`, or `(params, loader) -> result` if t is streamed; of a product
        `(params, v, ...) -> result`, whose `.linearize` gives `v -> product`. The batch may have no samples in some
        processes, and loaders any number of batches. Aux is that of this process. The result cannot be differentiated.

    Raises:
        ProcessError: another process has failed, or ended; with its message.
        ArgumentError: as `streamed`; parameters, statistic or vectors that are not the same in all processes; this
            process is not in the group; `checkpoint=` or `out=` of `streamed`.
        ArgumentTypeError: t is neither statistic nor product; the group is of another type.

    Example:
        >>> import torch, invfunc
        >>> f = lambda params, x: (x @ params).square()
        >>> invfunc.distributed(invfunc.variance(f))(torch.ones(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([1., 4.])

        In a script, which runs on one process or on many:

            torch.distributed.init_process_group()  # started by torchrun --nproc-per-node=2 script.py
            sampler = torch.utils.data.DistributedSampler(data, shuffle=False)  # repeats some: see below
            loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
            factors = invfunc.distributed(invfunc.streamed(invfunc.kfac(f, loss, generator=g)))(params, loader)

        A DistributedSampler repeats samples until all processes have as many, which count twice then, or drops some
        (`drop_last=True`). `torch.utils.data.Subset(data, range(rank, len(data), processes))` does neither.

    Composes with: `streamed`, `chunked`, `together`, `reduced` inside; `linear_operator`, `estimate_trace`,
    `estimate_diagonal` around products, with the same seed in each process. Drawn columns are those of the first
    process's generator, and each sample draws by its place among those of all processes, as `streamed` says: they are
    the same for any number of processes. A loader is gone through once more to count its samples then.

    Cost: that of t for the samples of this process; of what is exchanged, each number of the result once (of K-factors
    a triangle, of a variance twice, of a sample axis nothing unless it is gathered), in one collective for each of a
    few steps; the memory of the result once more. The eigendecompositions of `ekfac` are dealt out to the processes.

    Source: Chan, Golub and LeVeque (1979) for variances; torch.distributed.
    """
    if each not in ("local", "gather"):
        raise ArgumentError(f"distributed({describe(t)}, each={each!r}): it is one of 'local', 'gather'.")
    if isinstance(t, Streamed) and (t.checkpoint is not None or t.out is not None):
        option = "out" if t.checkpoint is None else "checkpoint"
        raise ArgumentError(
            f"distributed({t!r}): {option}= is of one process, which alone does not know the result. Leave it out."
        )
    if isinstance(t, (Product, StreamedProduct)):
        if each != "local":
            raise ArgumentError(f"distributed({t!r}, each={each!r}): a product has no sample axis. Leave each out.")
        product, feed = (t.product, t.feed) if isinstance(t, StreamedProduct) else (t, None)
        return DistributedProduct(product, _Part(group, feed, product.in_dims))
    if not isinstance(t, (Statistic, Streamed)):
        kind = type(t).__name__
        raise ArgumentTypeError(
            f"distributed({describe(t)}): it is of type {kind}, but has to be a statistic, or a product as `hvp(f)` "
            "is, or one of them `streamed`."
        )
    statistic, feed = (t.t, t.feed) if isinstance(t, Streamed) else (t, None)
    for m in statistic.members or (statistic,):
        if why := not_by_batches(m):
            raise ArgumentError(f"distributed({t!r}): {m.name} {why}.")
    return Distributed(statistic, _Part(group, feed, statistic.in_dims), each == "gather")


@dataclass(frozen=True)
class _Part:
    """The samples of this process, among those of a group."""

    group: Any
    feed: Feed | None
    """How the batches of a loader come; None if the arguments are one batch."""
    in_dims: InDims

    def shown(self, t: Any) -> str:
        return f"distributed({t!r})" if self.feed is None else f"distributed(streamed({t!r}))"

    def names(self, first: Sequence[str], own: Any, count: int) -> Any:
        """What so many arguments are called, of which a loader comes behind the first ones."""
        return own if self.feed is None else [*first, "loader"][:count]

    def begun(
        self, args: tuple, own: int, names: Any, identity: dict[str, str], keys: list[int], again: str = ""
    ) -> _Begun:
        """What is known of all processes before the first batch is seen.

        `own` arguments are not of the batch, the first of them the parameters, which have to be the same as what
        `identity` says. `keys` are those of drawn columns; `again` says why batches are seen twice, if they are.
        """
        processes = Processes.of(self.group)

        def looked() -> tuple[Callable[[Any], Batches], tuple[dict[str, str], list[int], int]]:
            if transforming():
                raise ArgumentError(
                    "within a transform of torch.func, as it is not differentiated. Apply the transform to the "
                    "function, or to what is computed of each batch."
                )
            space_of(args, names)
            at, count = self._of_batch(args, own) if self.feed is None else self._of_loader(args, own, keys, again)
            return at, ({**identity, **bits("params", args[0])}, keys, count)

        at, each = processes.told("arguments", looked)
        same([said for said, _, _ in each])
        params = whole(processes, "params", args[0])
        return _Begun(processes, params, at(params), each[0][1], sum(n for _, _, n in each[: processes.rank]))

    def _of_batch(self, args: tuple, own: int) -> tuple[Callable[[Any], Batches], int]:
        n = size_of((args[0], *args[own:]), self.in_dims)
        return lambda params: lambda visit: visit((params, *args[own:]), 0) if n else 0, n

    def _of_loader(self, args: tuple, own: int, keys: list[int], again: str) -> tuple[Callable[[Any], Batches], int]:
        if len(args) != own + 1:
            wanted = " and ".join(["the parameters", "a vector"][:own])
            raise ArgumentTypeError(f"it takes {wanted} and a loader, and got {len(args)} positional arguments.")
        drawn = "each sample draws by how many came before, so that they are counted first" if keys else ""
        check_loader(args[own], sweeps=again or drawn)
        feed = self.feed or Feed()
        count = samples_of(args[own], self.in_dims) if keys else 0
        return lambda params: lambda visit: swept(args[own], params, self.in_dims, visit, feed), count


@dataclass(frozen=True)
class _Begun:
    """What is known of all processes before the first batch is seen."""

    processes: Processes
    params: Any
    """As a whole."""
    batches: Batches
    """Those of this one."""
    keys: list[int]
    """Of drawn columns: those of the first process."""
    before: int
    """How many samples the processes before have, where columns are drawn."""


@dataclass(frozen=True, repr=False)
class Distributed(Transform):
    """A function `(params, *batch) -> result`, of the samples of all processes."""

    t: Statistic
    part: _Part
    gather: bool
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.t)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def several(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.several

    @property
    def owned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.owned

    def names(self, count: int) -> Any:
        return self.part.names(["params"], self.t.names(count), count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            work = Work(self.t, kwargs)
            identity, keys = {"the statistic": options_of(self.t)}, [*work.keys.values()]
            begun = self.part.begun(args, 1, names, identity, keys, twice(self.t))
            work.keys = dict(zip(work.keys, begun.keys, strict=True))
            for k in range(self.t.sweeps):
                if k:
                    work.again(partial(dealt, begun.processes))
                run = partial(begun.batches, lambda args, n: work.visit(args, begun.before + n))
                share(work.sweep, run, begun.processes, self.gather, lambda: work.without_samples(begun.params))
            results, aux = work.results()
            results = self._laid_out(results, args[0])
            return results, aux if self.part.feed is not None else aux[0] if aux else None

    def _laid_out(self, results: Any, params: Any) -> Any:
        """The results, of which trees that are like the parameters are laid out as these are."""
        leaves = tree.tensors((params,))
        if self.t.options.reduce is not None or not any(map(sharded, leaves)):
            return results

        def of(t: Statistic, result: Any) -> Any:
            trees, several = t.reduction.trees, result if t.reduction.several else (result,)
            flat = [tree.flatten(x, none_is_leaf=False) for x in several[:trees]]
            laid = [tree.unflatten(parts(own, leaves), structure) for own, structure in flat]
            found = (*laid, *several[trees:])
            return found if t.reduction.several else found[0]

        return tuple(map(of, self.t.members, results)) if self.t.members else of(self.t, results)


@dataclass(frozen=True, repr=False)
class DistributedProduct(Transform):
    """A function `(params, v, *batch) -> tree like params`, the sum of a product over all processes."""

    product: Product
    part: _Part
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.product)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.has_aux

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.vector

    @property
    def lead(self) -> int:
        return self.product.lead

    def names(self, count: int) -> Any:
        return self.part.names(["params", self.vector], self.product.names(count), count)

    def names_of_f(self, count: int) -> Any:
        """What so many arguments are called that are all but the vector."""
        return self.part.names(["params"], self.product.names_of_f(count), count)

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, *batch) -> (v -> product)`, of the same draws for all v.

        All processes have to call it, and what it returns, with the same vectors in the same order.
        """
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        sums, space = self._sums(args, 2, kwargs, names)
        found = self._at(sums, args[0], space.leaves(args[1], self.vector, self.lead), self.lead)
        return space.tree(found), self._aux(sums)

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        sums, space = self._sums(args, 1, kwargs, names, "it is gone through for every vector")
        shown = f"{self!r}.linearize({', '.join(names)})"
        at = partial(self._at, sums, args[0])
        return Linearised(shown, at, space, space, self.vector, self.lead, (args, kwargs)), []

    def _at(self, sums: Sums, params: Any, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        """The product with a vector, laid out as the parameters are."""
        return parts(sums(vectors, lead), tree.tensors((params,)), lead)

    def _sums(self, args: tuple, own: int, kwargs: dict[str, Any], names: Any, again: str = "") -> tuple[Sums, OfAll]:
        """The linear map, and the space of its vectors."""
        key = key_of_drawn(self.product)
        identity, keys = {"the product": f"{self.product!r} {self.product.degree}"}, [] if key is None else [key]
        begun = self.part.begun(args, own, names, identity, keys, again)
        key = begun.keys[0] if keys else None
        space = OfAll(**vars(space_of(args[:1], names)), processes=begun.processes)
        return Sums(self.product, kwargs, begun.batches, key, begun.processes, begun.before), space

    def _aux(self, sums: Sums) -> Any:
        return sums.aux if self.part.feed is not None else sums.aux[0] if sums.aux else None
