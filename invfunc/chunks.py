"""Exactly n passes, or as few as a memory budget allows: time for memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from invfunc import thresholds, tree
from invfunc._extras import told_of_parts
from invfunc._torch.functorch import dispatched, transforming
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.budget import in_bytes, peak_of, settings, size_of, told
from invfunc.callables import check_callable, check_choice, check_count, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, BudgetError, InvFuncError
from invfunc.plan import AxisName, ChunkSplit, Explanation
from invfunc.problem import InDims, batch_dims, batch_size, some_samples, with_aux
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

_FOLDS = ("cat", "sum", "mean")


def chunked(
    f: Callable | None = None,
    n: int | None = None,
    *,
    chunk_size: int | None = None,
    memory: int | float | str | None = None,
    over: str | None = None,
    fold: Any = "cat",
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
    progress: bool = False,
) -> Any:
    """Compute a statistic, or any function of a batch, in exactly n chunks, one after the other, to save memory.

    For a plain function it stands for the loop

        parts = [f(params, *(x[a:b] for x in batch)) for a, b in chunks]
        torch.cat(parts)                      # fold="cat"; sum(parts) for "sum", weighted by b - a for "mean"

    A statistic is divided along an axis of its own, and the scale of its loss never changes. Over samples, f runs on
    each chunk alone, and the results are merged, so that the activations of one chunk are in memory:

        sum(t(params, *(x[a:b] for x in batch)) for a, b in chunks)      # of [N] losses, `sum_grad_squared` and such

    Args:
        f: a statistic of this library, or a function `f(params, *batch)`. Left out, a decorator is returned:
            `@chunked(n=16)`. f is pure in torch.func's sense (see the conventions).
        n: the number of chunks, at least 1, of nearly equal size; of an axis shorter than n, each entry is a chunk.
        chunk_size: in place of n, the length of a chunk. With neither (or None), f is returned unchanged.
        memory: in place of n, the memory that a call may take, with its result, over what is in use before it: bytes, a
            text as `"512MiB"`, or a float, a fraction of the free memory. It divides the samples; if a single sample is
            too much, also outputs, and then parameters (or `over` alone).
        over: the axis of a statistic. `"outputs"`: the vectors that are pulled back from the outputs, with one forward
            pass; default for the GGN family and `batch_jacobian`. `"samples"`: physical batches, see below; default for
            first-order statistics. `"params"`: parameter by parameter; the only axis of `gram`. A plain function has
            `"samples"` only.
        fold: for a plain function, joins the results of the chunks: `"cat"` along `out_dims`, `"sum"` or `"mean"`; or a
            pytree of these, a prefix of the output.
        in_dims, out_dims, has_aux: for a plain function, the sample axes of its batch arguments and outputs; aux comes
            as the list of those of the chunks. A statistic has its own.

    Returns:
        A function with the signature of f; over samples, aux is a list of that of each run of f. `chunked` may be
        nested: along another axis the numbers of chunks multiply, along the same axis each chunk is divided again.

    Raises:
        ArgumentError: n < 1, an axis that f does not have, a scalar result with `fold="cat"`.
        SampleAxisError: over samples, an f that gives samples other results in a part of the batch: it mixes them,
            reads a parameter by the position of a sample, or uses the length of the batch; or a scalar loss that is
            neither the mean nor the sum of its samples (pass it apart then, as in `diag_ggn(f, loss)`).
        RandomnessError: over samples, a scalar loss of a function that draws random numbers.
        BudgetError: the call does not fit `memory`; `error.least` is the least memory that it takes.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda params, x: x @ params
        >>> g = invfunc.chunked(invfunc.diag_ggn(f, torch.nn.functional.mse_loss), n=2)
        >>> g(torch.ones(3, 2), torch.ones(5, 3), torch.zeros(5, 2))
        tensor([[1.0000, 1.0000],
                [1.0000, 1.0000],
                [1.0000, 1.0000]])

        >>> invfunc.explain(invfunc.chunked(invfunc.variance(f), memory="64MiB"))(torch.ones(3), torch.ones(5, 3)).why
        'in one piece, at most 2.01MiB of 64.00MiB'

    Over samples, a loss function returns the `[N]` losses, or one number that is their mean or their sum. The first
    call with arguments of such shapes finds out which it is: it compares up to eight samples of the batch with either
    half of them. A loss with weights that depend on the batch (a mask that is counted, class weights, `ignore_index`)
    is an error. If model and loss are passed apart, as in `diag_ggn(f, loss)`, any loss is right: the outputs of all
    chunks are computed first, then the columns of their loss, and then each chunk again.

    An f that draws random numbers draws them chunk after chunk, as a loop over the chunks does, and not as for the
    whole batch; then there is no comparison.

    Composes with: every statistic; `torch.func.grad`, `vmap` around it, but not around `memory`, which `streamed`,
    `distributed`, `together` and `reduced` do not take either: what they add around a call would come on top.

    Cost: n pullbacks (batched vector-Jacobian products) of 1/n of the vectors; over outputs, memory falls with n until
    the forward pass dominates. Over samples, that of a call on each chunk, and memory falls with n: to the result and
    one chunk. For a mean over samples of a plain function, `grad(chunked(f, n, fold="mean"))` keeps all graphs,
    while chunking the gradient, `chunked(grad(f), n, fold="mean")`, keeps one.

    With `memory`, the first call measures some calls on chunks, of one sample and then of more, as long as they are
    within the budget, and takes the largest such chunk: together as long as three or four calls. On CUDA it reads the
    peak of the caching allocator; elsewhere it counts the tensors that are alive, with internal copies of convolutions
    and decompositions. A tenth of the peak and 2 MiB are in reserve. The returned function remembers the size for
    arguments of the same shapes, dtypes and devices, and this number of samples or fewer (if a batch fits in one piece,
    up to twice as many): make it once, outside of a loop. Not counted are the code and buffers that libraries load at
    their first use, and freed memory that malloc keeps (`invfunc.testing.return_freed_memory`). A chunk of one sample
    always runs, to be measured. If f closes over tensors of other sizes later, it is not measured again.

    Source: BackPACK's tutorial on `retain_graph`; optax's `microbatching`.
    """
    if f is None:
        options = {"fold": fold, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "progress": progress}
        return partial(chunked, n=n, chunk_size=chunk_size, memory=memory, over=over, **options)
    check_callable("chunked", f)
    if memory is not None:
        if n is not None or chunk_size is not None:
            raise ArgumentError(
                f"chunked({describe(f)}, memory={memory!r}): give memory, n or chunk_size, one of them."
            )
        options = {"fold": fold, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux}
        return _within(f, memory, over, options, progress)
    split, text = _split(f, n, chunk_size)
    if split is None:
        return f
    if isinstance(f, Statistic):
        if (fold, in_dims, out_dims, has_aux) != ("cat", 0, 0, False):
            raise ArgumentError(f"chunked({f!r}): fold, in_dims, out_dims, has_aux are for plain functions only.")
        if not f.axes:
            raise ArgumentError(f"chunked({f!r}): it cannot be computed in parts.")
        over = over or f.axes[0]
        if over not in f.axes:
            raise ArgumentError(f"chunked({f!r}, over={over!r}): its axes are {', '.join(map(repr, f.axes))}.")
        shown, plan = f"chunked({f!r}, {text}, over={over!r})", f.options.plan.split(cast(AxisName, over), split)
        options = replace(f.options, plan=plan, progress=shown if progress else f.options.progress)
        return replace(f, options=options, shown=shown)
    if isinstance(f, Transform) and f.outermost:
        raise ArgumentTypeError(f"chunked({f!r}): it takes the whole batch. Chunk the statistic inside of it instead.")
    if over not in (None, "samples"):
        raise ArgumentError(f"chunked({describe(f)}, over={over!r}): a plain function has the axis 'samples' only.")
    for name in tree.leaves(fold):
        check_choice(f"chunked({describe(f)}, ", "fold", name, _FOLDS)
    return ChunkedFunction(f, split, text, fold, in_dims, out_dims, has_aux, progress)


def _within(f: Callable, memory: Any, over: str | None, options: dict[str, Any], progress: bool) -> Budgeted:
    """A function in the chunks that a budget asks for."""
    text = f"memory={memory!r}" + (f", over={over!r}" if over is not None else "")
    try:
        size = size_of(memory)
    except InvFuncError as error:
        raise type(error)(f"chunked({describe(f)}, {text}): {error}") from None
    chunked(f, 1, over=over, **options)  # checks the options
    if isinstance(f, Statistic) and f.options.reduce is not None:
        raise ArgumentError(
            f"chunked({f!r}, {text}): the measurements would call the function of `reduced`, too. Give n, or chunk the "
            "statistic inside of it."
        )
    if isinstance(f, Statistic):
        axes = (over,) if over is not None else f.axes
        return BudgetedStatistic(f, partial(_divided, f, progress), axes, size, text, has_aux=f.has_aux)
    parts = partial(_parts, f, {"over": over, **options}, progress)
    return Budgeted(f, parts, ("samples",), size, text, options["in_dims"], options["has_aux"])


def _divided(t: Statistic, progress: bool, chunks: Chunks, shown: bool) -> Statistic:
    """A statistic in these chunks."""
    for axis, n in chunks.items():
        t = chunked(t, n, over=axis, progress=shown and progress)
    return t


def _parts(f: Callable, options: dict[str, Any], progress: bool, chunks: Chunks, shown: bool) -> ChunkedFunction:
    """A plain function in these chunks."""
    return chunked(f, chunks.get("samples", 1), progress=shown and progress, **options)


def _split(f: Callable, n: Any, size: Any) -> tuple[ChunkSplit | None, str]:
    """Check n and chunk_size; at most one of them is given."""
    if n is not None and size is not None:
        raise ArgumentError(f"chunked({describe(f)}, n={n}, chunk_size={size}): give n or chunk_size, not both.")
    name, value = ("n", n) if size is None else ("chunk_size", size)
    if value is None:
        return None, ""
    check_count(f"chunked({describe(f)}, ", name, value)
    return ChunkSplit(n, size), f"{name}={value}"


@dataclass(frozen=True, repr=False)
class ChunkedFunction(Transform):
    """A plain function on chunks of its batch, with the results folded."""

    f: Callable
    split: ChunkSplit
    text: str
    fold: Any
    in_dims: InDims
    out_dims: int
    has_aux: bool
    progress: bool = False
    owned = False  # it is f, and gives what f gives

    def __repr__(self) -> str:
        return f"chunked({describe(self.f)}, {self.text})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, list[Any]]:
        dims = batch_dims(self.in_dims, list(range(1, len(args))))
        length = batch_size(args, dims, names)
        parts, aux = [], []
        ranges = self.split.ranges(0, length)
        with told_of_parts(repr(self) if self.progress else "", ranges, "chunk") as tell:
            for start, stop in ranges:
                given = [some_samples(x, dims.get(i), slice(start, stop)) for i, x in enumerate(args)]
                result = self.f(*given, **kwargs)
                if self.has_aux:
                    result, extra = with_aux(result)
                    aux.append(extra)
                parts.append(result)
                tell(len(parts), stop - start)
        return self._folded(parts, [stop - start for start, stop in ranges]), aux

    def _folded(self, parts: list[Any], sizes: list[int]) -> Any:
        leaves = [tree.leaves(p) for p in parts]
        structure = tree.flatten(parts[0])[1]
        folds = tree.broadcast(self.fold, parts[0])
        if folds is None:
            raise ArgumentError(f"fold={self.fold!r} is not a prefix of the output's structure.")
        joined = [self._one(how, list(xs), sizes) for how, xs in zip(folds, zip(*leaves, strict=True), strict=True)]
        return tree.unflatten(joined, structure)

    def _one(self, how: str, xs: list[Any], sizes: Sequence[int]) -> Any:
        if all(x is None for x in xs):
            return None
        if how == "cat":
            if xs[0].ndim == 0 or any(x.shape[self.out_dims] != size for x, size in zip(xs, sizes, strict=True)):
                raise ArgumentError(
                    f"f returned shape {tuple(xs[0].shape)} for {sizes[0]} samples, which has no sample axis "
                    f"{self.out_dims} to concatenate along; say fold='sum' or fold='mean'."
                )
            return torch.cat(xs, self.out_dims)
        total = sum(sizes)
        weighted = xs if how == "sum" else [x * (size / total) for x, size in zip(xs, sizes, strict=True)]
        return sum(weighted[1:], weighted[0])


Chunks = dict[str, int]
"""Numbers of chunks along each axis that is divided."""
MARGIN, RESERVE = 1.1, 2**21
"""Factor on what was measured, and bytes beside it, for what no meter sees: pages, buffers of kernels, objects."""
TRIES, KEPT = 6, 64
"""Sizes of chunks that are measured along an axis at most, and kinds of calls whose chunks are kept."""
GAIN = 1.2
"""Factor by which a larger chunk has to be larger to be worth a try."""
_ORDER = ("samples", "outputs", "params")


def needed(peak: float) -> int:
    """Bytes of a budget that is enough for a call whose peak was measured."""
    return math.ceil(MARGIN * peak) + RESERVE


@dataclass(frozen=True)
class Choice:
    """Sizes of chunks along each axis, the bytes they need, and the largest batch that they serve."""

    sizes: Chunks
    lengths: Chunks
    need: int
    most: float

    def chunks(self, n: int) -> Chunks:
        """Numbers of chunks for a batch of n samples."""
        numbers = {a: math.ceil((n if a == "samples" else self.lengths[a]) / size) for a, size in self.sizes.items()}
        return {axis: number for axis, number in numbers.items() if number > 1}


@dataclass(frozen=True)
class BudgetedCall:
    """Arguments of a call: the batch axis of each, the number of samples, and the lengths of the axes to divide."""

    args: tuple
    kwargs: dict[str, Any]
    names: Any
    dims: dict[int, int | None]
    lengths: Chunks

    @property
    def n(self) -> int:
        return self.lengths["samples"]

    @property
    def device(self) -> torch.device:
        return next((x.device for x in tree.tensors(self.args)), torch.device("cpu"))

    def first(self, n: int) -> tuple:
        """Arguments of the first n samples."""
        return tuple(some_samples(x, self.dims.get(i), slice(0, n)) for i, x in enumerate(self.args))

    def key(self) -> Hashable:
        """Description of the call that does not depend on its number of samples."""

        def of(x: Any, dim: int | None = None) -> Hashable:
            if not isinstance(x, torch.Tensor):
                return x if isinstance(x, (int, float, str, bool)) else type(x)
            shape, steps = list(x.shape), x.stride() if dim is None and x.layout is torch.strided else ()
            if dim is not None:
                del shape[dim]
            return tuple(shape), steps, x.dtype, x.device, x.layout, x.requires_grad

        given = [(i, of(x, self.dims.get(i))) for i, arg in enumerate(self.args) for x in tree.leaves(arg)]
        return (*given, *map(of, tree.leaves(self.kwargs)), *self.kwargs, *settings())


@dataclass(frozen=True, repr=False)
class Budgeted(Transform):
    """A function in the chunks that its arguments ask for."""

    f: Callable
    make: Callable[[Chunks, bool], Any]
    """Makes the function in some chunks; the second argument says whether it may tell of its progress."""
    axes: tuple[str, ...]
    size: int | float
    text: str
    in_dims: Any = 0
    has_aux: bool = False
    choices: dict[Hashable, Choice] = field(default_factory=dict, compare=False)
    """Chunks that were chosen, by the kind of call."""
    outermost = budgeted = True  # what is around it would have memory of its own

    def __repr__(self) -> str:
        return f"chunked({describe(self.f)}, {self.text})"

    @property
    def owned(self) -> bool:
        return isinstance(self.f, Statistic)

    @property
    def several(self) -> bool:
        return isinstance(self.f, Statistic) and self.f.several

    def names(self, count: int) -> Any:
        return self.f.names(count) if isinstance(self.f, Transform) else ArgumentNames(self.f, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        call = self.call(args, kwargs, names)
        chunks = self.choice(call).chunks(call.n) if call.n else {}
        return self.make(chunks, True).compute(args, kwargs, names)

    def call(self, args: tuple, kwargs: dict[str, Any], names: Any) -> BudgetedCall:
        """The call, with the lengths of the axes along which it can be divided."""
        if transforming() or dispatched():
            raise ArgumentError(
                "within a transform of torch.func or a dispatch mode the memory of a call cannot be measured. Give the "
                "number of chunks: chunked(t, n)."
            )
        most = thresholds.TRIED_PASSES
        if not isinstance(self.f, Statistic):
            dims = batch_dims(self.in_dims, list(range(1, len(args))))
            return BudgetedCall(args, kwargs, names, dims, {"samples": batch_size(args, dims, names)})
        problem = self.f.problem(args, kwargs, names)
        drawn = [s.drawing.count if s.drawing else None for s in self.f.members or (self.f,)]
        columns = max([d or most for d in drawn])  # of columns that are not drawn nobody knows the number beforehand
        lengths: Chunks = {"samples": problem.n, "outputs": columns, "params": len(problem.leaves)}
        return BudgetedCall(args, kwargs, names, problem.dims, lengths)

    def choice(self, call: BudgetedCall) -> Choice:
        """Chunks within the budget: those that were chosen before, as long as they serve, or measured ones."""
        budget, key = in_bytes(self.size, call.device), call.key()
        known = self.choices.pop(key, None)
        if known is None or call.n > known.most or known.need > budget:
            known = self._measured(call, budget)
        self.choices[key] = known
        if len(self.choices) > KEPT:
            self.choices.pop(next(iter(self.choices)))
        return known

    def _measured(self, call: BudgetedCall, budget: int) -> Choice:
        """Chunks of the first axis that brings the call within the budget, on top of single entries of those before."""
        before, least, failed = Chunks(), list[tuple[int, Chunks]](), None
        for axis in [axis for axis in _ORDER if axis in self.axes]:
            try:
                search = _Search(self, call, axis, before, (budget - RESERVE) / MARGIN)
                found = search.run()
            except InvFuncError as error:  # it cannot be divided so
                failed = failed or error
                continue
            if found is not None:
                return found
            least += [(needed(peak), {**before, axis: size}) for size, peak in search.peaks.items()]
            before[axis] = 1
        if not least:
            assert failed is not None
            raise failed
        need, sizes = min(least, key=lambda each: each[0])
        error = BudgetError(
            f"the call does not fit {told(budget)}. The least that it takes in up to {thresholds.TRIED_PASSES} chunks "
            f"of an axis is {told(need)}, {_spelled(Choice(sizes, call.lengths, need, call.n).chunks(call.n))}. Give "
            f"memory={told(need)!r}, or a smaller batch."
        )
        error.least = need
        raise error

    def peak(self, call: BudgetedCall, chunks: Chunks, n: int) -> int:
        """Bytes that the call takes in some chunks on its first n samples; random numbers come again behind it."""
        drawn = [d.generator for d in self.f.drawings] if isinstance(self.f, Statistic) else []
        before, f = [(g, state_of(g)) for g in (*torchs_own(), *drawn)], self.make(chunks, False)
        given = call.first(n) if n < call.n else call.args
        try:
            return peak_of(lambda: f.compute(given, call.kwargs, call.names), call.device)
        finally:
            set_states(before)


class _Search:
    """A search for the largest chunk along an axis with which a call has room, by measured calls.

    Over samples these are calls on two chunks. Results and columns of the samples behind them come on top: twice the
    bytes that a third sample brings, as what is joined is there twice.
    """

    def __init__(self, t: Budgeted, call: BudgetedCall, axis: str, before: Chunks, room: float) -> None:
        self.t, self.call, self.axis, self.before, self.room = t, call, axis, before, room
        self.peaks: dict[int, float] = {}
        """Bytes that the call takes with chunks of a size."""
        self._known: dict[Any, int] = {}
        few = axis == "samples" or "samples" in before
        self.growth = max(0, self._measured(1, 3) - self._measured(1, 2)) if few and call.n > 2 else 0

    def run(self) -> Choice | None:
        """The largest size that was tried and for which there is room, if there is any."""
        size, large, length = 1, self.call.lengths[self.axis] + 1, self.call.lengths[self.axis]
        if self._peak(size) > self.room:
            return None
        for _ in range(TRIES):
            tried = self._next(size, large)
            if tried < min(GAIN * size, length) or tried == size:
                break
            if self._peak(tried) <= self.room:
                size = tried
            else:
                large = tried
        need, most = needed(self.peaks[size]), self._most(size)
        if self.axis == "samples" and size >= length:
            size = int(most)
        return Choice({**self.before, self.axis: size}, self.call.lengths, need, most)

    def _next(self, size: int, large: int) -> int:
        """The size that should take the room, as bytes grow from one measured size to the next; first, at least 2."""
        other = large if large in self.peaks else max([s for s in self.peaks if s < size], default=0)
        slope = (self.peaks[size] - self.peaks.get(other, 0)) / (size - other)
        more = (self.room - self.peaks[size]) / slope if slope > 0 else large
        return max(size, min(large - 1, int(size + max(min(more, large), not other))))

    def _most(self, size: int) -> float:
        """The largest batch for which there is room with a size; of one in a single chunk, at most twice as many."""
        n, left = self.call.n, self.room - self.peaks[size]
        if self.axis == "samples" and size >= n:
            return n + min(n, left * n // max(1, self.peaks[size]))
        if self.axis != "samples" and "samples" not in self.before:
            return n
        return n + left / (2 * self.growth) if self.growth else math.inf

    def _peak(self, size: int) -> float:
        if size not in self.peaks:
            n = self.call.n
            few = min(n, 2 * size if self.axis == "samples" else 2 if "samples" in self.before else n)
            self.peaks[size] = self._measured(size, few) + 2 * self.growth * (n - few)
        return self.peaks[size]

    def _measured(self, size: int, n: int) -> int:
        chunks = Choice({**self.before, self.axis: size}, self.call.lengths, 0, 0).chunks(n)
        key = n, *chunks.items()
        if key not in self._known:
            self._known[key] = self.t.peak(self.call, chunks, n)
        return self._known[key]


class BudgetedStatistic(Budgeted):
    """A statistic in the chunks that its arguments ask for."""

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """Explains how it would be computed at these arguments, and in how much memory."""
        call = self.call(args, kwargs, names)
        found, budget = self.choice(call), in_bytes(self.size, call.device)
        chunks = found.chunks(call.n)
        why = f"{_spelled(chunks)}, at most {told(found.need)} of {told(budget)}"
        return replace(self.make(chunks, False).explanation(args, kwargs, names), name=repr(self), why=why)


def _spelled(chunks: Chunks) -> str:
    """Chunks in words."""
    divided = [f"{n} chunks of {axis}" for axis, n in chunks.items()]
    return "in " + " and ".join(divided) if divided else "in one piece"
