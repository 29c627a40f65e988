"""The samples of several processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from invfunc.callables import describe
from invfunc.compiled import opened
from invfunc.data_sets.product import StreamedProduct
from invfunc.data_sets.streamed import Streamed, not_by_batches
from invfunc.data_sets.tiled import Tiled
from invfunc.data_sets.visits import ProcessPart
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.products.product import Product
from invfunc.statistic import Statistic
from invfunc.transform import check_adds_up


def distributed(t: Any, group: Any = None, *, each: Literal["local", "gather"] = "local") -> Any:
    """Compute a statistic or a product for the samples of all processes, in each process.

        t(params, *(torch.cat(parts) for parts in zip(*batches)))      # batches: those of all processes, in their order

    Start the processes with torch (`torchrun --nproc-per-node=2 script.py`, and in the script
    `torch.distributed.init_process_group()`). All call it with the same parameters, which may be sharded (DTensors, as
    of `functional` of a module under `fully_shard`). Each computes the sums of its own samples; these are added up
    (variances by the formula of Chan, Golub and LeVeque), and all processes get the same result. Without an initialised
    group, it works for this process alone: a script gives the same numbers with torchrun and without.

    The scale is that of all samples, by the rules of `streamed`: `[N]` losses are summed, and a loss that is passed
    apart may be a sum or a mean over the samples.

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
        `(params, v, ...) -> result`, whose `.linearize` gives `v -> product`. In some processes the batch may have no
        samples, and loaders any number of batches. Aux is that of this process. The result cannot be differentiated. If
        t is streamed to `out`, each process writes the rows of its own samples, starting with row 0. Of `gram` with
        `others=`, the rows of the samples of this process `[n, M]`, or gathered `[N, M]`. If a parameter is a DTensor,
        results with its shape are DTensors with the same placements; other results (K-factors, norms, traces, those
        with a sample axis) are not sharded.

    Raises:
        ProcessError: another process has failed, or ended; with its message.
        ArgumentError: as `streamed`; `gram` without `others=`; parameters, statistic or vectors that are not the same
            in all processes; this process is not in the group; a checkpoint of another process, of another number of
            them, or of another call than those of the others; `out=` of `streamed` with `each="gather"`; DTensors that
            are a sum to come (`Partial`), or over other processes than those of the group.
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
    `estimate_diagonal` around products, with the same seed in each process. Drawn columns come from the first process's
    generator, and each sample draws by its position among those of all processes, as in `streamed`: they are the same
    for any number of processes. For that, a loader is read once more, to count its samples.

    Cost: that of t for the samples of this process. The sums of a result (without its sample axis, unless it is
    gathered) travel between pairs of processes, in `2 log2 P` steps for P of them; the memory of the result once more.
    The eigendecompositions of `ekfac` are divided among the processes. If a process fails, or Ctrl-C is pressed in it,
    the others end with its message after their last batch.

    With `checkpoint="file"` of `streamed`, each process has a file of its own, "file.0" the first. When one fails, the
    others write theirs, too. If processes are killed (torchrun ends all if one ends), the last `every` seconds are
    lost. All resume where they were, with the same number of processes and the same batches in each. No file is removed
    before all have the result. If one process has lost its file, or was still in the first sweep of `ekfac`, those in
    the second sweep begin it again.

    DTensors are gathered before the first batch: during the call each process holds all parameters, and the sums over
    its own samples. Its part of the result is sharded as the parameters are.

    Source: Chan, Golub and LeVeque (1979) for variances; torch.distributed.
    """
    if each not in ("local", "gather"):
        raise ArgumentError(f"distributed({describe(t)}, each={each!r}): it is one of 'local', 'gather'.")
    if isinstance(t, Streamed) and t.out is not None and each != "local":
        raise ArgumentError(
            f"distributed({t!r}, each={each!r}): out= takes the rows of this process's samples, so that those of all "
            "need not fit in memory. Leave each out, or leave out= away."
        )
    t, plans = opened(t)
    alone = isinstance(t, (Streamed, StreamedProduct)) and t.part.alone
    part = ProcessPart(None, getattr(t, "in_dims", 0), group=group)
    if alone:
        part = replace(t.part, group=group, alone=False)
    if isinstance(t, Product) or (alone and isinstance(t, StreamedProduct)):
        if each != "local":
            raise ArgumentError(f"distributed({t!r}, each={each!r}): a product has no sample axis. Leave each out.")
        return StreamedProduct(t, part, plans) if isinstance(t, Product) else replace(t, part=part)
    check_adds_up("distributed", t)
    pairs = isinstance(t, Tiled) or (isinstance(t, Statistic) and t.reduction.pairs and not t.members)
    if pairs:
        raise ArgumentError(
            f"distributed({t!r}): it needs all pairs of samples, which no process has. Bring the samples to one "
            "process, and compute streamed(gram(f)) there; or pass others=: then each process has its own rows."
        )
    if not isinstance(t, Statistic) and not (alone and isinstance(t, Streamed)):
        kind = type(t).__name__
        raise ArgumentTypeError(
            f"distributed({describe(t)}): it is of type {kind}, but has to be a statistic, or a product as `hvp(f)` "
            "is, or one of them `streamed`."
        )
    statistic = t if isinstance(t, Statistic) else t.t
    for m in statistic.members or (statistic,):
        if why := not_by_batches(m, alone=not statistic.members):
            raise ArgumentError(f"distributed({t!r}): {m.name} {why}.")
    gather = each == "gather"
    return Streamed(t, part, gather, plans=plans) if isinstance(t, Statistic) else replace(t, part=part, gather=gather)
