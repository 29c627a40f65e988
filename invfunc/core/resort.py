"""The last resort, where the core cannot follow what f does: single samples, or the rows of `[N]` losses.

f is evaluated on each sample alone, with a copy of the parameters for each, and this is taken where it says what the
whole batch says: the rows have the same values, or the loss is their mean or their sum, and so has the gradient. Both
are compared in each call, which costs one gradient, as f may do something else with other numbers. So whatever f does
inside, the result is right, or an error.

Of `[N]` losses the derivative of each is a per-sample gradient by definition. Where f cannot be evaluated on samples
alone, as the node losses of one graph, rows of the identity are pulled back, if no batch arguments are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import as_it_is, graph_level, graph_of, mapped, nodes_below
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc._torch.values import anywhere, near, wide
from invfunc.budget import free_on, told
from invfunc.core.columns import CRITERIA, KNOWN
from invfunc.core.marks import LEAF, SUMMED, Mark, Node, Unsupported, know, option, spelled, tensors
from invfunc.core.run import Run
from invfunc.core.uses import Copies
from invfunc.operations.axis import Axis, Order
from invfunc.plan import even
from invfunc.problem import BoundProblem

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
MARKS = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # pyright: ignore[reportAttributeAccessIssue]
"""By which f marks a tensor of its own to be differentiated in."""
FLOOR = 0.1
"""The part of the largest size that counts for the smallest, whose rounding may come from that."""
SMALL = 2**28
"""Bytes of gradients up to which nobody asks what is free."""
NO_COLUMNS = "columns at a criterion inside of a function that is not followed, which does not end with it"
ROWS = 32
"""So many rows are pulled back at once."""


class AsWritten(TorchFunctionMode):
    """A mode under which f runs as it is written, on what `samples(x, axis)` makes of the batch."""

    def __init__(self, samples: Callable[[Tensor, Axis], Tensor], apart: bool | None = True) -> None:
        """`apart` says that something of each sample is wanted; None, that f may do what it likes."""
        super().__init__()
        self._samples, self._apart, self.leaves = samples, apart, list[Tensor]()
        self.criteria = list[Any]()
        """The calls of criteria, with their results."""

    def samples(self, x: Tensor, axis: Axis) -> Tensor:
        """The tensor that f gets in place of a tensor of the batch."""
        return self._samples(x, axis)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._apart is not None:
            _check(func, args, kwargs, self._apart)
        out = func(*args, **kwargs)
        if CRITERIA.get(func) in KNOWN:
            self.criteria.append((out, func, args, kwargs))
        made = args[0] if func in MARKS else out
        if isinstance(made, Tensor) and made.is_leaf and made.requires_grad:
            if func in MARKS or all(made is not x for x in args):
                self.leaves.append(made)
        return out


def _check(func: Any, args: tuple, kwargs: dict[str, Any], apart: bool = True) -> None:
    """Check that an operation is none of those that count in the whole batch, or write what they find there."""
    if apart and func is F.batch_norm and option(args, kwargs, 5, "training", False):
        raise Unsupported("batch norm in train mode computes with all samples; take functional(model, train=False)")
    table = func is F.embedding or func is F.embedding_bag
    if table and (option(args, kwargs, 3, "max_norm") is not None or option(args, kwargs, 5, "scale_grad_by_freq")):
        raise Unsupported(f"{spelled(func)} with max_norm or scale_grad_by_freq depends on all samples")


def alone(problem: BoundProblem, run: Run, leaves: list[Tensor]) -> tuple[Any, Any]:
    """f of each sample alone, as the whole batch has it; and aux of the whole batch."""
    copies = _copies(problem, run)
    if run.criterion is not None and problem.loss is None:
        return _at_criterion(problem, run, leaves, copies)
    if run.n == 1:
        out, aux, run.closed_over = _called(problem, run, [x[0] for x in copies], copies)
        return _known(problem, run, leaves, copies, out), aux
    before = _states()
    whole, aux, run.closed_over = _called(problem, run, leaves, leaves)
    whole, slopes, after = whole.detach(), _slopes(whole, leaves), _states()
    drew = any(x is not y for (_, x), (_, y) in zip(before, after, strict=True))
    same = [partial(_mapped, drawing="same")] * drew
    error = Unsupported("samples alone have another value or gradient than in the batch")
    for way in (_mapped, *same, partial(_mapped, graph=True), _looped):  # vmap fills the gaps of padded tables
        set_states(before)
        try:
            out = _agreed(problem, way(problem, run, copies), whole, copies, slopes)
        except Exception as raised:  # of what f, torch.func.vmap, or both do not take
            error = Unsupported(f"of a single sample, {type(raised).__name__}: {str(raised).partition(chr(10))[0]}")
            continue
        if out is not None:
            set_states(after)
            return _known(problem, run, leaves, copies, out), aux
    raise error


def _at_criterion(problem: BoundProblem, run: Run, leaves: list[Tensor], copies: list[Tensor]) -> Any:
    """The criterion that f ends with, of the outputs and the target that it has of each sample alone; and aux."""
    before, rest = _states(), list[Any]()
    whole, aux, run.closed_over = _called(problem, run, leaves, leaves)
    whole, slopes = whole.detach(), _slopes(whole, leaves)
    if any(x is not y for (_, x), (_, y) in zip(before, _states(), strict=True)):
        raise Unsupported(NO_COLUMNS)

    def caught(each: AsWritten, out: Any) -> tuple[Tensor, Tensor]:
        if len(each.criteria) != 1 or out is not each.criteria[0][0] or len(each.criteria[0][2]) < 2:
            raise Unsupported(NO_COLUMNS)
        rest[:] = each.criteria[0][1:]
        return rest[1][0], rest[1][1]

    found = _mapped(replace(problem, factor=None), run, copies, seen=caught)
    z, target = [x.flatten(0, 1) for x in found]
    func, args, kwargs = rest
    if len(z) != run.n or len(target) != run.n:
        raise Unsupported(NO_COLUMNS)
    for x in (z, target):
        know(x, Mark(run.token, (-x.ndim, 1, 1), x.requires_grad))
    with run:
        out = func(z, target, *args[2:], **kwargs)
        out = out if problem.factor in (None, 1) else out * problem.factor
    dtype = torch.promote_types(_precision(whole, copies), torch.float32)
    if out.shape != whole.shape or not _near(out, whole, _sizes(whole), dtype):
        raise Unsupported(NO_COLUMNS)
    if not _same(_slopes(out, copies), slopes, dtype):
        raise Unsupported(NO_COLUMNS)
    return _known(problem, run, leaves, copies, out), aux


def _states() -> list[tuple[torch.Generator, Tensor]]:
    return [(g, state_of(g)) for g in torchs_own()]


def _called(problem: BoundProblem, run: Run, params: list[Tensor], leaves: Tensors) -> tuple[Tensor, Any, bool]:
    """f of all samples, aux, and whether f reads a tensor from elsewhere that requires a gradient."""
    given = AsWritten(run.samples)
    out, aux = problem.call(given, params)
    if not isinstance(out, Tensor) or not out.requires_grad or (out.ndim and out.shape[_dim(problem, out)] != run.n):
        raise Unsupported("f returns neither a number nor a tensor with the samples, or none with a derivative")
    return out, aux, _closed_over(out, [*leaves, *given.leaves])


def _closed_over(out: Tensor, own: Tensors) -> bool:
    """Tells whether a result hangs on others than these leaves."""
    ids = {*map(id, own)}
    read = (getattr(node, "variable", None) for node in graph_of(out))
    return any(x is not None and id(x) not in ids for x in read)


def _copies(problem: BoundProblem, run: Run) -> list[Tensor]:
    """The parameters for each sample, if their gradients may fit."""
    size = 2 * run.n * sum([p.nbytes for p in problem.leaves])
    if size > SMALL and size > free_on(problem.leaves[0].device):
        raise Unsupported(f"the gradients of all samples take {told(size)}. Take chunked(t, chunk_size=)")
    return [run.alias(p.expand(run.n, *p.shape)) for p in problem.leaves]


def _dim(problem: BoundProblem, out: Tensor) -> int:
    """The dim of the samples of a result."""
    return problem.out_dims % out.ndim if out.ndim > 1 else 0


def _known(problem: BoundProblem, run: Run, leaves: Tensors, copies: Tensors, out: Tensor) -> Tensor:
    """A result whose only uses of the parameters are copies of them, of which each sample has one."""
    run.apart = True
    for i, (leaf, copy) in enumerate(zip(leaves, copies, strict=True)):
        run.use(Copies(Node(run.token, i, LEAF), leaf), copy)
    know(out, Mark(run.token, (_dim(problem, out) - out.ndim, 1, 1) if out.ndim else SUMMED, out.requires_grad))
    return out


# Single samples


def _mapped(
    problem: BoundProblem,
    run: Run,
    copies: Tensors,
    drawing: str = "different",
    graph: bool = False,
    seen: Callable[[AsWritten, Any], Any] = lambda each, out: out,
) -> Any:
    """f under vmap, `[N, ...]`, or what is `seen` of its call; where each sample draws, these are the numbers
    that the whole batch has drawn.

    `graph`, at a level of torch.func at which f may take derivatives by torch.autograd.grad.
    """
    batch = [(problem.args[i], d) for i, d in problem.dims.items() if d is not None and i in problem.inputs]
    given = [(x, d % x.ndim) for arg, d in batch for x in tree.tensors(arg)]

    def one(*mapped: Tensor) -> Tensor:
        samples = iter(mapped[len(copies) :])
        each = AsWritten(lambda x, axis: next(samples).unsqueeze(axis[0]))
        with graph_level() if graph else nullcontext((as_it_is, as_it_is)) as (enter, leave):
            given = [*map(enter, mapped[: len(copies)])]
            return tree.map_tensors(leave, seen(each, problem.call(each, given)[0]))

    dims = (*[0] * len(copies), *[d for _, d in given])
    return mapped(one, dims, drawing)(*copies, *[run.samples(x, (d - x.ndim, 1, 1)) for x, d in given])


def _looped(problem: BoundProblem, run: Run, copies: Tensors) -> Tensor:
    """f of one sample after the other, `[N, ...]`."""
    found = []
    for n, params in enumerate(zip(*[x.unbind() for x in copies], strict=True)):
        each = AsWritten(lambda x, axis, n=n: run.samples(x, axis).narrow(axis[0], n, 1))
        found.append(problem.call(each, [*params])[0])
    return torch.stack(found)


def _agreed(problem: BoundProblem, each: Any, whole: Tensor, copies: Tensors, slopes: Tensors) -> Tensor | None:
    """The result of samples alone in place of that of the batch, if both and their gradients agree."""
    if not isinstance(each, Tensor) or len(each) != problem.n or not each.requires_grad:
        return None
    dtype = _precision(whole, copies)
    if whole.ndim:
        rows = whole.movedim(_dim(problem, whole), 0)
        if [s for s in each.shape if s > 1] != [s for s in rows.shape if s > 1]:
            return None
        found, sizes = each.reshape(rows.shape), _sizes(rows).reshape(problem.n, -1).amax(1)
        sizes = (sizes + FLOOR * sizes.amax()).view(-1, *[1] * (rows.ndim - 1))
        several = [found.movedim(0, _dim(problem, whole))] if _near(found, rows, sizes, dtype) else []
    else:
        losses = wide(each.reshape(problem.n, -1).squeeze(1))
        both = [(losses.mean(), problem.n), (losses.sum(), 1)] if losses.ndim == 1 else []
        dtype = torch.promote_types(dtype, torch.float32)  # by little a weighted mean is another one
        several = [x.to(whole.dtype) for x, k in both if _near(x, whole, _sizes(losses).sum() / k, dtype)]
    found = [(x, each) for x in several if _same(each := _slopes(x, copies), slopes, dtype)]
    if not found:
        return None
    out, each = found[0]
    if any(anywhere(x != 0) for x in each) and not whole.ndim:
        if len(found) > 1:  # it is zero, and so is its gradient, but not those of the samples
            return None
        if not any(anywhere(x != x[:1]) for x in each):
            raise Unsupported("no sample has a part in the loss")
    return out


def _sizes(x: Tensor) -> Tensor:
    return wide(x).detach().abs().nan_to_num(0, 0, 0)


def _slopes(out: Tensor, inputs: Tensors) -> Tensors:
    """The derivatives of a number, or of a sum in which no two entries count the same."""
    weights = torch.arange(out.numel(), device=out.device).cos().to(out.dtype).view(out.shape)
    found = torch.autograd.grad(out, inputs, weights, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else wide(g) for g, x in zip(found, inputs, strict=True)]


def _precision(out: Tensor, params: Tensors) -> torch.dtype:
    """The narrowest precision in which a result may have been computed."""
    device, found = out.device.type, {out.dtype, *[p.dtype for p in params]}
    if torch.is_autocast_enabled(device):
        found.add(torch.get_autocast_dtype(device))
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _near(a: Tensor, b: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    return near(a.to(dtype), b.to(dtype), size.to(dtype))


def _same(each: Tensors, whole: Tensors, dtype: torch.dtype) -> bool:
    """Tells whether derivatives in the copies `[N, *p]` add up to those in the parameters."""
    sizes = [_sizes(x).sum(0).amax() for x in each]
    largest = FLOOR * reduce(torch.maximum, sizes)  # what cancels in one, as of a key's bias, is rounding of others
    return all(_near(x.sum(0), y, size + largest, dtype) for x, y, size in zip(each, whole, sizes, strict=True))


# Entries of a Hessian


def at_once(problem: BoundProblem, run: Run, leaves: list[Tensor]) -> tuple[Any, Any]:
    """f of all samples, which are not told apart; and aux."""
    out, aux = problem.call(AsWritten(run.samples, apart=False), leaves)
    if isinstance(out, Tensor) and out.ndim < 2:
        know(out, Mark(run.token, (-1, 1, 1) if out.ndim else SUMMED, out.requires_grad))
        run.closed_over = _closed_over(out, leaves)
    return out, aux


def beside(run: Run) -> Run:
    """A run in which f is called once more, at the level of another one."""
    found = Run(run.n, run.deep, run.chosen)
    found.level, found.outside, found.numbers = run.level, run.outside, run.numbers
    found._enter, found.strip = run._enter, run.strip
    return found


def entries(run: Run, out: Tensor, i: int) -> Tensor:
    """The diagonal of the Hessian in a parameter, entry by entry: of each sample, or `[1, *p]` of all at once."""
    x, n = (run.uses[i].edge, run.n) if run.uses else (run.leaves[i], 1)
    size, blocks, most = x.numel() // n, list[Tensor](), max(1, thresholds.GROUPED // max(1, run.numbers, x.numel()))
    with torch.enable_grad():
        (g,) = torch.autograd.grad(out, [x], torch.ones_like(out), create_graph=True, allow_unused=True)
        for a, b in even(size, most) if g is not None and g.requires_grad else ():
            at = torch.arange(a, b, device=x.device)
            unit = F.one_hot(at, size).to(x.dtype)[:, None].expand(-1, n, -1)
            (rows,) = run.rows(g, [x], [unit.reshape(-1, *x.shape)], run.deep)
            if rows is not None:
                blocks.append(run.strip((rows.reshape(unit.shape) * unit).sum(2)).T)
    shape = (n, *x.shape[1:]) if run.uses else (1, *x.shape)
    found = torch.cat(blocks, 1).view(shape) if blocks else torch.zeros_like(run.strip(x)).view(shape)
    return found if run.chosen is None else found[run.chosen]


# Rows


class Followed(Run):
    """A run in which samples are followed; parameters, and what is computed of several samples, are constants."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.n, run.deep)
        self.blended, self.marked, self.clean = False, set[Any](), set[Any]()
        self.level, self._enter, self.strip = run.level, run._enter, run.strip

    def dispatched(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        """Run an operation, given the tensors that it reads."""
        _check(func, args, kwargs)
        moved = [pair for pair in found[0] if isinstance(pair[1][1], Order) and not pair[0].requires_grad]
        self.blended = self.blended or bool(found[5] or moved)
        found[5].clear()
        found[0][:] = [pair for pair in found[0] if all(pair is not other for other in moved)]
        out = super().dispatched(func, args, kwargs, found)
        self.marked |= {y.grad_fn for y in tensors(out) if y.grad_fn and hasattr(y, "_known")}
        return out

    def foreign(self, x: Tensor) -> None:
        """Check that a tensor of unknown origin does not come of the samples."""
        below = nodes_below([x.grad_fn], self.clean)
        if not self.marked.isdisjoint(below):
            raise Unsupported("a tensor comes from the samples by a way that was not seen")
        self.clean.update(below)


def by_rows(problem: BoundProblem, run: Run, leaves: list[Tensor]) -> tuple[Any, Any]:
    """Losses `[N]` whose derivatives are the rows of a Jacobian; and aux."""
    if run.criterion is not None:
        raise Unsupported(NO_COLUMNS)
    params, followed = [run.alias(p) for p in problem.leaves], Followed(run)
    out, aux = problem.call(followed, params)
    if not isinstance(out, Tensor) or out.shape != (run.n,) or not out.requires_grad or problem.loss is not None:
        raise Unsupported("f does not return [N] losses")
    known = getattr(out, "_known", None)
    if known is None:
        followed.foreign(out)
    if not followed.blended if known is None else known.axis != (-1, 1, 1):
        raise Unsupported("the samples are mixed, or do not reach the result")
    run.closed_over = _closed_over(out, params)
    eye, copies = torch.eye(run.n, dtype=out.dtype, device=out.device), _copies(problem, run)
    rows = zip(*[run.rows(out, params, [some], run.deep) for some in eye.split(ROWS)], strict=True)
    pairs = [(copy, torch.cat(each)) for copy, each in zip(copies, rows, strict=True) if each[0] is not None]
    out = reduce(torch.add, [(copy * each).flatten(1).sum(1) for copy, each in pairs])
    return _known(problem, run, leaves, copies, out), aux
