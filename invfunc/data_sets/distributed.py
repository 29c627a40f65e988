"""The samples of several processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims
from invfunc.callables import describe
from invfunc.compiled import Compiled, opened
from invfunc.data_sets.distributed_product import DistributedProduct
from invfunc.data_sets.part import Asked, Part
from invfunc.data_sets.streamed import Streamed, identity_of, not_by_batches, options_of, twice
from invfunc.data_sets.tiled import Tiled, TiledAcross
from invfunc.data_sets.visits import exchanged, work_of
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.layout import parts
from invfunc.plans.batches import PlansOfBatches
from invfunc.products.product import Product
from invfunc.products.streamed import StreamedProduct
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform, check_adds_up


@overload
def distributed(
    t: Statistic | Streamed | Tiled | Compiled, group: Any = None, *, each: Literal["local", "gather"] = "local"
) -> Distributed | TiledAcross: ...
@overload
def distributed(t: Product | StreamedProduct, group: Any = None) -> DistributedProduct: ...
def distributed(t: Any, group: Any = None, *, each: Literal["local", "gather"] = "local") -> Any:
    """Compute a statistic of the samples of all processes, or a product, in each of them.

        t(params, *(torch.cat(parts) for parts in zip(*batches)))      # batches: those of all processes, in their order

    Processes are started by torch's means (`torchrun --nproc-per-node=2 script.py`, and in the script
    `torch.distributed.init_process_group()`), and all call it with the same parameters, of which each may have a part
    (DTensors, as of `functional` of a module that `fully_shard` divides). Each reduces its own samples to
    what the statistic keeps of them; these are added up (variances by the formula of Chan, Golub and LeVeque), and all
    processes have the same result. Without an initialised group, the process is alone: a script gives the same numbers
    with torchrun and without.

    The scale is that of all samples, by the rules of `streamed`: `[N]` losses are summed, and a loss that is given
    apart may be a sum or a mean over the samples, which is found out.

    Args:
        t: a statistic of this library, also `chunked` (within each process), `reduced` (after the exchange) or of
            several `together` (which share it); or a product, as `hvp(f)`; or one of these `streamed`,
            `compiled`, or both.
        group: a process group of torch.distributed; all processes if it is None. That of a DeviceMesh with one
            dimension is `mesh.get_group()`.
        each: "local": results with a sample axis (`batch_grad`, the norms of `clipped_grad`) are those of the samples
            of this process; "gather": of all, in the order of the processes.

    Returns:
        A function `(params, *batch) -> result`, or `(params, loader) -> result` if t is streamed; of a product
        `(params, v, ...) -> result`, whose `.linearize` gives `v -> product`. The batch may have no samples in some
        processes, and loaders any number of batches. Aux is that of this process. The result cannot be differentiated.
        Where t is streamed to `out`, each process writes the rows of its own samples, whose places begin with 0.
        Of `gram`, the rows of the samples of this process beside those of all, `[n, N]`, or gathered `[N, N]`; with
        `others=` `[n, M]`; streamed, also of two loaders.
        Where a parameter is a DTensor, so is a result of its entries, in the same placements; other results (K-factors,
        norms, traces, those with a sample axis) are whole.

    Raises:
        ProcessError: another process has failed, or ended; with its message.
        ArgumentError: as `streamed`; parameters, statistic or vectors that are not the same in all processes; this
            process is not in the group; a checkpoint of another process, of another number of them, or of another call
            than those of the others; `out=` of `streamed` with `each="gather"`; DTensors that are a sum to come
            (`Partial`), or over other processes than those of the group.
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

    Composes with: `streamed`, `chunked`, `together`, `reduced` inside; `explain`; `linear_operator`, `estimate_trace`,
    `estimate_diagonal` around products, with the same seed in each process. What is drawn comes from the first
    process's generator, and each sample draws by its place among those of all processes, as `streamed` says: they are
    the same for any number of processes. A loader is gone through once more to count its samples then.

    Cost: that of t for the samples of this process; of what is exchanged, each number of the result once (of K-factors
    a triangle, of a variance twice, of a sample axis nothing unless it is gathered), in one collective for each of a
    few steps; the memory of the result once more. The eigendecompositions of `ekfac` are dealt out to the processes.
    For `gram` the batches travel: each in turn, to all processes, which hold its per-sample gradients while their own
    samples go by. Each evaluates all batches once and its own as often as there are batches; the tiles on both sides of
    the diagonal are computed, each by the process that has the row. With `others=` nothing travels.

    Where a process fails, or Ctrl-C is pressed in it, the others end with its message: they look between their batches,
    twice a second. Ctrl-C comes behind what all do together, so that the group can be used again.

    With `checkpoint="file"` of `streamed`, each process has a file of its own, "file.0" the first. When one fails, the
    others write theirs, too; of processes that are killed (torchrun ends all if one is), the last `every` seconds are
    lost. All go on from where each was, with the same number of processes and the same batches in each; those that were
    done wait for the others, and no file is removed before all have the result. In its second sweep, `ekfac` also keeps
    what the first one has brought in this process: all go back to its end if one of them has lost its file.

    DTensors are gathered one by one where an operation reads them, and let go behind it; of sums each process keeps its
    part. So none holds all parameters, or all sums like them; `notebooks/site/limits.md` says where that is not so.

    Source: Chan, Golub and LeVeque (1979) for variances; torch.distributed.
    """
    if each not in ("local", "gather"):
        raise ArgumentError(f"distributed({describe(t)}, each={each!r}): it is one of 'local', 'gather'.")
    if isinstance(t, Tiled) and t.out is not None:
        raise ArgumentError(
            f"distributed({t!r}): out= takes the rows of `gram` in one process only, and here each has its own. Leave "
            "out= away."
        )
    if isinstance(t, Streamed) and t.out is not None and each != "local":
        raise ArgumentError(
            f"distributed({t!r}, each={each!r}): out= takes the rows of this process's samples, so that those of all "
            "need not fit in memory. Leave each out, or leave out= away."
        )
    t, plans = opened(t)
    if isinstance(t, (Product, StreamedProduct)):
        if each != "local":
            raise ArgumentError(f"distributed({t!r}, each={each!r}): a product has no sample axis. Leave each out.")
        product, plans = (t.product, t.plans) if isinstance(t, StreamedProduct) else (t, plans)
        return DistributedProduct(product, _part_of(group, t, product.in_dims), plans)
    check_adds_up("distributed", t)
    if not isinstance(t, (Statistic, Streamed, Tiled)):
        kind = type(t).__name__
        raise ArgumentTypeError(
            f"distributed({describe(t)}): it is of type {kind}, but has to be a statistic, or a product as `hvp(f)` "
            "is, or one of them `streamed`."
        )
    statistic, out = (t.t, t.out) if isinstance(t, (Streamed, Tiled)) else (t, None)
    plans = t.plans if isinstance(t, Streamed) else plans
    for m in statistic.members or (statistic,):
        if why := not_by_batches(m, alone=not statistic.members):
            raise ArgumentError(f"distributed({t!r}): {m.name} {why}.")
    part, gather = _part_of(group, t, statistic.in_dims), each == "gather"
    if statistic.reduction.pairs and not statistic.members:
        if plans is not None:
            raise ArgumentError(f"distributed({plans!r}): of tiles no plan is made. Leave `compiled` away.")
        return TiledAcross(statistic, part, gather, options_of(statistic))
    return Distributed(statistic, part, gather, out, plans)


def _part_of(group: Any, t: Any, in_dims: InDims) -> Part:
    if isinstance(t, Tiled):
        return Part(group, t.feed, in_dims)
    if isinstance(t, (Streamed, StreamedProduct)):
        return Part(group, t.feed, in_dims, t.checkpoint)
    return Part(group, None, in_dims)


@dataclass(frozen=True, repr=False)
class Distributed(Transform):
    """A function `(params, *batch) -> result`, of the samples of all processes."""

    t: Statistic
    part: Part
    gather: bool = False
    out: Any = None
    plans: PlansOfBatches | None = None
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.plans or self.t)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def several(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.several

    @property
    def owned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.owned and self.out is None

    def names(self, count: int) -> Any:
        return self.part.names(["params"], self.t.names(count), count)

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How this process would compute it, which does not wait for the others, and what it would give to them."""
        processes, given = self.part.alone(args[0]), args
        if self.part.feed is None:
            found = self.t.explanation(args, kwargs, names)
        else:
            found, given = Streamed(self.t, self.part.feed).looked_at(args, kwargs)
        size = 0 if self.out is not None else exchanged(self.t, given, kwargs, self.gather)
        return replace(found, name=repr(self), processes=processes.size, exchanged=size)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        with torch.no_grad(), self.part.call():
            work = work_of(self.t, args[0], kwargs, self.out, self.plans)
            identity = partial(identity_of, self.t, args[0], kwargs)
            alike = {"the statistic": options_of(self.t), "each": "gather" if self.gather else "local"}
            keys = [*work.keys.values()]
            asked = Asked(args, 1, names, alike, keys, identity, twice(self.t), work.check, self.plans is not None)
            begun = self.part.begun(asked)
            work.at(begun.params, begun.rounds, parts=self.out is None and not begun.course.keeps)
            with begun.course as course:
                work.draw_by(course.record.keys, begun.before, begun.counted)
                begun.told("checkpoint", partial(course.begin, work))
                work.computed(begun.through, begun.processes, self.gather)
                results, aux = begun.told("result", work.results)
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
            kind = getattr(type(result), "_make", tuple)  # an Estimate is a tuple with names
            return kind(found) if t.reduction.several else found[0]

        return tuple(map(of, self.t.members, results)) if self.t.members else of(self.t, results)
