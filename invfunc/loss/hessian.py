"""From a loss to the columns of its gradient and Hessian in the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds, tree
from invfunc._torch.functorch import (
    dispatched,
    graph_of,
    innermost,
    mapped,
    node_of,
    nodes_below,
    nodes_of,
    rows_of,
    storage_of,
    transforming,
    version,
)
from invfunc._torch.values import HALF, anywhere, check, checked_at_once, wide
from invfunc.errors import ArgumentError, ConvexityError, SplitError, written
from invfunc.loss.square_root import (
    Affine,
    Columns,
    Elementwise,
    FormedColumns,
    General,
    OutputCotangents,
    Softmax,
)
from invfunc.operations.axis import back, exposed
from invfunc.operations.forms import TwiceDifferentiable, reduction
from invfunc.operations.operation import argument, known

Scope = Any
"""A context that takes derivatives (`grad`) and gives values to the outside (`leave`)."""
Output = Any
"""An output of the model: its `ordinal`, `value` and `axis`, and the `edge` and `node` of its own in the graph."""
Term = Any
"""The call of a criterion of outputs: its `input` and `output`, and the `roots` of which it is."""


def pulled_back(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], cotangents: Sequence[torch.Tensor], **options: Any
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad`, which says what has no further derivative."""
    try:
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True, **options)
    except RuntimeError as error:
        raise once_only(error, outputs) from error


def pulled_rows(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], columns: Sequence[torch.Tensor], graph: bool, plain: bool
) -> list[torch.Tensor | None]:
    """Pull several vectors back, `[V, *output]` at each output; outside of torch.func (`plain`) by an older vmap, which
    that does not know, and which needs less memory."""
    pull = partial(pulled_back, outputs, inputs, retain_graph=True, create_graph=graph)
    missing = list[bool]()

    def one(*column: torch.Tensor) -> list[torch.Tensor]:
        found = pull(column)
        missing[:] = [g is None for g in found]
        return [g for g in found if g is not None]

    try:
        if plain:
            return [*rows_of(outputs, columns, inputs, graph)]
        found = iter(mapped(one)(*columns))  # which can return nothing but tensors
        return [None if none else next(found) for none in missing]
    except RuntimeError:  # no batching rule for a derivative
        each = [*zip(*[pull(column) for column in zip(*columns, strict=True)], strict=True)]
        return [None if g[0] is None else torch.stack(g) for g in each]


def once_only(error: RuntimeError, outputs: Sequence[Any]) -> Exception:
    """The error of a derivative, which says so where torch has none."""
    told = isinstance(error, NotImplementedError)
    if not told and all(type(node).__name__ != "NotImplemented" for y in outputs for node in graph_of(y)):
        return error
    return ArgumentError(
        f"torch cannot differentiate an operation of f or the loss twice ({error}). Write it in other operations."
    )


def gradient(scope: Scope, result: torch.Tensor, roots: list[Output], n: int) -> FormedColumns:
    """The gradient of the result in the outputs."""
    found = scope.grad([result], [r.edge for r in roots], [torch.ones_like(result)], batched=False)
    values = zip(roots, found, strict=True)
    return FormedColumns({r.ordinal: exposed(scope.leave(g), r.axis, n)[None] for r, g in values if g is not None})


def hessian(
    scope: Scope, result: torch.Tensor, roots: list[Output], terms: list[Term], n: int, convex: bool = True
) -> list[Columns]:
    """The columns of the Hessian of the result in the outputs; `convex` says that it has to be positive."""
    by_ordinal = {r.ordinal: r for r in roots}
    terms = [p for p in terms if p.roots <= by_ordinal.keys()]
    found = structured(scope, result, roots, terms)
    if found is None:
        return [_general(scope, result, roots, n, convex)]
    found = [(p, c) for p, c in found if p.input.numel()]  # a mask may select no sample
    made = partial(_columns_of, scope, found, by_ordinal, n, convex)
    if len(found) < 2:
        return made()
    try:
        with checked_at_once():
            return made()
    except ConvexityError:
        return [_general(scope, result, roots, n, convex)]  # a difference of losses may be convex


def _columns_of(
    scope: Scope,
    terms: list[tuple[Term, torch.Tensor]],
    roots: dict[int, Output],
    n: int,
    convex: bool,
) -> list[Columns]:
    return [columns(scope, p, c, [roots[i] for i in sorted(p.roots)], n, convex) for p, c in terms]


def structured(
    scope: Scope, result: torch.Tensor, roots: list[Output], terms: list[Term]
) -> list[tuple[Term, torch.Tensor]] | None:
    """Each term with the gradient of the result in its output; None unless the result is affine in just these."""
    if any(version(p.output) != p.version for p in terms):
        return None
    outputs = {id(p.output): p.output for p in terms if p.output.requires_grad}
    nodes, stops = {r.node for r in roots}, {node_of(x) for x in outputs.values()}
    around = not nodes.isdisjoint(nodes_of([result], stops))
    if not outputs or len({id(p.output) for p in terms}) < len(terms) or around:
        return None
    found = scope.grad([result], list(outputs.values()), [torch.ones_like(result)], batched=False, create_graph=True)
    slopes = dict(zip(outputs, found, strict=True))
    if any(c is not None and _varies(scope, c, roots, nodes) for c in slopes.values()):
        return None
    used = [(p, slopes.get(id(p.output))) for p in terms]
    return [(p, scope.leave(c)) for p, c in used if c is not None]


_LINEAR = {"NllLossBackwardBackward0", "NllLoss2DBackwardBackward0"}
"""Derivatives of slopes that do not depend on what the loss is of, with a second edge to it, through which go zeros."""


def _varies(scope: Scope, slope: torch.Tensor, roots: list[Output], nodes: set[Any]) -> bool:
    """Tells whether a slope depends on the outputs."""
    linear = {node: [node.next_functions[0][0]] for node in nodes_of([slope]) if node.name() in _LINEAR}
    if not slope.requires_grad or nodes.isdisjoint(nodes_below([node_of(slope)], known=linear)):
        return False
    weights = torch.arange(1, slope.numel() + 1, device=slope.device).to(slope.dtype).cos().reshape(slope.shape)
    found = scope.grad([slope], [r.edge for r in roots], [weights], batched=False)
    return any(g is not None and anywhere(g != 0) for g in found)


def columns(scope: Scope, term: Term, slope: torch.Tensor, roots: list[Output], n: int, convex: bool = True) -> Columns:
    """The columns of one term, whose output comes with a slope; without roots, those at its own input."""
    if version(term.input) != term.read:
        raise written()
    slope = slope.float() if slope.dtype in HALF else slope
    if term.kind == "elementwise":
        made: Columns = _elementwise(scope, term, slope, n, convex)
    else:
        weight = _class_weight(term, slope) if term.kind == "softmax" else -_over_classes(term, slope)
        made = _softmax(scope, term, weight, n, convex)
    if term.at_root or not roots:
        return made

    def pull(columns: torch.Tensor, part: slice) -> OutputCotangents:
        found = scope.grad([term.input], [r.edge for r in roots], [back(columns, term.input.shape, term.axis, n)])
        pairs = zip(roots, found, strict=True)
        return {r.ordinal: exposed(scope.leave(g), r.axis, n, 1)[:, part] for r, g in pairs if g is not None}

    return Affine(made, term.root, [r.ordinal for r in roots], pull)


def _elementwise(scope: Scope, term: Term, slope: torch.Tensor, n: int, convex: bool) -> Elementwise:
    diagonal, entry = _closed(term, slope, scope), known(term.name)
    if diagonal is None:
        x, output = _wide(term)
        (first,) = scope.grad([output], [x], [slope.to(output.dtype)], batched=False, create_graph=True)
        assert first is not None
        (second,) = scope.grad([first], [x], [torch.ones_like(first)], batched=False)
        second = torch.zeros_like(x) if second is None else second
        diagonal = scope.leave(second.masked_fill(first.isnan(), torch.nan) if entry.cornered else second)
    if convex:
        check_sign(diagonal, term.name)
    logits = exposed(scope.leave(term.input), term.axis, n)
    return Elementwise(term.root, exposed(diagonal, term.axis, n), entry.predictive, logits)


def _closed(term: Term, slope: torch.Tensor, scope: Scope) -> torch.Tensor | None:
    """The second derivatives of the two most frequent losses by their formulas."""
    x = term.input
    target, weight = term.arg("target"), term.arg("weight")
    if term.func not in (F.mse_loss, F.binary_cross_entropy_with_logits) or target.shape != x.shape:
        return None
    k = slope / x.numel() if reduction(term) == "mean" else slope
    if term.func is F.mse_loss:
        return None if weight is not None else (2 * k).expand(x.shape)
    p, more = scope.leave(wide(x)).sigmoid(), term.arg("pos_weight")
    h = p * (1 - p) if more is None else p * (1 - p) * (1 + (more - 1) * target)
    return (k * h if weight is None else k * h * weight).expand(x.shape)


def _wide(term: Term) -> tuple[torch.Tensor, torch.Tensor]:
    """The input and the output, in float32 at least: p (1 - p) is 0 in bfloat16 for all p above 0.998."""
    if term.input.dtype not in HALF:
        return term.input, term.output
    low, x = term.input, term.input.float()

    def single(a: torch.Tensor) -> torch.Tensor:
        return x if a is low else a.float() if a.is_floating_point() else a

    args, kwargs = tree.map_tensors(single, (term.args, term.kwargs))
    with TwiceDifferentiable():
        return x, term.func(*args, **kwargs)


def _class_dim(term: Term) -> int:
    x = term.input
    if term.kind == "softmax":
        return 0 if x.ndim == 1 else 1
    dim = term.arg("dim")
    if dim is None:
        raise SplitError("`log_softmax` needs its dim said.")
    return dim % x.ndim


def _over_classes(term: Term, slope: torch.Tensor) -> torch.Tensor:
    return slope.sum(_class_dim(term))


def _class_weight(term: Term, slope: torch.Tensor) -> torch.Tensor:
    """k of a cross entropy: the weight of the targets at each position, in the scale of the reduction."""
    x, target = term.input, term.arg("target")
    dim = _class_dim(term)
    classes = x.shape[dim]
    weights, ignore = term.arg("weight"), term.arg("ignore_index", -100)
    reduced = reduction(term)
    if weights is None and not target.is_floating_point():  # all that are not ignored count the same
        met = target != ignore
        return torch.where(met, slope / met.sum() if reduced == "mean" else slope, 0)
    smoothing = term.arg("label_smoothing", 0.0)
    w = slope.new_ones(classes) if weights is None else weights.to(slope.dtype)
    if target.is_floating_point():
        mass = target * (1 - smoothing) + smoothing / classes
        met = torch.tensordot(mass.movedim(dim, -1).to(w.dtype), w, 1)
        size = torch.ones_like(met).sum()
    else:
        valid = target != ignore
        drawn = torch.where(valid, w[torch.where(valid, target, 0)], 0)
        size = drawn.sum()
        met = drawn * (1 - smoothing) + torch.where(valid, w.sum() * smoothing / classes, 0)
    scale = slope / size if reduced == "mean" else slope
    return scale * met if reduced != "mean" else torch.where(met == 0, 0, scale * met)


def row_blocks(dim: int, *tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Blocks `[r, C]` of rows along a dim of tensors, in their own memory, that fit the cache several times."""
    rows = [x.movedim(dim, -1) for x in tensors]
    try:
        rows = [x.view(1, -1, x.shape[-1]) for x in rows]
    except RuntimeError:  # samples and what is in them are no single dim
        rows = [x.reshape(len(x), -1, x.shape[-1]) for x in rows]
    size = thresholds.CACHE.get(rows[0].device.type, thresholds.ELSEWHERE) // 8
    step = max(1, size // max(1, rows[0].shape[-1]))
    for some in zip(*rows, strict=True):
        for start in range(0, len(some[0]), step):
            yield [x[start : start + step] for x in some]


class RowsCrossEntropy(torch.autograd.Function):
    """The cross entropy at each position, whose graph keeps the logits alone, not the logarithms of probabilities."""

    @staticmethod
    def forward(x: torch.Tensor, target: torch.Tensor, ignored: int) -> torch.Tensor:
        blocks = row_blocks(1, x, target.unsqueeze(1))
        each = [F.cross_entropy(z, y[:, 0], ignore_index=ignored, reduction="none") for z, y in blocks]
        return torch.cat(each).view(target.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])
        ctx.ignored = inputs[2]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, target = ctx.saved_tensors

        def slope(z: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            g, y = g.where(y != ctx.ignored, 0), y.where(y != ctx.ignored, 0)
            return (z.softmax(1) * g).scatter_add(1, y, -g)

        y, g = target.unsqueeze(1), slopes[0].unsqueeze(1)
        if torch.is_grad_enabled():
            return slope(x, y, g), None, None
        out = torch.empty_like(x)
        for *given, made in row_blocks(1, x, y, g, out):
            made.copy_(slope(*given))
        return out, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        x, target = ctx.saved_tensors
        each = list[torch.Tensor]()
        for z, y, t in row_blocks(1, x, target.unsqueeze(1), tangent):
            met = y != ctx.ignored
            each.append((((z.softmax(1) * t).sum(1, keepdim=True)) - t.gather(1, y.where(met, 0))).where(met, 0))
        return torch.cat(each).view(target.shape)


def by_rows(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """The result of a criterion of many numbers: a cross entropy of classes, rows at a time."""
    arg = partial(argument, func, args, kwargs)
    x, target, more = arg("input"), arg("target"), (arg("weight"), arg("label_smoothing", 0.0))
    alike = func is F.cross_entropy and more == (None, 0.0) and target.shape == x[:, :1].squeeze(1).shape
    if not alike or target.is_floating_point() or x.dtype in HALF or transforming() or dispatched():
        return func(*args, **kwargs)
    ignored, reduced = arg("ignore_index", -100), reduction(SimpleNamespace(args=args, kwargs=kwargs))
    losses = RowsCrossEntropy.apply(x, target, ignored)
    total = losses if reduced == "none" else losses.sum()
    return total / (target != ignored).sum() if reduced == "mean" else total


def softmax_product(
    term: Term, slope: torch.Tensor, sure: bool
) -> Callable[[torch.Tensor, Sequence[torch.Tensor], bool], torch.Tensor]:
    """The Hessian `k (diag p - p p^T)` of a cross entropy in its logits, as a product `(u, others, several)` without
    derivatives: p is formed for some rows at a time, and the product written over u, unless that shares its memory
    with others. An axis in front counts `several` u."""
    x, weight, dim = term.input.detach(), _class_weight(term, slope).detach(), _class_dim(term)
    if not sure:
        check_sign(weight, term.name)
    if x.ndim == 1:
        x, weight, dim = x.unsqueeze(0), weight.unsqueeze(0), 1

    @torch.no_grad()
    def product(u: torch.Tensor, others: Sequence[torch.Tensor], several: bool) -> torch.Tensor:
        laid = u.is_contiguous() or (u.shape == x.shape and u.movedim(dim, -1).is_contiguous())
        own = laid and all([storage_of(v) != storage_of(u) for v in others])
        out = u if own else torch.empty_like(u, memory_format=torch.contiguous_format)
        for given, made in zip(u, out, strict=True) if several else [(u, out)]:
            each = x, weight.unsqueeze(dim), given.reshape(x.shape), made.view(x.shape)
            for z, k, t, made_here in row_blocks(dim, *each):
                p = wide(z).softmax(1)
                h = p * t
                h -= p.mul_(h.sum(1, keepdim=True))
                made_here.copy_(h.mul_(k))
        return out

    return product


def _softmax(scope: Scope, term: Term, weight: torch.Tensor, n: int, convex: bool) -> Softmax:
    """Bring logits to `[n, C, positions]` and the weights to `[n, positions]`."""
    dim, (at, *rows) = _class_dim(term), term.axis
    if convex:
        check_sign(weight, term.name)
    x = scope.leave(term.input)
    logits = exposed(wide(x), term.axis, n)
    one = logits.shape[1:]
    flat = logits.movedim(1 + dim, 1).flatten(2) if logits.ndim > 2 else logits.unsqueeze(2)

    def layout(columns: torch.Tensor) -> torch.Tensor:
        rest = [s for d, s in enumerate(one) if d != dim]
        return columns.reshape(*columns.shape[:3], *rest).movedim(2, 2 + dim)

    w = exposed(scope.leave(weight), (at + (dim > at + x.ndim), *rows), n)
    return Softmax(term.root, flat, w.reshape(n, -1), layout)


def _general(scope: Scope, result: torch.Tensor, roots: list[Output], n: int, convex: bool) -> General:
    values, edges = [r.value for r in roots], [r.edge for r in roots]
    shapes = {r.ordinal: exposed(r.value, r.axis, n).shape[1:] for r in roots}
    sizes = [math.prod(s) for s in shapes.values()]
    total = sum(sizes)
    if n * total * total > thresholds.HESSIAN:
        raise SplitError(
            f"the loss has no known structure, and its Hessian over {total} outputs of {n} samples would take "
            f"{n * total * total:.1e} numbers. Use one of torch's convex losses, or fewer outputs."
        )
    first = scope.grad([result], edges, [torch.ones_like(result)], batched=False, create_graph=True)
    eye = torch.eye(total, dtype=values[0].dtype, device=values[0].device)
    units = [
        back(u.reshape(total, 1, *s).expand(total, n, *s), r.value.shape, r.axis, n)
        for r, s, u in zip(roots, shapes.values(), eye.split(sizes, dim=1), strict=True)
    ]
    pairs = [(g, u) for g, u in zip(first, units, strict=True) if g is not None and g.requires_grad]
    found = scope.grad([g for g, _ in pairs], edges, [u for _, u in pairs])
    rows = [
        torch.zeros(total, n, m, dtype=eye.dtype, device=eye.device)
        if h is None
        else exposed(scope.leave(h), r.axis, n, 1).reshape(total, n, m)
        for h, r, m in zip(found, roots, sizes, strict=True)
    ]
    joint = torch.cat(rows, 2).movedim(0, 2)
    if convex:
        _check_convex(joint)
    return General(shapes, joint)


def check_sign(values: torch.Tensor, name: str) -> None:
    raw = innermost(values.detach())
    largest = raw.abs().nan_to_num(0, 0, 0).amax() if raw.numel() else 0  # a sample with NaN hides no other
    text = f"the result is not convex in the outputs: `{name}` comes with a negative factor."
    check(raw < -16 * torch.finfo(raw.dtype).eps * largest, lambda: ConvexityError(text))


def _check_convex(h: torch.Tensor) -> None:
    """A Cholesky factor exists if the Hessian is positive semi-definite up to rounding."""
    if not h.numel():
        return
    detached = h.detach().to(torch.promote_types(h.dtype, torch.float32))
    finite = detached.isfinite().all(2).all(1)
    # Of the whole batch: of a sample that is classified for sure there are rounding errors alone.
    scale = 2 * detached.abs().amax((1, 2)).masked_fill(~finite, 0).amax()
    eps = min(0.05, torch.finfo(h.dtype).eps * 32 * h.shape[-1] ** 0.5)  # bfloat16 would allow anything
    eye = torch.eye(h.shape[-1], dtype=detached.dtype, device=h.device)
    shift = scale * eps + torch.finfo(h.dtype).tiny
    info = torch.linalg.cholesky_ex((detached + detached.mT) / 2 + shift * eye).info
    text = (
        "the loss is not convex in the outputs, so it has no generalised Gauss-Newton matrix. Move the outputs "
        "behind what makes it so with `outputs(z)`, or use a loss that is convex in them. If it is a softmax written "
        "by hand, its Hessian has rounding errors where all samples are classified for sure; torch's `cross_entropy` "
        "has none."
    )
    check((info != 0) & finite, lambda: ConvexityError(text))
