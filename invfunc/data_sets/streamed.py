"""A data set in the memory of one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.callables import describe
from invfunc.compiled import opened
from invfunc.data_sets.product import StreamedProduct
from invfunc.data_sets.tiled import Tiled
from invfunc.data_sets.visits import PARAMETERS, ProcessPart, RowByRow, Rows, VisitWork, identity_of
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Feed, first
from invfunc.evaluation.checkpoint import Checkpoint
from invfunc.evaluation.processes import described, parts
from invfunc.plans.batches import PlansOfBatches
from invfunc.products.product import Product
from invfunc.report import Explanation
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
    """Compute a statistic of a data set that comes batch by batch, or a product, in the memory of one batch.

        t(params, *(torch.cat(parts) for parts in zip(*loader)))       # of a product, t(params, v, ...)

    Each batch is reduced to what the statistic keeps of it; that is added to what was kept before (variances by the
    formula of Chan, Golub and LeVeque, results with a sample axis one behind the other, in the order of the loader).
    `ekfac` goes through the loader twice, in any order: the basis of all samples comes before the eigenvalues in it;
    `kfoc` goes through it once for each of its sweeps. Products are added, so that
    `linear_operator(streamed(ggnvp(f, loss)))(params, loader)` is the matrix of a data set.

    The scale is that of the whole data set. `[N]` losses are summed: they are of one sample each, without a factor that
    depends on the batch (half of the first one is evaluated alone). A loss that is given apart, as in
    `diag_ggn(f, loss)`, may be a sum or a mean, too: which it is, is found out by evaluating it on the outputs of each
    batch joined with those of the first, and the batches of a mean count as many times as they have samples.

    Args:
        t: a statistic of this library, also `chunked` (within each batch), `reduced` (after the last one) or of several
            `together` (in one sweep); or a product, as `hvp(f)`; or one of these `compiled` (each batch by its plan).
        device: where batches are moved; that of the first parameter, unless parameters on several devices leave a
            choice. From pinned memory (`DataLoader(..., pin_memory=True)`) a GPU takes them while it computes.
        progress: whether a bar shows the batches that are done, the samples per second and, where the loader has a
            length, the time that is left. It shows on a terminal and in a notebook only.
        checkpoint: the name of a file that keeps what the batches that are done have brought, every few seconds
            (`every`) and when an error or Ctrl-C ends the call. A next call with the same arguments, also of another
            process, goes on from there, in the sweep that it was in: the loader gives its batches again from the first
            one on, and those that are done are compared with what they were, and left out. A loader that is gone
            through twice has to give the same batches in the same order then. When the result is there, the file is
            removed. That of a product is of one vector, and not of a linearisation; `gram` has none.
        every: the seconds after which that file is written again, 0 for after each batch.
        out: where a result with a sample axis (`batch_grad`, `sqrt_ggn`) goes batch by batch, so that it need not fit
            in memory: a tree like the result of tensors with room for all samples, which may be mapped to a file
            (`torch.from_file`, `torch.from_numpy(memmap)`) and on another device; or a function `out(start, rows)` of
            the number of samples before, and the result of a batch. Of several `together`, a tuple. Of `gram` tensors
            of just its size, or a function that is told the rows of a batch once they are whole.

        reduction: "sum" says that a loss which is one number is the sum over the samples of its batch, so that it need
            not be given apart; the caller's word is taken for it.

    Returns:
        A function `(params, loader) -> result`, of a product `(params, v, loader) -> result`, whose
        `.linearize(params, loader)` gives `v -> product`. A loader is anything that gives batches: a `DataLoader`, a
        list, a generator, or a function without arguments that returns one of these. A batch is a tuple or list of the
        arguments behind the parameters; a tensor or a mapping is one argument: f gets the mapping. Batches of any size
        are moved to the parameters, those without samples are left out. Further keywords are constants.
        Of `gram(f)`, `(params, loader) -> [N, N]`, or with the samples of another loader behind it `(params, loader,
        other_loader) -> [N, M]` (`[N, *out, M, *out]` of a model function); with `others=`, as of other statistics.
        The result cannot be differentiated; aux is a list of that of each batch. With `out`, the result is the part of
        it that was written, or None if it is a function.

    Raises:
        ArgumentTypeError: t is neither statistic nor product, the loader gives no batches, or it gives them only once
            (a generator) but is needed twice (`ekfac`), for each tile (`gram`) or for each vector (a linearisation).
        SampleAxisError: f mixes samples, or gives them a factor that depends on how many there are (outputs of a
            statistic whose loss is given apart are not looked at).
        ArgumentError: there are no samples, or more or fewer than the first time, or for `gram` other ones (a loader
            that shuffles); a statistic that does not add up over batches (`kfra`), `gram` together with another, or
            `samples=`; a scalar loss that is not given apart (without `reduction=`), or that is neither a mean nor a
            sum (`ignore_index` and class weights divide by what is in the batch), or a mean of batches whose samples
            have other shapes; parameters that are written in place meanwhile; an f that writes into its batch, or of
            which `gram` finds that it gives samples something else beside those of another one; a device on which there
            is no parameter; a checkpoint of something else, of `gram`, or of a linearisation; within torch.func's
            transforms.
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
    `estimate_trace`, `estimate_diagonal` around products, which go through the loader once for each vector. What
    `mc_samples=` draws differs from a call without `streamed`: the generator gives a key, and each sample draws from a
    generator of its own, made of the key and of how many samples came before. So they are the same however the data set
    is divided, and for all vectors of a linearisation; `sample=` gets the samples one by one.

    Cost: that of t for each batch, and where a loss is one number, four gradients of it in the outputs; of what is
    drawn, 5 microseconds for each sample. A second sweep runs f again, which draws anew if it does. Memory is that of
    one batch, the result (with a sample axis it is as long as the data set, unless it goes to `out`) and the outputs
    of the first batch.

    A checkpoint is replaced as a whole, so that a process that is killed at any moment leaves a complete one (beside
    it, perhaps, a `.part` of the next), and read by `torch.load` with its default settings. Of f and the loss it knows
    only the names, and draws go on as they were begun, whatever generator a next call has. All batches,
    and once the parameters, are copied to the CPU for a checksum; a result with a sample axis is written in full each
    time, and where the loss is one number, the outputs and the target of the first batch. That of `ekfac` has the
    eigenvectors, which another machine may find with other signs. A file is of one call at a time.

    `gram` holds the per-sample gradients of a batch, in factors, while the batches behind it go by: of k batches k
    (k+1)/2 tiles, of which the others are mirror images. Each tile evaluates one batch, k (k+1)/2 of them in place of
    k, and where per-sample gradients are formed, forms those of both. A tile takes the memory of two
    batches beside the result; `[N, P]` is never made. The loader is gone through once for each batch, and once before
    to count; by checksums, its batches have to be the same ones each time. For a function as out, which is told whole
    rows, all k^2 tiles are computed. Of two loaders, each batch of the second is held while the first goes by; with
    `others=`, the per-sample gradients of these are held from the first batch on. The first two batches that meet are
    evaluated joined, too, to find an f that gives samples something else there.

    Source: Chan, Golub and LeVeque (1979) for variances.
    """
    feed = Feed.of(device, f"streamed({describe(t)})" if progress else "")
    file = Checkpoint.of(checkpoint, every)
    if reduction not in (None, "sum"):
        raise ArgumentError(
            f"streamed({describe(t)}, reduction={reduction!r}): it is 'sum', if it is given. Of a mean, return the sum "
            "over the samples of the batch, and divide the result."
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
        raise ArgumentError(f"streamed({t!r}, checkpoint=...): of tiles no file is kept. Leave checkpoint out.")
    if plans is not None and t.reduction.pairs:
        raise ArgumentError(f"streamed({plans!r}): of tiles no plan is made. Leave `compiled` away.")
    if out is not None and (why := _no_rows(t, file)):
        raise ArgumentError(f"streamed({t!r}, out=...): {why}.")
    if t.reduction.pairs and not t.members:
        if reduction is not None:
            raise ArgumentError(f"streamed({t!r}, reduction={reduction!r}): it takes the [N] losses of the samples.")
        return Tiled(t, feed, out)
    return Streamed(t, part, out=out, plans=plans)


def not_by_batches(t: Statistic, alone: bool) -> str:
    """The reason why a statistic cannot be reduced batch by batch, alone or together with others; empty if it can."""
    if t.samples is not None:
        return "has samples=, which are places in a batch: let the loader give those"
    if t.argnums not in (0, (0,)):
        return f"has argnums={t.argnums}, but the parameters have to come first, and alone"
    if t.reduction.pairs:
        return "" if alone else "is of pairs of samples, whose batches come in another order: stream it alone"
    if "samples" not in t.reduction.axes and not t.reduction.each:
        return "is of all samples at once, and does not add up over batches"
    return ""


def _no_rows(t: Statistic, file: Checkpoint | None) -> str:
    """The reason why its result cannot be written batch by batch; empty if it can."""
    if file is not None:
        return "what is written there is not in a checkpoint, and lost where it is in memory. Leave one of them out"
    if t.options.reduce is not None:
        return "what is reduced comes after the last batch. Pass a function (start, rows) as out"
    none = [m.name for m in t.members or (t,) if len(m.reduction.each) != 1 and not m.reduction.pairs]
    return f"{none[0]} has no result with a sample axis. Leave out away" if none else ""


@dataclass(frozen=True, repr=False)
class Streamed(Transform):
    """A function `(params, loader) -> result`, of all batches together, or `(params, *batch)` of all processes."""

    t: Statistic
    part: ProcessPart
    gather: bool = False
    """Tells whether results with a sample axis are those of all processes."""
    out: Any = None
    plans: PlansOfBatches | None = None
    """Plans by which batches are evaluated, if it is `compiled`."""
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

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        t, said = self.t, {"the statistic": options_of(self.t)}
        rows = None if self.out is None else Rows(self.out, [m.quantity for m in t.members or (t,)], bool(t.members))
        begun = self.part.begun(
            t,
            args,
            PARAMETERS,
            names,
            alike={**said, "each": "gather" if self.gather else "local"},
            identity=partial(identity_of, said, kwargs, {"params": args[0]}),
            again=twice(t),
            check=None if rows is None else rows.check,
        )
        given = t, kwargs, begun, self.plans, self.part.reduction
        work = VisitWork(*given) if rows is None else RowByRow(rows, *given)
        with begun.course:
            results, aux = work.done(self.gather)
            results = self._laid_out(results, args[0])
        return results, aux if self.part.feed is not None else aux[0] if aux else None

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """Explains how it would be computed: what is done with the first batch, and how often with how many; of several
        processes how this one does, which does not wait for the others."""
        if not self.part.alone and any(map(sharded, tree.tensors(args[:1]))):
            raise ArgumentError(
                "the parameters are DTensors, and this process has a part of each; no other is asked. Pass "
                "p.full_tensor() of each to explain, which is what a call computes with."
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


def options_of(t: Statistic) -> str:
    """Description that tells a statistic from others, in every process."""
    each = [
        (m.reduction, m.drawing and (m.drawing.count, m.drawing.sample, m.drawing.peel and m.drawing.peel.columns))
        for m in t.members or (t,)
    ]
    return f"{described(t)} {described([each, t.in_dims, t.out_dims, t.options.dense, t.others, t.has_aux])}"


def twice(t: Statistic) -> str:
    """The reason why the loader has to be gone through more than once; empty if it has not."""
    times = "twice" if t.sweeps == 2 else f"{t.sweeps} times"
    return "" if t.sweeps == 1 else f"{t.name} looks at all samples {times}"
