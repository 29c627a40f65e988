"""Exactly n passes, or as few as a memory budget allows: time for memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc.arguments.problem import InDims, batch_dims, batch_size, some_samples, with_aux
from invfunc.budget import size_of
from invfunc.budgeted import Budgeted, BudgetedStatistic, Chunks
from invfunc.callables import check_callable, check_choice, check_count, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.plan import AxisName, ChunkSplit
from invfunc.statistic import Statistic
from invfunc.transform import Transform

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
    for name, value in (("n", n), ("chunk_size", size)):
        if value is None:
            continue
        check_count(f"chunked({describe(f)}, ", name, value)
        return ChunkSplit(n, size), f"{name}={value}"
    return None, ""


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
