"""Short rules, one for each family of operations: its batch axis, and what it reads of parameters.

A rule of the first kind is `rule(n, data, args, kwargs, out) -> axis`, given the pairs of tensor and axis of the
arguments with samples; one of the second kind is `rule(run, args, kwargs, nodes, axes, axis, func) -> uses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from invfunc._torch.functorch import version
from invfunc._torch.values import wide
from invfunc.core.marks import SUMMED, Known, Node, Run, Unsupported, named, option, tensors
from invfunc.core.uses import Block, Convolution, Expanded, ProductUse, TableRows, Transposed, Use
from invfunc.operations.axis import Axis, Order, front, numbers, read
from invfunc.operations.forms import TwiceDifferentiable


def same(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """The axis of all operands of a pointwise operation."""
    axis = data[0][1]
    if type(out) is tuple:
        raise Unsupported("where some entries are depends on all samples")
    for x, other in data[1:]:
        if other != axis:
            raise Unsupported(f"it combines samples {_along(*data[0])} with samples {_along(x, other)}")
    return axis


def _along(x: torch.Tensor, axis: Axis) -> str:
    """The axis of the samples of a tensor, in a message."""
    return f"along axis {axis[0] + x.ndim} of a tensor {list(x.shape)}"


def along(place: int, default: int | None = None) -> Any:
    """A rule of operations that work along one of the other dims, as softmax does."""

    def rule(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
        x, axis = data[0]
        dim = option(args, kwargs, place, "dim", default)
        if len(data) > 1 or not isinstance(dim, int) or dim % x.ndim - x.ndim == axis[0]:
            raise Unsupported("it computes over the sample axis")
        return axis

    return rule


def reduction(linear: bool = False) -> Any:
    """A rule of reductions over other dims; `linear` ones may sum the samples."""

    def rule(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
        if len(data) > 1 or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            return same(n, data, args, kwargs, out)  # maximum(x, y)
        x, (at, outer, inner) = data[0]
        dims = option(args, kwargs, 1, "dim", kwargs.get("axis"))
        left = next(iter(tensors(out))).ndim
        keep = x.ndim == left
        if isinstance(dims, (bool, torch.dtype, type(None))) or dims == () or dims == []:
            dims = range(x.ndim)
        elif len(args) > 2 and all(isinstance(d, int) and not isinstance(d, bool) for d in args[1:]):
            dims = args[1:]
        dims = {d % x.ndim - x.ndim for d in ((dims,) if isinstance(dims, int) else dims)}
        if not keep and left != x.ndim - len(dims):
            raise Unsupported("it reduces other dims")
        if at in dims:
            if linear:
                return SUMMED
            raise Unsupported("it reduces over the sample axis")
        return (at if keep else at + sum(d > at for d in dims), outer, inner)

    return rule


def reshaped(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """The dim in whose steps the samples are after a reshape, which keeps the order of the entries."""
    x, (at, outer, inner) = data[0]
    shape, new = x.shape, out.shape
    if shape == new:
        return data[0][1]
    if shape.numel() != new.numel():
        raise Unsupported("the bytes are read as another type")
    if isinstance(outer, Order):
        return found(numbers(shape, data[0][1], n, x.device).reshape(new), n)
    step = inner * math.prod(shape[x.ndim + at + 1 :])
    below = 1
    for j in range(len(new) - 1, -1, -1):
        above = below * new[j]
        if below <= step and step * n <= above and step % below == 0 and above % (step * n) == 0:
            return (j - len(new), above // (step * n), step // below)
        below = above
    raise Unsupported(f"the samples of {tuple(shape)} are split by {tuple(new)}")


def reshaped_in_place(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Methods as `unsqueeze_`, after which the old shape is not known."""
    raise Unsupported("the shape is changed in place")


def permuted(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`permute(x, dims)` and `x.permute(*dims)`."""
    x, (at, outer, inner) = data[0]
    dims = option(args, kwargs, 1, "dims")
    dims = args[1:] if isinstance(dims, int) else dims
    return ([d % x.ndim for d in dims].index(x.ndim + at) - x.ndim, outer, inner)


def swapped(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Two dims that change places, by default the last two."""
    x, (at, outer, inner) = data[0]
    dims = args[1:] or tuple(kwargs.values()) or (-1, -2)
    i, j = (d % x.ndim - x.ndim for d in dims)
    return ({i: j, j: i}.get(at, at), outer, inner)


def reversed_(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`x.T`, by which all dims change places."""
    x, (at, outer, inner) = data[0]
    return (-x.ndim - 1 - at, outer, inner)


def expanded(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """New dims in front."""
    return data[0][1]


def first(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Layers whose dim 0 is the batch: convolutions, pooling, norms in eval mode."""
    x, (at, outer, inner) = data[0]
    if len(data) > 1 or x is not args[0] or at != -x.ndim:
        raise Unsupported("the samples are not in dim 0")
    return (-(out[0] if isinstance(out, tuple) else out).ndim, outer, inner)


def steps(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """All steps of a recurrent layer, `[steps, samples, units]`."""
    if any(axis != (-2, 1, 1) for _, axis in data):
        raise Unsupported("its states are of other samples")
    return (-2, 1, 1)


def convolution(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Convolutions of a batch; those of one image have their channels in dim 0."""
    if args[0].ndim != option(args, kwargs, 1, "weight").ndim:
        raise Unsupported("the samples are channels")
    return first(n, data, args, kwargs, out)


def spatial(dims: int) -> Any:
    """A rule of operations in the last dims, as pooling is, which treat all others alike."""

    def rule(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
        if data[0][1][0] >= -dims:
            raise Unsupported("the samples are positions")
        return data[0][1]

    return rule


def batch_norm(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Batch norm, which mixes samples in train mode."""
    if option(args, kwargs, 5, "training", False):
        raise Unsupported(
            "it computes with all samples in train mode (take functional(model, train=False), or GroupNorm)"
        )
    return first(n, data, args, kwargs, out)


def instance_norm(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Instance norm with statistics of each instance."""
    if option(args, kwargs, 5, "use_input_stats", True) and option(args, kwargs, 1, "running_mean") is not None:
        raise Unsupported("running statistics are updated with all samples")
    return first(n, data, args, kwargs, out)


def layer_norm(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Norms over the last dims."""
    (_, axis), *more = data
    if more or axis[0] >= -len(option(args, kwargs, 1, "normalized_shape")):
        raise Unsupported("it normalises over the samples")
    return axis


def linear(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`linear(x, w, b)`."""
    (x, (at, outer, inner)), *more = data
    if more or x is not args[0]:
        raise Unsupported("weights that depend on samples")
    w = args[1] if len(args) > 1 else kwargs["weight"]
    return SUMMED if at == -1 else (at + (w.ndim == 1), outer, inner)


def matmul(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Products of (batches of) matrices and vectors."""
    a, b = args[0], option(args, kwargs, 1, "other", kwargs.get("mat2"))
    found = set()
    for x, (at, outer, inner) in data:
        place = None
        if x is a:
            place = None if at == -1 else (-1 if b.ndim == 1 else -2) if at == -2 else at + (b.ndim == 1)
        if x is b and x is not a:
            place = None if at == (-1 if b.ndim == 1 else -2) else -1 if at == -1 else at + (a.ndim == 1)
        if x is a and x is b and at in (-1, -2):
            raise Unsupported("products of samples")
        found.add((place, outer, inner))
    if len(found) > 1:
        raise Unsupported("products of samples")
    place, outer, inner = found.pop()
    return SUMMED if place is None else (place, outer, inner)


def factors_of(args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of `addmm`, `baddbmm`, and `addmv`."""
    first = option(args, kwargs, 1, "mat1", kwargs.get("batch1", kwargs.get("mat")))
    return first, option(args, kwargs, 2, "mat2", kwargs.get("batch2", kwargs.get("vec")))


def addmm(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`addmm(c, a, b)`."""
    marks, given = {id(x): axis for x, axis in data}, factors_of(args, kwargs)
    factors = [(x, marks[id(x)]) for x in given if id(x) in marks]
    axis = matmul(n, factors, given, {}, out) if factors else marks[id(args[0])]
    if marks.get(id(args[0]), axis) != axis:
        raise Unsupported("operands have their samples in different dims")
    return axis


def letters(equation: str, shapes: list[Any]) -> tuple[list[str], str]:
    """The subscripts of the operands and of the result of an einsum, without ellipses."""
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    ins = left.split(",")
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    most = max([len(s) - len(i.replace("...", "")) for i, s in zip(ins, shapes, strict=True) if "..." in i], default=0)
    full = []
    for i, s in zip(ins, shapes, strict=True):
        count = len(s) - len(i.replace("...", ""))
        full.append(i.replace("...", "".join(spare[most - count : most])))
    if not arrow:
        once = sorted(c for c in set("".join(ins)) - {"."} if "".join(ins).count(c) == 1)
        result = "..." * any("..." in i for i in ins) + "".join(once)
    return full, result.replace("...", "".join(spare[:most]))


def operands(args: tuple) -> list[torch.Tensor]:
    """The operands of an einsum."""
    return list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])


def einsum(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """The dim of the letter of the samples."""
    given = operands(args)
    ins, result = letters(args[0], [x.shape for x in given])
    marks = {id(x): axis for x, axis in data}
    found = {(s[marks[id(x)][0]], *marks[id(x)][1:]) for s, x in zip(ins, given, strict=True) if id(x) in marks}
    if len(found) > 1:
        raise Unsupported("products of samples")
    letter, outer, inner = found.pop()
    return (result.index(letter) - len(result), outer, inner) if letter in result else SUMMED


def attention(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """Scaled dot-product attention, whose batch dims are all but the last two."""
    axis = same(n, data, args, kwargs, out)
    if axis[0] >= -2:
        raise Unsupported("attention between samples")
    return axis


def joined(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`cat` along another dim, where all parts have samples."""
    axis = same(n, data, args, kwargs, out)
    if option(args, kwargs, 1, "dim", kwargs.get("axis", 0)) % out.ndim - out.ndim == axis[0]:
        raise Unsupported("samples are joined along their axis")
    return axis


def stacked(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """A new dim, of which those on the left move on."""
    at, outer, inner = same(n, data, args, kwargs, out)
    dim = option(args, kwargs, 1, "dim", 0) % out.ndim - out.ndim
    return (at if dim < at else at - 1, outer, inner)


def parts(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`chunk` and `split` along another dim."""
    x, axis = data[0]
    if option(args, kwargs, 2, "dim", 0) % x.ndim - x.ndim == axis[0]:
        raise Unsupported("the samples are split")
    return axis


def dropped(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`select` and `unbind`, by which a dim goes."""
    x, (at, outer, inner) = data[0]
    dim = option(args, kwargs, 1, "dim", 0) % x.ndim - x.ndim
    if dim == at:
        raise Unsupported("single samples are picked")
    return (at + (dim > at), outer, inner)


def indexed(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Axis | None:
    """Indexing by numbers and slices; None where tensors are indices, which are followed by their values."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    x, (at, outer, inner) = data[0]
    if x is args[1] and x.dtype == torch.long and len(data) == 1:
        return (at - args[0].ndim + 1, outer, inner)  # a table, by samples
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return None
    gap = x.ndim - sum(i is not None and i is not Ellipsis for i in index)
    if not any(i is Ellipsis for i in index):
        index = (*index, Ellipsis)
    dim, kept, place = -x.ndim, 0, 0
    for i in index:
        if i is None:
            kept += 1
        elif i is Ellipsis:
            if dim <= at < dim + gap:
                place = kept + at - dim
            dim, kept = dim + gap, kept + gap
        else:
            if dim == at:
                if not isinstance(i, slice) or i.indices(x.shape[at]) != (0, x.shape[at], 1):
                    raise Unsupported("some of the samples are picked")
                place = kept
            dim, kept = dim + 1, kept + isinstance(i, slice)
    return (place - out.ndim, outer, inner)


def pointwise_loss(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`mse_loss` and its like."""
    axis = same(n, data, args, kwargs, out)
    return axis if out.ndim else SUMMED


def class_loss(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`cross_entropy` and `nll_loss`, with classes in dim 1 and samples in dim 0 of all."""
    found = {(at == -x.ndim, outer, inner) for x, (at, outer, inner) in data}
    if len(found) > 1 or not next(iter(found))[0] or (data[0][0] is args[0] and args[0].ndim == 1):
        raise Unsupported("the samples are not in dim 0")
    _, outer, inner = found.pop()
    return (-out.ndim, outer, inner) if out.ndim else SUMMED


def row_loss(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`cosine_embedding_loss` and its like, of rows with the samples in dim 0."""
    if args[0].ndim < 2 or any(axis != (-x.ndim, 1, 1) for x, axis in data):
        raise Unsupported("the samples are not the rows")
    return (-1, 1, 1) if out.ndim else SUMMED


def embedding(n: int, data: list[Known], args: tuple, kwargs: dict, out: Any) -> Any:
    """`embedding(index, table)`: a dim more."""
    (x, (at, outer, inner)), *more = data
    if more or x is not args[0]:
        raise Unsupported("tables that depend on samples")
    return (at - 1, outer, inner)


def single(data: list[Known]) -> bool:
    """Tells whether all tensors are of single samples."""
    return all([-axis[0] > x.ndim for x, axis in data])


def found(known: torch.Tensor, n: int) -> Axis:
    """The axis from the sample of each entry, which has to be along one dim."""
    axis = read(known, n)
    if axis is None:
        raise Unsupported("the samples are not along one dim of the result")
    return axis


# How operations read parameters; None where a rule does not say

Nodes = dict[int, Node]


def each(value: Any, count: int) -> tuple[int, ...]:
    """An option of a convolution, for each dim."""
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def of_linear(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`linear(x, w, b)`."""
    if len(args) == 3:
        x, w, b = args
    else:
        x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    uses: list[Use] = []
    if id(w) in nodes:
        if w.ndim != 2:
            return None
        pair = ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, None, None, ((), (0,), (1,)))
        pair.layer = True
        uses.append(pair)
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis))
    return uses


def _by_letters(
    run: Run, nodes: Nodes, w: torch.Tensor, x: torch.Tensor, ws: str, xs: str, outs: str, axes: Any, axis: Axis
) -> Any:
    """A product of one parameter and one tensor with samples."""
    if len(set(ws)) < len(ws) or len(set(xs)) < len(xs):
        return None
    sample = xs[axes[id(x)][0]]
    g = [c for c in ws if c in xs and c in outs]
    k = [c for c in ws if c in xs and c not in outs]
    o = [c for c in ws if c not in xs and c in outs]
    p = [c for c in outs if c in xs and c not in ws]
    if len(g) + len(k) + len(o) < len(ws) or len(p) + len(g) + len(k) < len(xs) or (sample not in p and run.n > 1):
        return None

    def at(labels: list[str], of: str) -> tuple[int, ...]:
        return tuple(of.index(c) - len(of) for c in labels)

    of_a, of_d = (at(g, xs), at(p, xs), at(k, xs)), (at(g, outs), at(p, outs), at(o, outs))
    of_w = tuple(tuple(ws.index(c) for c in labels) for labels in (g, o, k))
    return [ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, of_a, of_d, of_w)]  # pyright: ignore[reportArgumentType]: three


def of_matmul(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """Products of (batches of) matrices and vectors."""
    a, b = args[0], option(args, kwargs, 1, "other", kwargs.get("mat2"))
    most = max(a.ndim, b.ndim) - 2
    batch = "ABCDEFGH"[: max(most, 0)]
    of_a = "k" if a.ndim == 1 else batch[len(batch) - a.ndim + 2 :] + "mk"
    of_b = "k" if b.ndim == 1 else batch[len(batch) - b.ndim + 2 :] + "ko"
    outs = batch + "m" * (a.ndim > 1) + "o" * (b.ndim > 1)
    (w, ws, x, xs) = (a, of_a, b, of_b) if id(a) in nodes else (b, of_b, a, of_a)
    if id(x) not in axes:
        return None
    if w is b and b.ndim == 2 and axes[id(x)][0] != -1 and x.ndim > 1:
        return [ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, None, None, ((), (1,), (0,)))]
    if any(w.shape[i] != x.shape[i] for i in range(-min(w.ndim, x.ndim), -2)):
        return None
    return _by_letters(run, nodes, w, x, ws, xs, outs, axes, axis)


def of_addmm(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`addmm(c, a, b)`."""
    if len(args) + len(kwargs) != 3 or kwargs.keys() - {"mat1", "mat2"}:
        return None
    uses: list[Use] = [Expanded(nodes[id(args[0])], args[0], axis)] if id(args[0]) in nodes else []
    a, b = factors_of(args, kwargs)
    if id(a) in nodes or id(b) in nodes:
        more = of_matmul(run, (a, b), {}, nodes, axes, axis, func)
        return None if more is None else uses + more
    return uses


def of_einsum(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """An einsum of a parameter and a tensor."""
    given = operands(args)
    if len(given) != 2 or len(nodes) != 1 or len(axes) != 1:
        return None
    ins, outs = letters(args[0], [x.shape for x in given])
    (w, ws), (x, xs) = [*zip(given, ins, strict=True)][:: 1 if id(given[0]) in nodes else -1]
    sizes = dict(zip(ws, w.shape, strict=True))
    if any(sizes.get(c, s) != s for c, s in zip(xs, x.shape, strict=True)):
        return None
    return _by_letters(run, nodes, w, x, ws, xs, outs, axes, axis)


def of_convolution(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`conv2d(x, w, b, stride, padding, dilation, groups)` and its like."""
    x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    rest = w.ndim - 2
    if x.ndim != w.ndim or id(x) not in axes:
        return None
    stride, dilation = (each(option(args, kwargs, i, name, 1), rest) for i, name in ((3, "stride"), (5, "dilation")))
    padding, groups = option(args, kwargs, 4, "padding", 0), option(args, kwargs, 6, "groups", 1)
    if padding == "valid":
        padding = 0
    if padding == "same":
        if any((k - 1) * gap % 2 for k, gap in zip(w.shape[2:], dilation, strict=True)):
            return None
        padding = tuple((k - 1) * gap // 2 for k, gap in zip(w.shape[2:], dilation, strict=True))
    uses: list[Use] = []
    if id(w) in nodes:
        window = (stride, each(padding, rest), dilation, (0,) * rest)
        uses.append(Convolution(nodes[id(w)], w, x, axes[id(x)], axis, window, groups))
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis, view=(b.numel(), *[1] * rest)))
    return uses


def of_norm(places: tuple[int, int | None], layer: bool = False) -> Callable:
    """A rule of norms: the scale reads what is normalised, the shift is added."""

    def rule(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
        w = option(args, kwargs, places[0], "weight")
        b = option(args, kwargs, places[1], "bias") if places[1] else None
        x = args[0]
        if id(x) not in axes:
            return None
        if named(func) == "batch_norm" and option(args, kwargs, 5, "training", False):
            raise Unsupported("batch norm in train mode")
        plain, options = list(args), {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}
        for i in places:
            if i and i < len(plain):
                plain[i] = None
        before = version(x)

        def normal(run: Run, block: Block) -> torch.Tensor:
            if version(x) != before:
                raise Unsupported("what a parameter met was changed in place later")
            with TwiceDifferentiable() if run.deep else torch.no_grad():
                return wide(run.taken(front(func(run.strip(x), *plain[1:], **options), axis, run.n), block))

        uses: list[Use] = []
        for t, factor in ((w, normal), (b, None)):
            if t is not None and id(t) in nodes:
                view = tuple(t.shape) if layer else (t.numel(), *[1] * (x.ndim - 2))
                uses.append(Expanded(nodes[id(t)], t, axis, factor, view))
        return uses

    return rule


def of_embedding(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`embedding(index, table, padding_idx)`."""
    if option(args, kwargs, 3, "max_norm") is not None or option(args, kwargs, 5, "scale_grad_by_freq", False):
        raise Unsupported("embedding with max_norm or scale_grad_by_freq depends on all samples")
    table, padding = option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "padding_idx")
    if id(table) not in nodes or id(args[0]) not in axes:
        return None
    if padding is not None and padding < 0:
        padding += len(table)
    return [TableRows(nodes[id(table)], table, args[0], axes[id(args[0])], axis, padding)]


def of_index(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`w[i]`."""
    w, i = args[0], args[-1]
    if id(w) in nodes and isinstance(i, torch.Tensor) and id(i) in axes and i.dtype == torch.long and w.ndim > 0:
        return [TableRows(nodes[id(w)], w, i.remainder(len(w)), axes[id(i)], axis, None)]  # -1 is the last row
    return None


def of_transposed(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)` and its like."""
    x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    rest = w.ndim - 2
    if x.ndim != w.ndim or id(x) not in axes:
        return None
    names = (3, "stride", 1), (4, "padding", 0), (7, "dilation", 1), (5, "output_padding", 0)
    window = tuple(each(option(args, kwargs, *name), rest) for name in names)
    uses: list[Use] = []
    if id(w) in nodes:
        groups = option(args, kwargs, 6, "groups", 1)
        uses.append(Transposed(nodes[id(w)], w, x, axes[id(x)], axis, window, groups))
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis, view=(b.numel(), *[1] * rest)))
    return uses
