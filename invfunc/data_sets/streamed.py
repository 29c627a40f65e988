"""A data set in the memory of one batch: statistics and products of a loader, and of the samples of all processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.callables import describe
from invfunc.compiled import opened
from invfunc.data_sets.tiled import Tiled
from invfunc.data_sets.visits import PARAMETERS, Course, ProcessPart, RowByRow, Rows, VisitWork, identity_of
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Checkpoint, Feed, first
from invfunc.evaluation.processes import described, parts
from invfunc.plan import Explanation
from invfunc.plans.batches import PlansOfBatches
from invfunc.products.product import Linearised, OfAll, Product, WithVector, space_of
from invfunc.statistic import Statistic
from invfunc.transform import Transform, check_adds_up


def streamed(
    t: Any,
    *,
    device: Any = None,
    progress: bool = False,
    checkpoint: Any = None,
    every: float = 60,
    out: Any = None,
    reduction: Literal["sum"] | None = None,
) -> Any:
    """Compute a statistic or a product for all batches of a loader, in the memory of one batch.

        t(params, *(torch.cat(parts) for parts in zip(*loader)))       # of a product, t(params, v, ...)

    Sums are added up over the batches (variances by the formula of Chan, Golub and LeVeque); results with a sample axis
    are concatenated in the order of the loader. `ekfac` reads the loader twice, in any order: first for the basis, then
    for the eigenvalues. `kfoc` reads it once for each sweep. Products are added up, so
    `linear_operator(streamed(ggnvp(f, loss)))(params, loader)` is the matrix of a data set.

    The scale is that of the whole data set. `[N]` losses are summed; they must not have a factor that depends on the
    batch (half of the first batch is evaluated alone, to check that). A loss that is passed apart, as in `diag_ggn(f,
    loss)`, may also be a sum or a mean: to find out which, it is evaluated on the outputs of each batch joined with
    those of the first. The batches of a mean are weighted by their numbers of samples.

    Args:
        t: a statistic of this library, also `chunked` (within each batch), `reduced` (after the last one) or of several
            `together` (in one sweep); or a product, as `hvp(f)`; or one of these `compiled` (each batch by its plan).
        device: the device to which batches are moved; by default that of the first parameter. From pinned memory
            (`DataLoader(..., pin_memory=True)`) they are copied to a GPU while it computes.
        progress: show a bar, on a terminal or in a notebook, with the number of batches, the samples per second and, if
            the loader has a length, the remaining time.
        checkpoint: the name of a file with the state of the call, written every few seconds (`every`), and when an
            error or Ctrl-C ends the call. The next call with the same arguments, also in another process, resumes from
            it. The loader has to give the same batches again, in the same order, from the first one on; those that are
            done are compared by checksums and skipped. The file is removed when the result is complete. A product has a
            checkpoint for one vector, not for a linearisation; `gram` has none.
        every: the seconds between two writes of that file; 0 writes it after each batch.
        out: takes a result with a sample axis (`batch_grad`, `sqrt_ggn`) batch by batch, so that it need not fit in
            memory. Either a tree like the result, of tensors with room for all samples; they may be mapped to a file
            (`torch.from_file`, `torch.from_numpy(memmap)`) or be on another device. Or a function `out(start, rows)`,
            called with the number of samples before the batch, and the result of the batch. For `together`, a tuple.
            For `gram`, tensors of its size, or a function that gets complete rows.

        reduction: "sum" says that a loss which is one number is the sum over the samples of its batch; then it need not
            be passed apart. This is not checked.

    Returns:
        A function `(params, loader) -> result`, of a product `(params, v, loader) -> result`, whose `.linearize(params,
        loader)` gives `v -> product`. A loader is anything that gives batches: a `DataLoader`, a list, a generator, or
        a function without arguments that returns one of these. A batch is a tuple or list of the arguments after the
        parameters; a tensor or a mapping is one argument. Batches may have any sizes; those without samples are
        skipped. Further keywords are constants. For `gram(f)` it is `(params, loader) -> [N, N]`, or `(params, loader,
        other_loader) -> [N, M]` with the samples of another loader (`[N, *out, M, *out]` for a model function); with
        `others=`, as for other statistics. The result cannot be differentiated; aux is a list with that of each batch.
        With `out`, the result is the written part of out, or None if out is a function.

    Raises:
        ArgumentTypeError: t is neither statistic nor product; the loader gives no batches, or gives them only once (a
            generator) but is read several times (`ekfac`, `gram`, a linearisation).
        SampleAxisError: f mixes samples, or has a factor that depends on their number (not checked for outputs, if the
            loss is passed apart).
        ArgumentError: there are no samples, or another number than the first time, or for `gram` other samples (a
            loader that shuffles); a statistic that does not add up over batches (`kfra`), `gram` together with another,
            or `samples=`; a scalar loss that is not passed apart (without `reduction=`), or that is neither a mean nor
            a sum (`ignore_index` and class weights divide by weights of the batch), or a mean whose samples have other
            shapes in other batches; parameters that are written in place meanwhile; an f that writes into its batch,
            or, for `gram`, that gives samples other results in another batch; a device without a parameter; a
            checkpoint of another call, of `gram`, or of a linearisation; within torch.func's transforms.
        RandomnessError: `gram` of several batches, of an f that draws.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda params, x: x @ params
        >>> whole = invfunc.streamed(invfunc.diag_ggn(f, torch.nn.functional.mse_loss))
        >>> loader = [(torch.ones(3, 2), torch.zeros(3)), (torch.zeros(1, 2), torch.zeros(1))]
        >>> whole(torch.ones(2), loader)
        tensor([1.5000, 1.5000])
        >>> invfunc.streamed(invfunc.ggnvp(f, torch.nn.functional.mse_loss))(torch.ones(2), torch.ones(2), loader)
        tensor([3., 3.])

    Composes with: `chunked`, `together`, `reduced`, `compiled` inside; `explain` around statistics; `linear_operator`,
    `estimate_trace`, `estimate_diagonal` around products, which read the loader once for each vector. `mc_samples=`
    draws other numbers than a call without `streamed`: the generator gives a key, and each sample draws from a
    generator of its own, made of the key and of its position in the data set. So the numbers do not depend on the
    batches, and are the same for all vectors of a linearisation; `sample=` gets the samples one by one.

    Cost: that of t for each batch; if a loss is one number, four gradients of it in the outputs; with drawn columns, 5
    microseconds for each sample. A second sweep runs f again, with new random numbers if it draws. Memory is that of
    one batch, the result (with a sample axis it is as long as the data set, unless it goes to `out`) and the outputs of
    the first batch.

    A checkpoint is replaced as a whole, so a process that is killed at any moment leaves a complete one (and perhaps a
    `.part` of the next), which `torch.load` reads with its default settings. It identifies f and the loss by their
    names only. Random draws continue as before, whatever generator the next call has. All batches, and once the
    parameters, are copied to the CPU for a checksum; a result with a sample axis is written in full each time. `ekfac`
    stores the eigenvectors, which may have other signs on another machine. Use a file for one call at a time.

    `gram` computes a tile for each pair of batches, k (k+1)/2 of them for k batches, as the matrix is symmetric. For
    each batch, it keeps the factors of its per-sample gradients in memory, and evaluates each later batch again. A tile
    takes the memory of two batches, and the result; `[N, P]` is never formed. The loader is read once for each batch,
    and once before, to count; checksums check that the batches are the same each time. If out is a function, which gets
    complete rows, all k^2 tiles are computed. With two loaders, each batch of the second is kept in memory while the
    first is read; with `others=`, the per-sample gradients of those samples are kept. The first two batches are also
    evaluated joined, to find an f that gives samples other results there.

    Source: Chan, Golub and LeVeque (1979) for variances.
    """
    feed = Feed.of(device, f"streamed({describe(t)})" if progress else "")
    file = Checkpoint.of(checkpoint, every)
    if reduction not in (None, "sum"):
        raise ArgumentError(
            f"streamed({describe(t)}, reduction={reduction!r}): reduction is 'sum' or left out. For a mean, return the "
            "sum over the samples of the batch, and divide the result."
        )
    t, plans = opened(t)
    part = ProcessPart(feed, getattr(t, "in_dims", 0), file, reduction=reduction, alone=True)
    if isinstance(t, Product):
        if out is not None:
            raise ArgumentError(f"streamed({t!r}, out=...): a product has no sample axis. Leave out away.")
        return StreamedProduct(t, part, plans)
    check_adds_up("streamed", t)
    if not isinstance(t, Statistic):
        kind = type(t).__name__
        raise ArgumentTypeError(
            f"streamed({describe(t)}): it is of type {kind}, but has to be a statistic, or a product as `hvp(f)` is."
        )
    for m in t.members or (t,):
        if why := not_by_batches(m, alone=not t.members):
            raise ArgumentError(f"streamed({t!r}): {m.name} {why}.")
    if file is not None and t.reduction.pairs:
        raise ArgumentError(f"streamed({t!r}, checkpoint=...): a matrix of all pairs has none. Leave it out.")
    if plans is not None and t.reduction.pairs:
        raise ArgumentError(f"streamed({plans!r}): a matrix of all pairs has no plan. Leave `compiled` out.")
    if out is not None and (why := _no_rows(t, file)):
        raise ArgumentError(f"streamed({t!r}, out=...): {why}.")
    if t.reduction.pairs and not t.members:
        if reduction is not None:
            raise ArgumentError(f"streamed({t!r}, reduction={reduction!r}): it takes the [N] losses of the samples.")
        return Tiled(t, feed, out)
    return Streamed(t, part, plans, out=out)


def not_by_batches(t: Statistic, alone: bool) -> str:
    """The reason why a statistic cannot be reduced batch by batch, alone or together with others; empty if it can."""
    if t.samples is not None:
        return "has samples=, which are positions in a batch: let the loader give those samples alone"
    if t.argnums not in (0, (0,)):
        return f"has argnums={t.argnums}, but the parameters have to come first, and alone"
    if t.reduction.pairs:
        return "" if alone else "is of pairs of samples, so that it cannot come together with others: stream it alone"
    if "samples" not in t.reduction.axes and not t.reduction.each:
        return "needs all samples at once, and does not add up over batches"
    return ""


def _no_rows(t: Statistic, file: Checkpoint | None) -> str:
    """The reason why its result cannot be written batch by batch; empty if it can."""
    if file is not None:
        return "the rows of out= are not in a checkpoint, and are lost if they are in memory. Leave one of the two out"
    if t.options.reduce is not None:
        return "the results of `reduced` come after the last batch. Pass a function (start, rows) as out"
    none = [m.name for m in t.members or (t,) if len(m.reduction.each) != 1 and not m.reduction.pairs]
    return f"{none[0]} has no result with a sample axis. Leave out away" if none else ""


@dataclass(frozen=True, repr=False)
class OverBatches(Transform):
    """A statistic or a product of all batches of a loader, or of one batch of each process."""

    t: Any
    part: ProcessPart
    plans: PlansOfBatches | None = None
    """Plans by which batches are evaluated, if it is `compiled`."""
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.plans or self.t)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux


@dataclass(frozen=True, repr=False)
class Streamed(OverBatches):
    """A function `(params, loader) -> result`, of all batches together, or `(params, *batch)` of all processes."""

    gather: bool = False
    """Tells whether results with a sample axis are those of all processes."""
    out: Any = None

    @property
    def several(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.several

    @property
    def owned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.owned and self.out is None

    def names(self, count: int) -> Any:
        return self.part.names(["params"], self.t.names(count), count)

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        t, said = self.t, {"the statistic": options_of(self.t)}
        rows = None if self.out is None else Rows(self.out, [m.quantity for m in t.members or (t,)], bool(t.members))
        course = self.part.begun(
            t,
            args,
            PARAMETERS,
            names,
            alike={**said, "each": "gather" if self.gather else "local"},
            identity=partial(identity_of, said, kwargs, {"params": args[0]}),
            again=twice(t),
            check=None if rows is None else rows.check,
        )
        given = t, kwargs, course, self.plans, self.part.reduction
        work = VisitWork(*given) if rows is None else RowByRow(rows, *given)
        with course:
            results, aux = work.done(self.gather)
            results = self._laid_out(results, args[0])
        return results, self.part.aux(aux)

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """Explains how it would be computed: what is done with the first batch, and how often with how many; of several
        processes how this one does, which does not wait for the others."""
        if not self.part.alone and any(map(sharded, tree.tensors(args[:1]))):
            raise ArgumentError(
                "the parameters are DTensors, and explain asks no other process for its shards. Pass p.full_tensor() "
                "of each, which a call computes with."
            )
        feed, given, batches = self.part.feed, args, {}
        if feed is not None:
            loader = self.part.loader(args, PARAMETERS, "to look at the first one takes it away")
            given, count = first(loader, args[0], self.t.in_dims, feed)
            batches = {"sweeps": self.t.sweeps, "batches": count}
            names = self.t.names(len(given))
        found = replace(self.t.explanation(given, kwargs, names), name=repr(self), **batches)
        if not self.part.alone:
            return replace(found, processes=self.part.processes().size)
        if self.plans is None:
            return found
        with torch.no_grad():
            plan, code = self.plans.explained(self.t, given, kwargs)
        return replace(found, plan=plan, code=code)

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


def options_of(t: Any) -> str:
    """Description that tells a statistic or a product from others, in every process."""
    known: list[Any] = [t.in_dims, t.out_dims, t.has_aux, *([t.degree] if isinstance(t, Product) else [])]
    if isinstance(t, Statistic):
        known += [t.options.dense, t.others]
    for m in getattr(t, "members", ()) or (t,):
        d, reduction = m.drawing, getattr(m, "reduction", None)
        known += [reduction, d and (d.count, d.sample, d.peel and d.peel.columns)]
    return f"{described(t)} {described(known)}"


def twice(t: Statistic) -> str:
    """The reason why the loader has to be gone through more than once; empty if it has not."""
    times = "twice" if t.sweeps == 2 else f"{t.sweeps} times"
    return "" if t.sweeps == 1 else f"{t.name} looks at all samples {times}"


@dataclass(frozen=True, repr=False)
class StreamedProduct(OverBatches):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over batches, and over processes."""

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.vector

    @property
    def lead(self) -> int:
        return self.t.lead

    def names(self, count: int) -> Any:
        return self.part.names(["params", self.vector], self.t.names(count), count)

    def names_of_f(self, count: int) -> Any:
        """Names of so many arguments that are all but the vector."""
        return self.part.names(["params"], self.t.names_of_f(count), count)

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, loader) -> (v -> product)`, of the same draws for all v.

        The loader is gone through for each v. With `has_aux`, the pair of that function and of an empty list, as there
        was no batch yet. Of several processes, all have to call it, and what it returns, with the same vectors in the
        same order.
        """
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        said = options_of(self.t)
        identity = partial(identity_of, {"the product": said}, kwargs, {"params": args[0], self.vector: args[1]})
        course, space = self._begun(args, (*PARAMETERS, self.vector), names, identity)
        leaves = space.leaves(args[1], self.vector, self.lead)
        with course:
            found, aux = self._along(course, kwargs, leaves, self.lead).done()
            found = space.tree(parts(tree.tensors((found,)), tree.tensors(args[:1]), self.lead))
        return found, self.part.aux(aux)

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if self.part.file is not None:
            raise ArgumentError(
                f"checkpoint={str(self.part.file.path)!r} belongs to one product, but a linearisation gives many: a "
                "call that starts again starts with its first vector, which may not be that of the file. Leave "
                "checkpoint out, or compute each product in a call with a file of its own: "
                "streamed(t, checkpoint=file)(params, v, loader)."
            )
        course, space = self._begun(args, PARAMETERS, names, again="it is gone through for every vector")
        shown, known = f"{self!r}.linearize({', '.join(names)})", list[int]()

        def at(vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
            work = self._along(course, kwargs, vectors, lead, *known)
            found, _ = work.done()
            known[:] = [work.n]
            return parts(tree.tensors((found,)), tree.tensors(args[:1]), lead)

        return Linearised(shown, at, space, space, self.vector, self.lead, (args, kwargs)), []

    def _begun(
        self,
        args: tuple,
        own: tuple[str, ...],
        names: Any,
        identity: Callable[[], dict[str, str]] = dict,
        again: str = "",
    ) -> tuple[Course, OfAll]:
        """Facts before the first batch is seen, and the space of the vectors."""
        alike = {"the product": f"{self.t!r} {self.t.degree}"}
        course = self.part.begun(WithVector(self.t, [], 0), args, own, names, alike, identity, again)
        return course, OfAll(**vars(space_of(args[:1], names)), processes=course.processes)

    def _along(
        self, course: Course, kwargs: dict[str, Any], vectors: list[torch.Tensor], lead: int, *known: int
    ) -> VisitWork:
        """Work that adds up the products of all batches with a vector, or with several."""
        t = WithVector(self.t, vectors, lead)
        return VisitWork(t, kwargs, course, self.plans, self.part.reduction, *known)


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
    return Streamed(t, part, plans, gather) if isinstance(t, Statistic) else replace(t, part=part, gather=gather)
