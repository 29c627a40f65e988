"""A data set in the memory of one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import torch

from invfunc.callables import describe
from invfunc.compiled import Compiled, opened
from invfunc.data_sets.tiled import Tiled
from invfunc.data_sets.visits import work_of
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Feed, batches_of, check_loader, counted, first
from invfunc.evaluation.checkpoint import Checkpoint
from invfunc.evaluation.course import course_of
from invfunc.evaluation.fingerprint import described, named
from invfunc.plans.batches import PlansOfBatches
from invfunc.products.product import Product
from invfunc.products.streamed import StreamedProduct
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform, check_adds_up


@overload
def streamed(
    t: Statistic | Compiled,
    *,
    device: Any = None,
    progress: bool = False,
    checkpoint: Any = None,
    every: float = 60,
    out: Any = None,
) -> Streamed | Tiled: ...
@overload
def streamed(
    t: Product, *, device: Any = None, progress: bool = False, checkpoint: Any = None, every: float = 60
) -> StreamedProduct: ...
def streamed(
    t: Any,
    *,
    device: Any = None,
    progress: bool = False,
    checkpoint: Any = None,
    every: float = 60,
    out: Any = None,
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
            `samples=`; a scalar loss that is not given apart, or that is neither a mean nor a sum (`ignore_index` and
            class weights divide by what is in the batch), or a mean of batches whose samples have other shapes;
            parameters that are written in place meanwhile; an f that writes into its batch, or of which `gram` finds
            that it gives samples something else beside those of another one; a device on which there is no parameter; a
            checkpoint of something else, of `gram`, or of a linearisation; within torch.func's transforms.
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
    time. Where the loss is one number, the first batch is computed again to go on. That of `ekfac` has the
    eigenvectors, which another machine may find with other signs.

    `gram` holds the per-sample gradients of a batch, in factors, while the batches behind it go by: of k batches k
    (k+1)/2 tiles, of which the others are mirror images. Each tile evaluates one batch, k (k+1)/2 of them in place of
    k, and where per-sample gradients are formed, forms those of both. A tile takes the memory of two
    batches beside the result; `[N, P]` is never made. The loader is gone through once for each batch, and once before
    to count; by checksums, its batches have to be the same ones each time. For a function as out, which is told whole
    rows, all k^2 tiles are computed. Of two loaders, each batch of the second is held while the first goes by; with
    `others=`, these are evaluated again with each batch, so that many of them are better a second loader. The first two
    batches that meet are evaluated joined, too, to find an f that gives samples something else there.

    Source: Chan, Golub and LeVeque (1979) for variances.
    """
    feed = Feed.of(device, f"streamed({describe(t)})" if progress else "")
    file = Checkpoint.of(checkpoint, every)
    t, plans = opened(t)
    if isinstance(t, Product):
        if out is not None:
            raise ArgumentError(f"streamed({t!r}, out=...): a product has no sample axis. Leave out away.")
        return StreamedProduct(t, feed, file, plans)
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
    return Tiled(t, feed, out) if t.reduction.pairs and not t.members else Streamed(t, feed, file, out, plans)


def not_by_batches(t: Statistic, alone: bool) -> str:
    """Why a statistic cannot be reduced batch by batch, alone or together with others; empty if it can."""
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
    """Why its result cannot be written batch by batch; empty if it can."""
    if file is not None:
        return "what is written there is not in a checkpoint, and lost where it is in memory. Leave one of them out"
    if t.options.reduce is not None:
        return "what is reduced comes after the last batch. Pass a function (start, rows) as out"
    none = [m.name for m in t.members or (t,) if len(m.reduction.each) != 1 and not m.reduction.pairs]
    return f"{none[0]} has no result with a sample axis. Leave out away" if none else ""


@dataclass(frozen=True, repr=False)
class Streamed(Transform):
    """A function `(params, loader) -> result`, of all batches together."""

    t: Statistic
    feed: Feed
    checkpoint: Checkpoint | None = None
    out: Any = None
    plans: PlansOfBatches | None = None
    """By which batches are evaluated, if it is `compiled`."""
    outermost = True

    def __repr__(self) -> str:
        return f"streamed({self.plans or self.t!r})"

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
        return ["params", "loader"][:count]

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        params, loader = self._given(args, twice(self.t))
        with torch.no_grad():
            return self._swept(params, loader, kwargs)

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How it would be computed: what is done with the first batch, and how often with how many."""
        found, given = self.looked_at(args, kwargs)
        if self.plans is None:
            return found
        with torch.no_grad():
            plan, code = self.plans.explained(self.t, given, kwargs)
        return replace(found, plan=plan, code=code)

    def looked_at(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Explanation, tuple]:
        """The explanation, and the arguments of the first batch."""
        params, loader = self._given(args, "to look at the first one takes it away")
        given, batches = first(loader, params, self.t.in_dims, self.feed)
        found = self.t.explanation(given, kwargs, self.t.names(len(given)))
        return replace(found, name=repr(self), sweeps=self.t.sweeps, batches=batches), given

    @staticmethod
    def _given(args: tuple, twice: str) -> tuple[Any, Any]:
        """The parameters and the loader, which gives its batches more than once if there is a reason."""
        if len(args) != 2:
            raise ArgumentTypeError(f"it takes the parameters and a loader, and got {len(args)} positional arguments.")
        check_loader(args[1], sweeps=twice)
        return args[0], args[1]

    def _swept(self, params: Any, loader: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        work = work_of(self.t, params, kwargs, self.out, self.plans)
        work.check(counted(loader, self.t.in_dims))
        identity = partial(identity_of, self.t, params, kwargs)
        empty: list[tuple] = []
        batches = batches_of(loader, params, self.t.in_dims, self.feed, empty)
        with course_of(self.checkpoint, identity, [*work.keys.values()], self.feed.goal(params)) as course:
            work.draw_by(course.record.keys)
            course.begin(work)
            work.computed(lambda: course.through(batches))
            if self.out is not None or work.sweep.n or not empty:
                return work.results()
        found, aux = self.t.compute(empty[0], kwargs, self.t.names(len(empty[0])))  # zeros, or the reason why not
        return found, [aux]


def options_of(t: Statistic) -> str:
    """What tells a statistic from others, in every process."""
    each = [
        (m.reduction, m.drawing and (m.drawing.count, m.drawing.sample, m.drawing.peel and m.drawing.peel.columns))
        for m in t.members or (t,)
    ]
    return f"{described(t)} {described([each, t.in_dims, t.out_dims, t.options.dense, t.others, t.has_aux])}"


def identity_of(t: Statistic, params: Any, kwargs: dict[str, Any]) -> dict[str, str]:
    """What a call has to have like one before that it goes on from, beside its batches."""
    return {"the statistic": options_of(t), "keyword arguments": described(kwargs), **named("params", params)}


def twice(t: Statistic) -> str:
    """Why the loader has to be gone through more than once; empty if it has not."""
    times = "twice" if t.sweeps == 2 else f"{t.sweeps} times"
    return "" if t.sweeps == 1 else f"{t.name} looks at all samples {times}"
