"""The diagonal of the Hessian: each operation that is nonlinear in samples gives columns at its inputs.

With `g` the gradient at the result of an operation, and `J` the Jacobian of its inputs in the parameters, the Hessian
is the sum of `J^T (sum_k g_k hess call_k) J` over all operations, of which the loss is one. A product of a parameter
with inputs that depend on it adds columns, too. Of a parameter that is read in another way than linearly, entries are
differentiated one by one.

Where f is a chain of layers, one matrix, averaged over the samples at each of them, goes back through it (KFRA).
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
from invfunc._torch.functorch import base_of, checkpointing, gradient_edge, nodes_below, version, versions
from invfunc._torch.values import anywhere, fake, wide
from invfunc.core.columns import columns_at, softmax_root, split
from invfunc.core.marks import Unsupported, named, option, tensors
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.tables import ADDED, DIAGONAL, DIVIDE, EACH, FIRST, JOINTLY, OF_PARAMETERS, PLUS, POINTWISE
from invfunc.core.uses import WHOLE, Block, Expanded, ProductUse, Shared, TableRows, Use
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import joined, summed
from invfunc.loss.hessian import pulled_back
from invfunc.loss.square_root import joined_block
from invfunc.operations.axis import Axis, back, front
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.operations.operation import function_of
from invfunc.reductions.reduction import Quantity

Tensor = torch.Tensor
_MOVING = "View UnsafeView Transpose Permute T Alias Unsqueeze Squeeze ReshapeAlias Clone"
MOVING_NODES = {f"{name}Backward0" for name in _MOVING.split()}
"""Nodes of the graph that move entries."""


class Result:
    """A result of an operation, by its edge: of a view that of its base, as writing in place takes the view out."""

    def __init__(self, y: Tensor) -> None:
        base = base_of(y)
        self.own = gradient_edge(y)
        self.edge = self.own if base is None else gradient_edge(base)
        self.axis: Any = getattr(getattr(y, "_known", None), "axis", None)
        self.shape, self.dtype, self.form = y.shape, y.dtype, None
        if base is not None:
            self.form = y.shape, y.stride(), y.storage_offset() - base.storage_offset()
        self.gaps = base is not None and not base.is_contiguous()

    def slope(self, run: Run, g: Tensor | None) -> Tensor | None:
        """The gradient at the result, given that at the edge."""
        g = None if g is None else run.strip(g)
        if self.gaps:
            raise Unsupported("an operation whose result is a view of a tensor with gaps")
        return g if g is None or self.form is None else g.contiguous().as_strided(*self.form)


@dataclass(eq=False)
class OperationCall:
    """An operation of samples, which can be run again on copies of its inputs: what it read that has a graph."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    edges: list[Any]
    axes: list[Axis]
    before: int
    """Number of uses of parameters that were noted before it."""
    written: Tensor | None = None
    """The first argument as it was before, if it is written in place."""
    autocast: torch.dtype | None = None
    results: Sequence[Result] = ()
    uses: Sequence[Use] = ()
    """Its own."""
    versions: Sequence[int] = ()

    @property
    def reads(self) -> list[Tensor]:
        """The tensors that it read, and that may not be written since."""
        reads = [*tensors((*self.args, *self.kwargs.values()))]
        return reads if self.written is None else [x for x in reads if x is not self.args[0]]

    def again(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of the inputs, and its results of these."""
        reads = self.reads
        if versions(reads) != self.versions:
            raise Unsupported("what a nonlinear operation read was changed in place later")
        of = {id(x): run.strip(x) for x in reads}
        if self.written is not None:
            of[id(self.args[0])] = self.written
        if self.func in DIAGONAL and self.autocast is None:  # p (1 - p) is 0 in bfloat16 near 1
            of = {key: wide(x) for key, x in of.items()}
        copies = [Run.alias(run, of[id(x)]) for x in self.inputs]
        of |= {id(x): y for x, y in zip(self.inputs, copies, strict=True)}
        args, kwargs = tree.map_tensors(lambda x: of.get(id(x), x), (self.args, self.kwargs))
        device, low = copies[0].device.type, self.autocast
        with torch.enable_grad(), TwiceDifferentiable(), torch.autocast(device, low) if low else nullcontext():
            if self.written is not None:
                args = (args[0].clone(), *args[1:])
            out = self.func(*args, **kwargs)
        return copies, [y for y in tensors(out) if y.is_floating_point() and y.requires_grad]


class CallsRun(Run):
    """A run that notes the operations of samples: the nonlinear ones, or `every` one."""

    every = False

    def __init__(self, n: int, deep: bool, chosen: Tensor | None = None) -> None:
        super().__init__(n, deep, chosen)
        self.calls: list[OperationCall] = []
        self.reads: dict[int, list[Any]] = {}
        """Of the uses in which a parameter is read linearly, by their ids: the edges of what it is multiplied with."""
        self.entered = 0

    def dispatched(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        self.entered += 1
        entered, data = self.entered, [*found[0], *[(x, known.axis) for x, known in found[2]]]
        inputs = {id(x): (x, axis) for x, axis in data if x.requires_grad}
        xs, axes = [x for x, _ in inputs.values()], [axis for _, axis in inputs.values()]
        call = OperationCall(func, args, kwargs, xs, [*map(gradient_edge, xs)], axes, len(self.uses))
        noted, counts = self.every or (bool(xs) and not linear(func, args, kwargs, xs)), None
        if noted:
            if args and id(args[0]) in inputs and function_of(func).writes(args, kwargs):
                call.written = self.strip(args[0]).clone()
            counts = versions(call.reads)
        out = super().dispatched(func, args, kwargs, found)
        if self.entered == entered:  # else the operations that it is composed of were noted
            call.uses = self.uses[call.before :]
            self.annotate(call, [node.leaf for _, node in found[1]])
            if noted and self.ended(call, out):
                self.calls.append(call)
                if call.versions != counts:
                    raise Unsupported("it writes what it reads")
        return out

    def ended(self, call: OperationCall, out: Any) -> bool:
        """Note the results of an operation; says whether there are any with a graph."""
        results = [y for y in tensors(out) if y.is_floating_point() and y.requires_grad]
        if results:
            device = results[0].device.type
            call.results, call.versions = [*map(Result, results)], versions(call.reads)
            call.autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            attention = call.func is F.scaled_dot_product_attention
            if checkpointing() or (attention and option(call.args, call.kwargs, 4, "dropout_p", 0.0)):
                raise Unsupported("a nonlinear operation in a checkpoint, or that draws")
        return bool(results)

    def annotate(self, call: OperationCall, leaves: list[int | None]) -> None:
        """Note the uses of an operation that is linear in each of the parameters that it reads, given their numbers."""
        func, apart = call.func, len(leaves) == 1 or (None not in leaves and len({*leaves}) == len(leaves))
        linear = func in ADDED or (apart and func in OF_PARAMETERS)
        linear = linear or (
            func in DIVIDE and len(leaves) == 1 and [u.value is call.args[0] for u in call.uses] == [True]
        )
        for use in call.uses if linear else [u for u in call.uses if u.grown or isinstance(u, Shared)]:
            added = use.grown or isinstance(use, (Shared, TableRows)) or (func in ADDED and isinstance(use, Expanded))
            met = [
                e for x, e in zip(call.inputs, call.edges, strict=True) if not isinstance(use, ProductUse) or x is use.a
            ]
            self.reads[id(use)] = [] if added else met


def linear(func: Any, args: tuple, kwargs: dict, xs: list[Tensor]) -> bool:
    """Tells whether an operation is known to be linear in its inputs."""
    if func in JOINTLY:
        return True
    if func in PLUS:
        args = args[1:]
        factors = tensors((*args, *kwargs.values()))
        xs = [x for x in xs if any(x is y for y in factors)]
    if len(xs) > 1 or xs and sum([y is xs[0] for y in tensors((*args, *kwargs.values()))]) > 1:
        return False
    if func in FIRST:
        return bool(args) and xs[0] is args[0] and not kwargs.get("rounding_mode")
    return (
        not xs
        or func in EACH
        or func in PLUS
        or (func is F.batch_norm and not option(args, kwargs, 5, "training", False))
    )


# Columns of an operation


@dataclass
class ColumnPart:
    """Columns of an operation: `sum_v weight[v, n] left[v] right[v]^T` at its inputs."""

    count: int
    left: Callable[[int, int], Any]
    """Function that makes the columns of a range."""
    edges: Any
    weight: Tensor | None = None
    diagonal: Tensor | None = None
    """The Hessian itself, where it is diagonal."""
    right: Callable[[int, int], list[Tensor]] | None = None
    """Function that makes those of the second factor, if it is not the first."""
    right_edges: Sequence[Any] = ()


def units(x: Tensor, axis: Axis, n: int) -> tuple[int, Callable[[int, int], Tensor]]:
    """The number of entries of a sample, and what makes the unit columns of a range of them."""
    count = front(x, axis, n).numel() // n
    at = torch.arange(count, device=x.device)

    def made(start: int, stop: int) -> Tensor:
        unit = (at[start:stop, None] == at).to(x.dtype)[:, None]
        return back(unit.expand(-1, n, -1), x.shape, axis, n)

    return count, made


def parts(run: Run, call: OperationCall, slopes: Sequence[Tensor | None]) -> list[ColumnPart]:
    """The columns of an operation, given the gradients at its results."""
    alone, n = len(call.inputs) == len(slopes) == 1, run.n
    if alone and (made := softmax_root(run, call.func, call.args, call.kwargs, call.axes[0], slopes[0])) is not None:
        kind, shape, rank = call.inputs[0].dtype, call.inputs[0].shape, max(1, made.logits.shape[1] - 1)
        weight = made.weight[:, torch.arange(made.count, device=made.weight.device) // rank].T
        return [
            ColumnPart(
                made.count,
                lambda a, b: back(made.block(a, b, WHOLE).left[0], shape, call.axes[0], n).to(kind),
                call.edges,
                weight,
            )
        ]
    copies, results = call.again(run)
    pairs = [(y, g.to(y.dtype)) for y, g in zip(results, slopes, strict=True) if g is not None]
    ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
    with torch.enable_grad():
        found = torch.autograd.grad(ys, copies, gs, create_graph=True, allow_unused=True)
    first = {k: g for k, g in enumerate(found) if g is not None and g.requires_grad}
    if not alone or not first or call.func not in DIAGONAL:
        return _dense(run, call, copies, first)
    ones = torch.ones_like(first[0])
    (h,) = pulled_back([first[0]], copies, [ones], create_graph=run.deep)
    if h is None or not (run.deep or fake(h) or anywhere(h)):
        return []
    h, kind = run.strip(torch.where(first[0].isnan(), torch.nan, h)), call.inputs[0].dtype  # squares hide NaN
    weight, (count, unit) = front(h, call.axes[0], n).reshape(n, -1).T, units(h, call.axes[0], n)
    return [ColumnPart(count, lambda a, b: unit(a, b).to(kind), call.edges, weight, h)]


def _dense(run: Run, call: OperationCall, copies: list[Tensor], first: dict[int, Tensor]) -> list[ColumnPart]:
    """The columns of any Hessian, given the gradients: unit columns e, and H e; what is of two inputs counts twice."""
    found, rest = list[ColumnPart](), [*range(len(copies))]
    for k in sorted(first, key=lambda k: copies[k].numel()):
        slope, others = first[k], rest
        if not run.deep:  # of any vector, H gives 0 only if it is 0
            at = torch.arange(1, slope.numel() + 1, device=slope.device).to(slope.dtype).cos().view(slope.shape)
            tried = pulled_back([slope], [copies[i] for i in rest], [at], retain_graph=True)
            others = [i for i, g in zip(rest, tried, strict=True) if g is not None and (fake(g) or anywhere(g))]
        if others:
            found.append(_between(run, call, copies, slope, k, others))
        rest = [i for i in rest if i != k]
    return found


def _between(
    run: Run, call: OperationCall, copies: list[Tensor], slope: Tensor, k: int, others: list[int]
) -> ColumnPart:
    """The columns of one input with those of some."""
    count, unit = units(run.strip(copies[k]), call.axes[k], run.n)

    def right(start: int, stop: int) -> list[Tensor]:
        with torch.enable_grad():
            rows = run.rows(slope, [copies[i] for i in others], [unit(start, stop).to(slope.dtype)], run.deep)
        blank = [run.strip(copies[i]).new_zeros(()).expand(stop - start, *copies[i].shape) for i in others]
        rows = [zeros if r is None else run.strip(r) for r, zeros in zip(rows, blank, strict=True)]
        return [r if i == k else 2 * r for r, i in zip(rows, others, strict=True)]

    return ColumnPart(count, unit, call.edges[k], right=right, right_edges=[call.edges[i] for i in others])


# Reductions


class WeightedProducts(Shares):
    """Gradients of columns whose squares have weights, or that are multiplied with those of other columns."""

    weights: Tensor | None = None
    others: Shares | None = None

    def square_sum(self, each: bool = False) -> Tensor:
        factors = self.factors()
        others = factors if self.others is None else self.others.factors()
        if factors is not None and others is not None and factors[0].edge is others[0].edge:
            use, a, d = factors
            d = self.times(d * others[2], WHOLE).sum(0)
            return self.of_rows(use, None if a is None else a.square(), d, each)
        found = []
        for block in self.blocks():
            rows = self.dense(block)
            rows = self.times(rows * (rows if self.others is None else self.others.dense(block)), block).sum(0)
            found.append(rows if each else rows.sum(0))
        return joined(found) if each else summed(found)

    def times(self, rows: Tensor, block: Block) -> Tensor:
        """Products `[V, n, ...]` with their weights."""
        if self.weights is None:
            return rows
        w = self.run.taken(self.weights, block, 1)
        return rows * w.view(*w.shape, *[1] * (rows.ndim - 2)).to(rows.dtype)


class Near(Shares):
    """A use whose result is the input of an operation with a diagonal Hessian: an entry is of one product alone."""

    def square_sum(self, each: bool = False) -> Tensor:
        return joined([self.dense(block)[0] for block in self.blocks()]) if each else self.weighted()


def _squared(use: Use, h: Tensor) -> Use:
    """A use with the squares of what is read, to which a diagonal Hessian is sent."""
    use = copy.copy(use)
    if isinstance(use, ProductUse):
        if version(use.a) != use.version:
            raise Unsupported("what a parameter met was changed in place later")
        use.a = use.a.square()
        use.version = version(use.a)
    elif isinstance(use, Expanded) and (factor := use.factor) is not None:
        use.factor = lambda run, block: factor(run, block).square()
    use.send(h[None])
    return use


class HessianDiagonal:
    """States that some reductions keep of the Hessian of a run."""

    def __init__(
        self, run: CallsRun, names: Callable[[int], str], folds: Sequence[Any], of: list[list[Use]], owners: Any
    ) -> None:
        """`of` are the uses of each parameter, and `owners` the parameters of each use, by its id."""
        self.run, self.names, self.folds, self.of, self.owners = run, names, folds, of, owners
        read = [i for i, uses in enumerate(of) if uses]
        self.straight = {i for i in read if _straight(run, run.leaves[i], of[i])}
        self.rest = [i for i in read if i not in self.straight]
        """The parameters of which columns miss entries."""

    def reduce(self, out: Tensor, cotangent: Tensor) -> None:
        """Reduce all columns."""
        for part, uses in [(part, self.near(part, uses)) for part, uses in self.sent(out, cotangent)]:
            self.columns(part, uses)

    def sent(self, out: Tensor, cotangent: Tensor) -> list[tuple[ColumnPart, list[Use]]]:
        """The columns of each operation, with the uses to which they may come."""
        run, results = self.run, [y for call in self.run.calls for y in call.results]
        edges: list[Any] = [y.edge for y in results]
        with torch.enable_grad():
            found = torch.autograd.grad(out, [*edges, *run.leaves], cotangent, True, run.deep, allow_unused=True)
        run.check(found[len(edges) :])
        slopes, sent = iter([y.slope(run, g) for y, g in zip(results, found, strict=False)]), []
        for call in run.calls:
            own = [next(slopes) for _ in call.results]
            uses = [u for u in run.uses[: call.before] if not self.straight.isdisjoint(self.owners[id(u)])]
            if uses and any([g is not None for g in own]):
                sent += [(part, uses) for part in parts(run, call, own)]
        return sent

    def add(self, i: int, shares: Shares) -> None:
        """Reduce the gradients of a parameter."""
        for fold in self.folds:
            fold.keep(i, fold.reduction.step(shares), last=False)

    def near(self, part: ColumnPart, uses: list[Use]) -> list[Use]:
        """Reduce the uses whose results are the input of a diagonal Hessian, only moved; returns the others."""
        run, near = self.run, self.nearest(part, uses)
        if not near:
            return uses
        (edge,), own, h = part.edges, near[0].edge, part.diagonal
        assert h is not None
        if own.node is not edge.node:
            h = run.strip(torch.autograd.grad(edge, own, h, create_graph=run.deep, retain_graph=True)[0])
        run.columns, run.known = 1, {}
        for use in near:
            self.add(use.node.leaf, Near(run, use.node.leaf, [_squared(use, h)], self.names))
        return [use for use in uses if use not in near]

    def nearest(self, part: ColumnPart, uses: list[Use]) -> list[Any]:
        """The uses whose results are the input of a diagonal Hessian, only moved."""
        edges = {(u.edge.node, u.edge.output_nr): u.edge for u in uses if not isinstance(u.edge, Tensor)}
        if part.diagonal is None:
            return []
        (edge,) = part.edges
        at = edge.node, edge.output_nr
        while at not in edges and at[0] is not None and at[0].name() in MOVING_NODES:
            at = at[0].next_functions[0]
        own = [u for u in uses if at in edges and u.edge is edges[at] and u.node.leaf is not None]
        of = [self.of[use.node.leaf or 0] for use in own]
        return [use for use, others in zip(own, of, strict=True) if [u for u in others if u in uses] == [use]]

    def columns(self, part: ColumnPart, uses: list[Use]) -> None:
        """Reduce columns, in groups that fit the memory."""
        run, most = self.run, max(1, thresholds.GROUPED // max(1, self.run.numbers))
        for start in range(0, part.count if uses else 0, most):
            stop = min(start + most, part.count)
            left = self.pulled(part.edges, part.left(start, stop), uses)
            right = None
            if left and part.right is not None:
                right = self.pulled(part.right_edges, part.right(start, stop), uses)
            for i, mine in left.items():
                if right is None or i in right:
                    shares = WeightedProducts(run, i, mine, self.names)
                    shares.weights = None if part.weight is None else part.weight[start:stop]
                    shares.others = None if right is None else Shares(run, i, right[i], self.names)
                    self.add(i, shares)

    def pulled(self, edges: Any, columns: Any, uses: Sequence[Use]) -> dict[int, list[Use]]:
        """The uses of each parameter to which columns come, with these."""
        with torch.enable_grad():
            self.run.pull_columns(edges, columns, uses)
        found = dict[int, list[Use]]()
        for use in uses:
            if use.d is not None:
                for i in self.straight.intersection(self.owners[id(use)]):
                    found.setdefault(i, []).append(copy.copy(use))
        return found


def _straight(run: CallsRun, leaf: Tensor, uses: list[Use]) -> bool:
    """Tells whether a parameter is read linearly, and nothing that it is multiplied with depends on it."""
    if not all([id(u) in run.reads for u in uses]):
        return False
    for value in {id(u.value): u.value for u in uses if u.node.leaf is None}.values():
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value), create_graph=True)
        if _depends(slope, leaf):
            return False
    ends = {gradient_edge(u.edge).node if isinstance(u.edge, Tensor) else u.edge.node for u in uses}
    read = [edge.node for u in uses for edge in run.reads[id(u)]]
    return len(uses) == 1 or ends.isdisjoint(nodes_below(read, ends))


def _depends(y: Tensor, leaf: Tensor) -> bool:
    """Tells whether a tensor is computed from a parameter."""
    if not y.requires_grad:
        return False
    return torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True, allow_unused=True)[0] is not None


class ChainRun(CallsRun):
    """A run that notes every operation of samples."""

    every = True


def chain(
    run: ChainRun,
    names: Callable[[int], str],
    quantity: Quantity,
    folds: Sequence[Any],
    out: Tensor,
    of: list[list[Use]],
) -> None:
    """Reduce unit columns at the result of each layer, with the matrix that weighs their products.

    It starts with `sum_n hess loss_n`, and a layer with Jacobians J[n] makes `1/n sum_n J[n]^T G J[n]` of it.
    """
    for i, uses in enumerate(of):
        if len(uses) > 1:
            raise not_a_chain(f"{names(i)} is read more than once")
    with torch.enable_grad():
        each = columns_at(run, out, quantity)
        roots = split(run, out).roots
    if len(roots) > 1:
        raise not_a_chain("it has several outputs")
    z, count = roots[0].source, sum([columns.count for columns in each])
    if not count:  # as of outputs without entries
        return
    left = joined_block(each, 0, count, WHOLE, run.n).left[roots[0].ordinal]
    left = run.taken(wide(left.to(z.dtype)), WHOLE, 1).flatten(2)
    matrix = torch.einsum("vni,vnj->ij", left, left)
    waiting = {id(u): (i, u) for i, uses in enumerate(of) for u in uses}
    edge, calls = gradient_edge(z), [*run.calls]
    while call := next((c for c in calls if any(_same(y.own, edge) for y in c.results)), None):
        calls.remove(call)
        if len(call.inputs) > 1 or len(call.results) > 1:
            raise not_a_chain(f"`{named(call.func)}` reads or returns several tensors of the model")
        own = [waiting.pop(id(u)) for u in call.uses]
        if own:
            _reduce(run, names, folds, call.results[0], matrix, own)
        if not call.inputs:
            break
        matrix, edge = _through(run, call, matrix), call.edges[0]
        if any(_same(edge, e) for c in calls for e in c.edges):
            raise not_a_chain(f"what `{named(call.func)}` reads is read elsewhere too")
    if waiting:
        raise not_a_chain("a parameter is read beside it")


def _same(a: Any, b: Any) -> bool:
    return a.node is b.node and a.output_nr == b.output_nr


def _reduce(
    run: ChainRun,
    names: Callable[[int], str],
    folds: Sequence[Any],
    y: Result,
    matrix: Tensor,
    own: list[tuple[int, Use]],
) -> None:
    """Reduce the uses of one operation, given the matrix at its result."""
    if not len(matrix):  # a layer without entries
        return
    eye = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    columns = back(eye[:, None].expand(-1, run.n, -1), y.shape, y.axis, run.n).to(y.dtype)
    with torch.enable_grad():
        run.pull_columns(y.own, columns, [u for _, u in own])
    for i, use in own:
        use = copy.copy(use)
        use.matrix = matrix
        shares = Shares(run, i, [use], names)
        for fold in folds:
            fold.states[i] = fold.reduction.step(shares)


def _through(run: ChainRun, call: OperationCall, matrix: Tensor) -> Tensor:
    """The matrix at what an operation reads, given that at its result."""
    (copied,), (y,) = call.again(run)
    before, result = call.axes[0], call.results[0]
    if not isinstance(before, tuple) or not isinstance(result.axis, tuple):
        raise not_a_chain(f"`{named(call.func)}` sums over the samples")

    def each(x: Tensor, lead: int = 0) -> Tensor:
        """The part of each sample that was chosen, `[n, entries]`."""
        return run.taken(front(wide(run.strip(x)), before, run.n, lead), WHOLE, lead).flatten(1 + lead)

    with torch.enable_grad():
        if call.func in POINTWISE and copied.shape == y.shape:
            d = each(torch.autograd.grad(y, copied, torch.ones_like(y), create_graph=run.deep)[0])
            return matrix * (d.mT @ d) / len(d)

        def pulled(columns: Tensor) -> Tensor:
            """`J[n]^T columns[v, n]`."""
            given = back(columns, y.shape, result.axis, run.n).to(y.dtype)
            (found,) = run.rows(y, [copied], [given], run.deep) if len(given) else [None]
            return found if found is not None else torch.zeros_like(copied).expand(len(given), *copied.shape)

        once = front(wide(run.strip(pulled(matrix[:, None].expand(-1, run.n, -1)))), before, run.n, 1).flatten(2)
        return each(pulled(once.permute(2, 1, 0)), 1).mean(1)


def not_a_chain(why: str) -> ArgumentError:
    """The error for a function with branches, through which the recursion is not defined."""
    return ArgumentError(f"f is not a chain of layers: {why}. `kfac(fisher='exact')` is defined for any model.")
