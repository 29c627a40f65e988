"""The diagonal of the Hessian: each operation that is nonlinear in samples gives columns at what it reads.

With `g` the gradient at the result of an operation, and `J` the Jacobian of its inputs in the parameters, the Hessian is
the sum of `J^T (sum_k g_k hess call_k) J` over all operations, of which the loss is one. A parameter that is not read
linearly, or read again by what depends on it, has more: there the entries are differentiated one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds, tree
from invfunc._torch.functorch import base_of, checkpointing, gradient_edge, version, versions
from invfunc.core.axes import numbers
from invfunc.core.columns import softmax_root
from invfunc.core.marks import SUMMED, Axis, Unsupported, arguments, named, option, tensors, wide
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.tables import DIVIDE, EXPANDS, LIKE, LINEAR, MOVES, MULTIPLY, POINTWISE, VIEWS, called
from invfunc.core.uses import WHOLE, Block, back, Convolution, Expanded, Grown, Pair, Rows, Shared, Use, formed, front, product, summed
from invfunc.linear_algebra.contract import joined
from invfunc.operations.second_derivatives import TwiceDifferentiable

Tensor = torch.Tensor

JOINTLY = (
    LINEAR
    | VIEWS
    | EXPANDS
    | MOVES
    | LIKE
    | called(
        "abs relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu clamp clip clamp_min "
        "clamp_max maximum minimum fmax fmin where masked_fill dropout dropout1d dropout2d dropout3d alpha_dropout "
        "feature_alpha_dropout positive nansum nanmean amax amin max min sort topk cummax cummin cumsum pad flip roll "
        "tril triu diag diagonal diag_embed unfold fold interpolate pixel_shuffle pixel_unshuffle channel_shuffle "
        "hstack vstack concat concatenate ravel detach copy_ fill zero type l1_loss nan_to_num "
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d max_pool1d "
        "max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices "
        "masked_select take_along_dim repeat_interleave __setitem__"
    )
)
"""Operations that are linear, perhaps piece by piece, in all that they read together."""
EACH = MULTIPLY | called(
    "matmul mm bmm mv dot linear einsum outer inner conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d bilinear prelu embedding"
)
"""Operations that are linear in each tensor that they read."""
FIRST = DIVIDE | called("nll_loss kl_div")
"""Operations that are linear in the first."""
ENTRIES = POINTWISE | called(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss "
    "soft_margin_loss"
)
"""Operations whose Hessian in one tensor is diagonal."""
ADDED = called("add sub subtract rsub radd cat stack concat where masked_fill linear conv1d conv2d conv3d")
LINEAR_IN_PARAMETERS = ADDED | EACH | called("embedding getitem addmm layer_norm rms_norm group_norm batch_norm")
LINEAR_IN_PARAMETERS |= EXPANDS | called("instance_norm")
_MOVING = {
    f"{name}Backward0" for name in "View UnsafeView Transpose Permute T Alias Unsqueeze Squeeze ReshapeAlias Clone".split()
}
"""Nodes that move entries."""


class Result:
    """The edge at a result; of a view that of its base, as a later operation in place takes the view out of the graph."""

    def __init__(self, y: Tensor) -> None:
        base = base_of(y)
        self.own = gradient_edge(y)
        self.edge = self.own if base is None else gradient_edge(base)
        self.axis, self.shape, self.form = getattr(getattr(y, "_known", None), "axis", None), y.shape, None
        if base is not None:
            if not base.is_contiguous():
                raise Unsupported("an operation whose result is a view of a tensor with gaps")
            self.form = y.shape, y.stride(), y.storage_offset() - base.storage_offset()

    def slope(self, run: Run, g: Tensor | None) -> Tensor | None:
        """The gradient at the result, given that at the edge."""
        if g is None:
            return None
        g = run.strip(g)
        return g if self.form is None else g.contiguous().as_strided(*self.form)


@dataclass(eq=False)
class Call:
    """An operation of samples, which can be run again on copies of what it read."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    values: list[Tensor]
    edges: list[Any]
    axes: list[Axis]
    outs: list[Result]
    autocast: torch.dtype | None
    before: int
    """How many uses were noted before it."""
    uses: list[Use]
    """Its own."""
    versions: list[int]

    def again(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of what it read, and its results of these."""
        given = [*arguments(self.args), *arguments(self.kwargs.values())]
        if versions(given) != self.versions:
            raise Unsupported("what a nonlinear operation read was changed in place later")
        up = wide if self.func in ENTRIES and self.autocast is None else _same  # p (1 - p) is 0 in bfloat16 near 1
        copies = [Run.alias(run, up(run.strip(x))) for x in self.values]
        by = {id(x): y for x, y in zip(self.inputs, copies, strict=True)}
        of = {id(x): by[id(x)] if id(x) in by else up(run.strip(x)) for x in given}
        args, kwargs = tree.map_tensors(lambda x: of.get(id(x), x), (self.args, self.kwargs))
        if self.values and self.values[0] is not self.inputs[0]:  # it writes
            args = (args[0].clone(), *args[1:])
        device, low = copies[0].device.type, self.autocast
        with torch.enable_grad(), TwiceDifferentiable(), torch.autocast(device, low) if low else nullcontext():
            out = self.func(*args, **kwargs)
        return copies, [y for y in tensors(out) if y.is_floating_point() and y.requires_grad]


class CallsRun(Run):
    """A run that notes the operations of samples: the nonlinear ones, or `every` one."""

    every = False

    def __init__(self, n: int, deep: bool, chosen: Tensor | None = None) -> None:
        super().__init__(n, deep, chosen)
        self.calls: list[Call] = []
        self.sums: list[Call] = []
        """Those that sum over the samples."""
        self.aliases: list[tuple[Tensor, Tensor]] = []
        """What was read of the parameters, and what an operation got in its place."""
        self.linear: dict[int, bool] = {}
        """Of the uses in which a parameter is read linearly, by their ids: whether it is only added."""
        self.reads: dict[int, list[Any]] = {}
        """The edges of what was read together with a parameter, by the id of the use."""
        self.entered = 0

    def alias(self, x: Tensor) -> Tensor:
        y = super().alias(x)
        self.aliases.append((x, y))
        return y

    def dispatched(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        self.entered += 1
        entered, before = self.entered, len(self.uses)
        active = {id(x): (x, a) for x, a in found[0] if x.requires_grad and x.is_floating_point()}
        for x, known in found[2]:
            if known.graph:
                active[id(x)] = x, known.axis
        xs, axes = [x for x, _ in active.values()], [axis for _, axis in active.values()]
        edges = [gradient_edge(x) for x in xs]
        noted = self.every or (bool(xs) and not _linear(func, args, kwargs, xs))
        written = noted and _writes(func, args, kwargs)
        values = [self.strip(args[0]).clone() if written and x is args[0] else x for x in xs]
        counts = versions(xs)
        out = super().dispatched(func, args, kwargs, found)
        if self.entered != entered:  # the operations that it is composed of were noted
            return out
        own = self.uses[before:]
        self.annotate(func, args, kwargs, own, edges)
        summed = bool(xs) and isinstance(out, Tensor) and getattr(getattr(out, "_known", None), "axis", 0) is SUMMED
        if not noted and not summed:
            return out
        outs = [y for y in tensors(out) if y.is_floating_point() and y.requires_grad]
        if not outs:
            return out
        if noted:
            if checkpointing():
                raise Unsupported("a nonlinear operation in a checkpoint")
            if any([a != b for x, a, b in zip(xs, counts, versions(xs), strict=True) if not (written and x is args[0])]):
                raise Unsupported(f"{named(func)} writes what it reads")
            if option(args, kwargs, 4, "dropout_p", 0.0) and func is F.scaled_dot_product_attention:
                raise Unsupported("attention with dropout, which cannot be run again")
        device = outs[0].device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        given = versions([*arguments(args), *arguments(kwargs.values())])
        call = Call(func, args, kwargs, xs, values, edges, axes, [*map(Result, outs)], low, before, own, given)
        if noted:
            self.calls.append(call)
        if summed:
            self.sums.append(call)
        return out

    def annotate(self, func: Any, args: tuple, kwargs: dict, uses: Sequence[Use], edges: list[Any]) -> None:
        """Note of uses whether the parameter is read linearly, and what else is read."""
        if not uses:
            return
        leaves = [u.node.leaf for u in uses]
        apart = len(uses) == 1 or (None not in leaves and len({*leaves}) == len(leaves))
        linear = func in ADDED or (apart and func in LINEAR_IN_PARAMETERS)
        linear = linear or (func in DIVIDE and len(uses) == 1 and uses[0].value is args[0])
        for use in uses:
            self.reads[id(use)] = edges
            if linear or isinstance(use, (Shared, Grown)):
                self.linear[id(use)] = isinstance(use, (Shared, Grown, Rows)) or (
                    func in ADDED and not isinstance(use, Pair)
                )


def _same(x: Tensor) -> Tensor:
    return x


def _linear(func: Any, args: tuple, kwargs: dict, xs: list[Tensor]) -> bool:
    """Whether an operation is known to be linear in some of what it reads."""
    if func in JOINTLY:
        return not (func in DIVIDE)
    once = len(xs) == 1 and sum([y is xs[0] for y in (*arguments(args), *arguments(kwargs.values()))]) == 1
    if func in EACH:
        return once
    if func in FIRST:
        return once and bool(args) and xs[0] is args[0] and not kwargs.get("rounding_mode")
    return func is F.batch_norm and once and not option(args, kwargs, 5, "training", False)


def _writes(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation writes its first argument."""
    name = named(func)
    own = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return own or bool(kwargs.get("inplace")) or any([a is True for a in args[1:]])


# Columns of an operation


@dataclass
class Part:
    """Columns of an operation: `sum_v weight[v, n] left[v] right[v]^T` at what it read."""

    count: int
    left: Callable[[int, int], list[Tensor]]
    edges: list[Any]
    right: Callable[[int, int], list[Tensor]] | None = None
    """Those of the second factor, if it is not the first."""
    right_edges: Sequence[Any] = ()
    weight: Tensor | None = None
    diagonal: Tensor | None = None
    """The Hessian itself, where it is diagonal."""


def units(x: Tensor, axis: Axis, n: int) -> tuple[int, Callable[[int, int], Tensor]]:
    """How many entries a sample has, and what makes the unit columns of a range of them."""
    count = x.numel() // n
    at = torch.arange(count, device=x.device)

    def made(start: int, stop: int) -> Tensor:
        unit = (at[start:stop, None] == at).to(x.dtype)[:, None]
        return back(unit.expand(-1, n, -1), x.shape, axis, n)

    return count, made


def parts(run: CallsRun, call: Call, slopes: Sequence[Tensor | None]) -> list[Part]:
    """The columns of an operation, given the gradients at its results."""
    alone = len(call.values) == len(slopes) == 1
    if alone and (made := softmax_root(run, call.func, call.args, call.kwargs, call.axes[0], slopes[0])) is not None:
        kind, rank = call.values[0].dtype, made.logits.shape[1] - 1
        weight = made.weight[:, torch.arange(made.count, device=made.weight.device) // max(1, rank)].T
        return [Part(made.count, lambda a, b: [made.block(a, b, WHOLE).left[0].to(kind)], call.edges, weight=weight)]
    copies, outs = call.again(run)
    pairs = [(y, g.to(y.dtype)) for y, g in zip(outs, slopes, strict=True) if g is not None]
    with torch.enable_grad():
        found = torch.autograd.grad(
            [y for y, _ in pairs], copies, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
    first = {k: g for k, g in enumerate(found) if g is not None and g.requires_grad}
    if first and alone and call.func in ENTRIES:
        ones = torch.ones_like(first[0])
        (h,) = torch.autograd.grad(first[0], copies, ones, create_graph=run.deep, allow_unused=True)
        return [] if h is None else _diagonal(run, call, run.strip(h))
    return _dense(run, call, copies, first)


def _diagonal(run: CallsRun, call: Call, h: Tensor) -> list[Part]:
    """The columns of a diagonal Hessian in the only input."""
    if not run.deep and not bool(h.any()):
        return []
    kind, (count, made) = call.values[0].dtype, units(h, call.axes[0], run.n)
    weight = front(h, call.axes[0], run.n).reshape(run.n, -1).T
    return [Part(count, lambda a, b: [made(a, b).to(kind)], call.edges, weight=weight, diagonal=h)]


def _dense(run: CallsRun, call: Call, copies: list[Tensor], first: dict[int, Tensor]) -> list[Part]:
    """The columns of any Hessian: unit columns e, and H e; what is beside the diagonal of two inputs counts twice."""
    found, done = list[Part](), list[int]()
    for k in sorted(first, key=lambda k: copies[k].numel()):
        done.append(k)
        rest = [i for i in range(len(copies)) if i == k or i not in done]
        slope = first[k]
        if not run.deep:
            with torch.enable_grad():
                weights = torch.arange(1, slope.numel() + 1, device=slope.device).to(slope.dtype).cos().view(slope.shape)
                tried = torch.autograd.grad(
                    slope, [copies[i] for i in rest], weights, retain_graph=True, allow_unused=True
                )
            rest = [i for i, g in zip(rest, tried, strict=True) if g is not None and bool(g.any())]
        if rest:
            found.append(_crossed(run, call, copies, slope, k, rest))
    return found


def _crossed(run: CallsRun, call: Call, copies: list[Tensor], slope: Tensor, k: int, rest: list[int]) -> Part:
    count, made = units(run.strip(copies[k]), call.axes[k], run.n)

    def right(start: int, stop: int) -> list[Tensor]:
        with torch.enable_grad():
            rows = run.rows(slope, [copies[i] for i in rest], [made(start, stop).to(slope.dtype)], run.deep)
        shapes = [(stop - start, *copies[i].shape) for i in rest]
        rows = [
            torch.zeros(s, dtype=copies[i].dtype, device=slope.device) if r is None else run.strip(r)
            for r, s, i in zip(rows, shapes, rest, strict=True)
        ]
        return [r if i == k else 2 * r for r, i in zip(rows, rest, strict=True)]

    return Part(count, lambda a, b: [made(a, b)], [call.edges[k]], right, [call.edges[i] for i in rest])


# Reductions


class Products(Shares):
    """Gradients of columns whose squares have weights, or that are multiplied with those of other columns."""

    def __init__(
        self,
        run: Run,
        place: int,
        uses: list[Use],
        names: Callable[[int], str],
        weight: Tensor | None,
        others: list[Use] | None,
    ) -> None:
        super().__init__(run, place, uses, names)
        self.counts = weight
        self.others = None if others is None else Shares(run, place, others, names)

    def square_sum(self, each: bool = False) -> Tensor:
        factors = self.factors()
        others = factors if self.others is None else self.others.factors()
        if factors is not None and others is not None and factors[0].edge is others[0].edge:
            use, a, d = factors
            d = self.times(d * others[2], WHOLE)
            if each:
                return self.pulled(use, use.shaped(formed(a.square(), d.sum(0, keepdim=True))[0]), 1)
            return self.pulled(use, use.shaped(product(d.sum(0), a.square())), 0)
        found = []
        for block in self.blocks():
            rows = self.dense(block)
            rows = self.times(rows * (rows if self.others is None else self.others.dense(block)), block).sum(0)
            found.append(rows if each else rows.sum(0))
        return joined(found) if each else summed(found)

    def times(self, rows: Tensor, block: Block) -> Tensor:
        """Products `[V, n, ...]` with their weights."""
        if self.counts is None:
            return rows
        w = self.run.taken(self.counts, block, 1)
        return rows * w.view(*w.shape, *[1] * (rows.ndim - 2)).to(rows.dtype)


class Near(Shares):
    """A use whose result an operation reads whose Hessian is diagonal: each entry of that is of one product."""

    def square_sum(self, each: bool = False) -> Tensor:
        return joined([self.dense(block)[0] for block in self.blocks()]) if each else self.weighted()


def _squared(run: Run, use: Use, h: Tensor) -> Use:
    """A use with the squares of what is read, to which the Hessian is sent."""
    use = copy.copy(use)
    if isinstance(use, Pair):
        if version(use.a) != use.version:
            raise Unsupported("what a parameter met was changed in place later")
        use.a, use.version = use.a.square(), 0
        use.version = version(use.a)
    elif isinstance(use, Expanded) and (factor := use.factor) is not None:
        use.factor = lambda run, block: factor(run, block).square()
    use.send(h[None])
    return use


def _near(run: Run, part: Part, uses: list[Use], of: list[list[Use]]) -> tuple[dict[int, Use], dict[int, Tensor]]:
    """The uses of whose results an operation reads the entries, the only ones of a parameter, by its number; and the
    diagonal Hessian at each."""
    near, found = dict[int, Use](), dict[int, Tensor]()
    if part.diagonal is None:
        return near, found
    edges = {(u.edge.node, u.edge.output_nr): u.edge for u in uses if not isinstance(u.edge, Tensor)}
    edge = part.edges[0]
    at = edge.node, edge.output_nr
    while at not in edges and at[0] is not None and at[0].name() in _MOVING:
        at = at[0].next_functions[0]
    if at not in edges:
        return near, found
    own, h = edges[at], part.diagonal
    if own.node is not edge.node:
        h = run.strip(torch.autograd.grad(edge, own, h, create_graph=run.deep, retain_graph=True)[0])
    for use in uses:
        leaf = use.node.leaf
        if use.edge is own and leaf is not None and [u for u in of[leaf] if u in uses] == [use]:
            near[leaf], found[id(use.edge)] = use, h
    return near, found


def _crossings(run: CallsRun, i: int, uses: list[Use]) -> list[Pair] | None:
    """The products of a parameter with what depends on it, too; None if it is read in a way that is not linear."""
    if not all([id(u) in run.linear for u in uses]):
        return None
    leaf = run.leaves[i]
    for value in {id(u.value): u.value for u in uses if u.node.leaf is None}.values():
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value), create_graph=True)
            if _depends(slope, leaf):
                return None
    if len(uses) == 1:
        return []
    ends = {gradient_edge(u.edge).node if isinstance(u.edge, Tensor) else u.edge.node for u in uses}
    again = [u for u in uses if not run.linear[id(u)] and _reaches([e.node for e in run.reads[id(u)]], ends)]
    products = [u for u in again if isinstance(u, Pair)]
    return products if len(products) == len(again) else None


def _reaches(todo: list[Any], ends: set[Any]) -> bool:
    """Whether some nodes come from others."""
    seen = set()
    while todo:
        node = todo.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [up for up, _ in node.next_functions]
    return False


class Crossed(Use):
    """A product with unit columns in the place of what was read: its derivative in that and in the parameter."""

    def __init__(self, use: Pair, columns: Tensor, slope: Tensor) -> None:
        super().__init__(use.node, use.value)
        self.of, self.columns, self.d = copy.copy(use), columns, slope
        self.of.send(slope[None])

    def dense(self, run: Run, block: Block = WHOLE) -> Tensor:
        rows = list[Tensor]()
        for column in self.columns:
            self.of.a, self.of.version = column, version(column)
            rows.append(self.of.dense(run, block)[0])
        return torch.stack(rows)


def diagonals(
    run: CallsRun,
    names: Callable[[int], str],
    folds: Sequence[Any],
    out: Tensor,
    cotangent: Tensor | None,
    of: list[list[Use]],
    owners: dict[int, Sequence[int]],
) -> None:
    """Reduce the products of the columns of all operations, and what these miss, entry by entry."""
    cotangent = torch.ones_like(out) if cotangent is None else cotangent
    again = {i: _crossings(run, i, uses) for i, uses in enumerate(of) if uses}
    straight = {i for i, uses in again.items() if uses is not None}
    crossed = [(i, u) for i, uses in again.items() for u in uses or ()]
    results = [y for call in (*run.calls, *run.sums) for y in call.outs]
    edges = [*[y.edge for y in results], *[u.edge for _, u in crossed]]
    if not edges:
        return
    with torch.enable_grad():
        slopes = torch.autograd.grad(
            out, [*edges, *run.leaves], cotangent, create_graph=run.deep, retain_graph=True, allow_unused=True
        )
    run.check(slopes[len(edges) :])
    left = iter([y.slope(run, g) for y, g in zip(results, slopes, strict=False)])
    of_uses = [g if g is None else run.strip(g) for g in slopes[len(results) : len(edges)]]

    def reduce(i: int, shares: Shares) -> None:
        for fold in folds:
            fold.reduction.add(fold.states, i, "columns", fold.reduction.step(shares))

    def columns(part: Part, uses: list[Use]) -> None:
        near, h = _near(run, part, uses, of)
        for i, use in near.items():
            run.columns, run.known = 1, {}
            reduce(i, Near(run, i, [_squared(run, use, h[id(use.edge)])], names))
        if not (uses := [u for u in uses if not near or near.get(owners[id(u)][0]) is not u]):
            return
        most = max(1, thresholds.GROUPED // max(1, run.numbers))
        for start in range(0, part.count, most):
            stop = min(start + most, part.count)
            with torch.enable_grad():
                run.pull_columns(part.edges, part.left(start, stop), uses)
            first = [(copy.copy(u), owners[id(u)]) for u in uses if u.d is not None]
            second: list[tuple[Use, Sequence[int]]] | None = None
            if part.right is not None:
                with torch.enable_grad():
                    run.pull_columns(part.right_edges, part.right(start, stop), uses)
                second = [(u, owners[id(u)]) for u in uses if u.d is not None]
            weight = None if part.weight is None else part.weight[start:stop]
            for i in straight:
                mine = [u for u, leaves in first if i in leaves]
                others = None if second is None else [u for u, leaves in second if i in leaves]
                if mine and others != []:
                    reduce(i, Products(run, i, mine, names, weight, others))

    for call in run.calls:
        own = [next(left) for _ in call.outs]
        uses = [u for u in run.uses[: call.before] if not straight.isdisjoint(owners[id(u)])]
        if uses and any([g is not None for g in own]):
            for part in parts(run, call, own):
                columns(part, uses)
    of_sums = [next(left) for call in run.sums for _ in call.outs]
    for (i, use), slope in zip(crossed, of_uses, strict=True):
        if slope is not None:
            if version(use.a) != use.version:
                raise Unsupported("what a parameter met was changed in place later")
            x, before = use.a, of[i][: of[i].index(use)]
            count, made = units(run.strip(x), use.a_axis, run.n)
            most = max(1, thresholds.GROUPED // max(1, run.numbers, use.shape.numel() * run.n))
            edge = gradient_edge(x)
            for start in range(0, count, most):
                unit = made(start, min(start + most, count))
                with torch.enable_grad():
                    run.pull_columns(edge, unit, before)
                mine = [copy.copy(u) for u in before if u.d is not None]
                if mine:
                    twice = unit.new_full((1, run.n), 2).expand(len(unit), -1)
                    reduce(i, Products(run, i, mine, names, twice, [Crossed(use, unit, slope)]))
    rest = [i for i in again if i not in straight]
    if rest:
        apart = run.chosen is not None or any([f.reduction.each for f in folds])
        roots = _roots(run, out, cotangent, of_sums, apart)
        for i in rest:
            for each in {bool(f.reduction.each) for f in folds}:
                rows = _entries(run, i, *roots, each)
                for fold in folds:
                    if bool(fold.reduction.each) is each:
                        fold.reduction.add(fold.states, i, "columns", fold.reduction.directly(rows))


# Parameters of which the Hessian is not all at the nonlinear operations


def _roots(
    run: CallsRun, out: Tensor, cotangent: Tensor, slopes: list[Tensor | None], apart: bool
) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """Where each entry is of one sample: edges, the gradients there, and the number of the sample of each entry."""
    if out.ndim or run.n == 1 or not apart:
        index = torch.arange(run.n if out.ndim else 1, device=out.device).view(out.shape)
        return [out], [cotangent], [index]
    edges, given, index = list[Any](), list[Tensor](), list[Tensor]()
    rest = iter(slopes)
    for call in run.sums:
        own = [next(rest) for _ in call.outs]
        pairs = [(y.edge, g) for y, g in zip(call.outs, own, strict=True) if g is not None]
        if not pairs:
            continue
        if len(call.edges) > 1 or any([y.form is not None for y in call.outs]):
            raise Unsupported("a sum over the samples of what depends on several tensors")
        with torch.enable_grad():
            given += torch.autograd.grad([e for e, _ in pairs], call.edges, [g for _, g in pairs], create_graph=True)
        edges += call.edges
        index.append(numbers(call.inputs[0].shape, call.axes[0], run.n, out.device))
    return edges, given, index


def _entries(
    run: CallsRun, i: int, edges: list[Any], given: list[Tensor], index: list[Tensor], each: bool
) -> Tensor:
    """The diagonal of the Hessian in one parameter, entry by entry: of each sample, or `[1, *p]` of their sum."""
    leaf, n, chosen = run.leaves[i], run.n, run.chosen
    share = given[0].new_ones(n)
    if each:
        share = Run.alias(run, run.strip(share))
    elif chosen is not None:
        share = torch.bincount(chosen, minlength=n).to(share.dtype)
    graph = each or run.deep
    with torch.enable_grad():
        if each or chosen is not None:
            given = [g * share[at] for g, at in zip(given, index, strict=True)]
        pairs = [(y, a) for y, a in run.aliases if y is leaf or _depends(y, leaf)]
        copies = [a for _, a in pairs]
        slopes = torch.autograd.grad(edges, copies, given, create_graph=True, allow_unused=True)
        slope = [
            g if y is leaf else torch.autograd.grad(y, leaf, g, create_graph=True)[0]
            for (y, _), g in zip(pairs, slopes, strict=True)
            if g is not None
        ]
        slope = summed(slope) if slope else torch.zeros_like(leaf)
        found = run.strip(leaf).new_zeros(n if each else 1, leaf.numel())
        if not slope.requires_grad or not leaf.numel():
            return found.view(-1, *leaf.shape)
        most, blocks = max(1, thresholds.GROUPED // max(1, run.numbers * (n if each else 1))), list[Tensor]()
        for start in range(0, leaf.numel(), most):
            at = torch.arange(start, min(start + most, leaf.numel()), device=leaf.device)
            unit = F.one_hot(at, leaf.numel()).to(leaf.dtype).view(-1, *leaf.shape)
            direct, *others = run.rows(slope, [leaf, *copies], [unit], graph)
            rows = [] if direct is None else [direct]
            for (y, _), c in zip(pairs, others, strict=True):
                c = c if c is None or y is leaf else run.rows(y, [leaf], [c], graph)[0]
                rows += [] if c is None else [c]
            diagonal = (summed(rows) * unit).flatten(1).sum(1) if rows else unit.new_zeros(len(at))
            if each:
                eye = torch.eye(len(at), dtype=unit.dtype, device=unit.device)
                (diagonal,) = run.rows(diagonal, [share], [eye], run.deep) if diagonal.requires_grad else (None,)
                diagonal = eye.new_zeros(len(at), n) if diagonal is None else diagonal
            blocks.append(run.strip(diagonal).reshape(len(at), -1).T)
    found = torch.cat(blocks, 1).view(-1, *leaf.shape)
    return found[chosen] if each and chosen is not None else found


def _depends(y: Tensor, leaf: Tensor) -> bool:
    """Whether a tensor is computed from a parameter."""
    if not y.requires_grad:
        return False
    return torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True, allow_unused=True)[0] is not None
