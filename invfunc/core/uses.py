"""Uses of parameters: each says what a sample adds to the gradient, from the cotangent `d` at its edge of the graph.

A cotangent has its columns in front, `[V, ...]`; `dense(run, block)` are the per-sample gradients of a block of
samples, `[V, n, *shape]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds
from invfunc._torch.functorch import counted, version
from invfunc._torch.values import HALF, room, wide
from invfunc.core.axes import factors_of, letters, operands
from invfunc.core.marks import Axis, Node, Run, Unsupported, named, option
from invfunc.core.order import Order
from invfunc.core.tables import called
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import in_place, patches_gram, summed, unfolded
from invfunc.operations.second_derivatives import TwiceDifferentiable

Block = slice | torch.Tensor
"""Some of the samples."""
WHOLE = slice(None)


def front(x: torch.Tensor, axis: Axis, n: int, lead: int = 0) -> torch.Tensor:
    """A tensor with the samples in their own dim `lead`; what else is in their dim stays there."""
    if n == 1:
        return x.unsqueeze(lead)
    at, outer, inner = axis
    at += x.ndim
    if isinstance(outer, Order):
        return outer.front(x, at, lead)
    if outer == inner == 1:
        x = x if at == lead else x.movedim(at, lead)
        return x.unsqueeze(at + 1)
    x = x.unflatten(at, (outer, n, inner)).movedim(at + 1, lead)
    return x.flatten(at + 1, at + 2)


def back(x: torch.Tensor, shape: Sequence[int], axis: Axis, n: int) -> torch.Tensor:
    """Columns `[V, n, entries]` in the layout of a tensor, `[V, *shape]`."""
    if n == 1:
        return x.reshape(len(x), *shape)
    at, outer, inner = axis
    at += len(shape)
    if isinstance(outer, Order):
        if at < 0:
            return outer.restored(x.reshape(len(x), n, 1, *shape), 0).squeeze(1)
        return outer.restored(x.reshape(len(x), n, *shape[:at], outer.width, *shape[at + 1 :]), at)
    x = x.reshape(len(x), n, *shape[:at], outer, inner, *shape[at + 1 :])
    return x.movedim(1, at + 2).flatten(at + 1, at + 3)


class Use:
    """A use of a parameter, or of `value`, which is computed from some: `node` is known of it."""

    edge: Any = None
    """The edge of the graph by which its cotangent comes, or the copy of the parameter that the operation got."""
    end: bool = True
    """Whether nothing but copies of parameters lies below the edge."""
    form: tuple[Sequence[int], list[int] | None] | None = None
    """How the entries of the tensor at the edge are those of the result, where that is a view of it."""
    func: Any = None
    """The operation; None where f is evaluated on each sample alone."""
    d: Any = None
    """The cotangent, or a list with that of each column."""
    axis: Any = None
    a_axis: Any = None
    matrix: torch.Tensor | None = None
    """What weighs the products of the columns, where these are unit columns that all samples share."""
    count = 0
    """How many numbers the result of its operation has."""
    stacked = 1
    """The dim of the columns, where they are put together."""
    uses: Sequence[Use] = ()
    """Those that it stands for, if it is several."""

    def __init__(self, node: Node, value: torch.Tensor) -> None:
        self.node, self.value, self.shape = node, value, value.shape

    @property
    def orders(self) -> list[Order]:
        """The orders in which it has the samples, if these are not along an axis."""
        found = []
        for use in self.uses or (self,):
            for axis in (use.axis, use.a_axis):
                if type(axis) is tuple and isinstance(axis[1], Order):
                    found.append(axis[1])
        return found

    def send(self, d: Any) -> None:
        """Take the cotangent `[V, ...]` that has come to the edge, or a list with that of each column; None of none."""
        if isinstance(d, torch.Tensor):
            d = d if self.form is None else self.formed_as(d, 1)
            self.d = d.float() if d.dtype in HALF else d
        else:
            self.d = d if d is None or self.form is None else [self.formed_as(x, 0) for x in d]

    def formed_as(self, d: torch.Tensor, lead: int) -> torch.Tensor:
        """The cotangent at a tensor as that at a view of it."""
        assert self.form is not None
        shape, dims = self.form
        d = d.reshape(*d.shape[:lead], *shape)
        return d if dims is None else d.permute(*range(lead), *(lead + dim for dim in dims))

    def sent(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """The cotangent as `[V, n, ...]`."""
        if isinstance(self.d, list):  # beside each other block by block, which stays in the cache
            parts = [run.taken(front(d, self.axis, run.n), block) for d in self.d]
            return torch.stack(parts, self.stacked).movedim(self.stacked, 0)
        return run.taken(front(self.d, self.axis, run.n, 1), block, 1)

    def rows(self, run: Run, block: Block = WHOLE) -> tuple[torch.Tensor | None, torch.Tensor] | None:
        """Rows that were read, `[n, k]` or None for a shift, and that are sent, `[V, n, o]`; None where a sample has
        other than one of each."""
        return None

    def size(self, run: Run) -> int:
        """The numbers of each sample that `dense` makes."""
        return self.shape.numel() * run.columns

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """The per-sample gradients of a block."""
        raise NotImplementedError  # each kind of use says them

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`sum_nv weights[n] G[v, n]`."""
        return summed(weighted(self.dense(run, b), weights, b) for b in run.blocks([self]))

    def places(self, run: Run) -> int:
        """The number of places at which the operation reads the tensor for a sample."""
        raise ArgumentError(
            "squares per token are of operations whose places are known (linear, matmul, einsum, convolutions, norms, "
            f"embeddings, scales, shifts), but `{named(self.func) if self.func else 'f'}` reads a parameter. Leave "
            "per= out, or keep the parameter in another argument."
        )

    def squares(self, run: Run) -> torch.Tensor:
        """The sum of the squares of what each place adds."""
        raise NotImplementedError  # only where places are known

    a: Any = None
    """What was read."""
    factor: Any = None

    def free(self) -> None:
        """Let go of what was read and sent."""
        self.d = self.a = self.factor = None


def weighted(rows: torch.Tensor, weights: torch.Tensor | None, block: Block) -> torch.Tensor:
    """`sum_nv weights[n] rows[v, n]`."""
    if weights is None:
        return rows.sum((0, 1))
    return torch.tensordot(weights[block].to(rows.dtype), rows.sum(0) if len(rows) > 1 else rows[0], 1)


Dims = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ProductUse(Use):
    """A product with what was read: `G[v, n, g, o, k] = sum_p d[v, n, g, p, o] a[n, g, p, k]`.

    of_a, of_d: the dims (g, p, k) of a and (g, p, o) of d, from the right; None where all but the last are p.
    of_w: the dims (g, o, k) of the parameter.
    """

    def __init__(
        self,
        node: Node,
        value: torch.Tensor,
        a: torch.Tensor,
        a_axis: Axis,
        axis: Axis,
        of_a: Dims | None,
        of_d: Dims | None,
        of_w: Dims,
    ) -> None:
        self.node, self.value, self.shape = node, value, value.shape
        self.a, self.a_axis, self.axis, self.version = a, a_axis, axis, counted(a)
        self.of_a, self.of_d, self.of_w = of_a, of_d, of_w
        self.stacked = -2 if of_d is None else 1

    layer = False
    """Whether its operation may have a bias."""

    again: Callable[[], torch.Tensor] | None = None
    """Computes what was read again, where a block frees it."""

    def computed_again(self, again: Callable[[], torch.Tensor]) -> None:
        """Let go of what was read, which can be computed again."""
        self.again, a = again, self.a
        self.a = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")
        self.version = counted(self.a)

    def found(self, run: Run) -> torch.Tensor:
        """The tensor that was read, if it is still the same."""
        if counted(self.a) != self.version:
            raise Unsupported("what a parameter met was changed in place later")
        return run.strip(self.a if self.again is None else self.again())

    def inputs(self, run: Run, block: Block) -> torch.Tensor:
        """The tensor that was read, as `[n, 1 or more, ...]`."""
        return wide(run.taken(front(self.found(run), self.a_axis, run.n), block))

    def rows(self, run: Run, block: Block = WHOLE) -> tuple[torch.Tensor, torch.Tensor] | None:
        a = self.a
        if type(self) is not ProductUse or self.of_a is not None or a.ndim != 2 or len(a) != run.n:
            return None
        if run.n > 1 and not (self.a_axis == self.axis == (-2, 1, 1)):
            return None
        a, d = self.found(run), torch.stack(self.d) if isinstance(self.d, list) else self.d
        if block is not WHOLE or run.chosen is not None:
            a, d = run.taken(a, block), run.taken(d, block, 1)
        return a.float() if a.dtype in HALF else a, d

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """a as `[n, g, p, k]`."""
        x = self.inputs(run, block)
        if self.of_a is None:
            return x.flatten(1, -2).unsqueeze(1)
        return _arranged(x, self.of_a, 1)

    def sends(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """d as `[V, n, g, p, o]`."""
        x = self.sent(run, block)
        if self.of_d is None:
            return x.flatten(2, -2).unsqueeze(2)
        return _arranged(x, self.of_d, 2)

    def sizes(self, run: Run) -> tuple[int, int, int]:
        """The sizes of p, o, k."""
        o, k = [math.prod([self.shape[i] for i in dims]) for dims in self.of_w[1:]]
        p = self.read(run).shape[2] if run.ordered else self.a.numel() * o // max(1, run.n * self.shape.numel())
        return p, o, k

    def placed(self, w: torch.Tensor) -> torch.Tensor:
        """`[..., o, k]` in the layout of the parameter."""
        return w if self.of_w == ((), (0,), (1,)) else self.shaped(w.unsqueeze(-3))

    def shaped(self, w: torch.Tensor) -> torch.Tensor:
        """`[..., g, o, k]` in the layout of the parameter."""
        g, o, k = self.of_w
        if not g and len(o) == len(k) == 1:
            w = w.squeeze(-3)
            return w if o[0] == 0 else w.mT
        order, lead = [*g, *o, *k], w.ndim - 3
        w = w.reshape(*w.shape[:lead], *(self.shape[i] for i in order))
        order = [i % len(self.shape) for i in order]
        return w.permute(*range(lead), *(lead + order.index(i) for i in range(len(order))))

    def operands(self, run: Run, block: Block = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
        """d and a."""
        return self.sends(run, block), self.read(run, block)

    def parted(self, w: torch.Tensor) -> torch.Tensor:
        """A tensor `[*shape, ...]` as `[g, o, k, ...]`."""
        sizes = [math.prod([self.shape[i] for i in dims]) for dims in self.of_w]
        order = [i % len(self.shape) for dims in self.of_w for i in dims]
        return w.permute(*order, *range(len(order), w.ndim)).reshape(*sizes, *w.shape[len(order) :])

    def formed(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """`[V, n, g, o, k]`."""
        return formed(self.read(run, block), self.sends(run, block))

    def by_rows(self, run: Run) -> Iterator[torch.Tensor] | None:
        """The same in blocks of o, `[V, n, g, part of o, k]`, where what is formed of two samples does not fit the
        cache, and what all of them read does; else None."""
        most = thresholds.CACHE.get(self.value.device.type, thresholds.ELSEWHERE)
        (p, o), size = self.sizes(run)[:2], thresholds.SHARES * self.size(run)
        if 2 * size <= most or run.count < 2 or p * self.shape.numel() // o * run.count > most:
            return None
        a, d, step = self.read(run), self.sends(run), max(1, o * most // (run.count * size))
        return (formed(a, d[..., i : i + step]) for i in range(0, o, step))

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        if (rows := self.rows(run, block)) is not None:
            return self.placed(outer(*rows))
        return self.shaped(self.formed(run, block))

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        if (rows := self.rows(run)) is not None:
            a, d = rows
            d = d[0] if len(d) == 1 else d.sum(0)
            return self.placed((d if weights is None else d * weights.to(d.dtype)[:, None]).mT @ a)
        a, d = self.read(run), self.sends(run)
        d = d[0] if len(d) == 1 else d.sum(0)
        d = d if weights is None else d * weights.to(d.dtype)[:, None, None, None]
        return self.shaped(product(d, a))

    def places(self, run: Run) -> int:
        return self.sizes(run)[0]

    def squares(self, run: Run) -> torch.Tensor:
        p, o, k = self.sizes(run)
        each = (self.operands(run, block) for block in run.blocks([self], run.columns * p * (o + k)))
        return self.shaped(summed(product(d.square().sum(0), a.square()) for d, a in each))


def _arranged(x: torch.Tensor, of: Dims, lead: int) -> torch.Tensor:
    """The dims in the order (g, p, entries), each flattened, behind `lead` others."""
    sizes = [math.prod([x.shape[i] for i in dims]) for dims in of]
    order = [i for dims in of for i in dims]
    return x.permute(*range(lead), *range(lead, x.ndim - len(order)), *order).reshape(*x.shape[:lead], *sizes)


def outer(a: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """`d[v, ..., o] a[..., k]`, `[V, ..., o, k]`."""
    d, a = d.unsqueeze(-1), a.unsqueeze(-2)
    if d.numel() * a.shape[-1] < thresholds.HUGE_PAGES // 8 or not in_place(d, a):
        return d * a
    return torch.mul(d, a, out=room((*d.shape[:-1], a.shape[-1]), d))


def formed(a: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """`sum_p d[v, n, g, p, o] a[n, g, p, k]`, `[V, n, g, o, k]`."""
    if d.shape[3] == 1:
        return outer(a.squeeze(2), d.squeeze(3))
    if len(d) == 1:
        return (d[0].mT @ a)[None]
    v, n, g, p, o = d.shape
    if d.stride(-1) == 1:  # then the copy, if any, is of whole rows
        both = d.permute(1, 2, 3, 0, 4).reshape(n, g, p, v * o).mT @ a
    else:
        both = d.permute(1, 2, 0, 4, 3).reshape(n, g, v * o, p) @ a
    return both.view(n, g, v, o, -1).permute(2, 0, 1, 3, 4)


def product(d: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """`sum_np d[n, g, p, o] a[n, g, p, k]`, `[g, o, k]`."""
    if a.shape[1] == 1:
        return (d.flatten(0, 2).T @ a.flatten(0, 2))[None]
    return d.transpose(0, 1).flatten(1, 2).mT @ a.transpose(0, 1).flatten(1, 2)


class Joined(ProductUse):
    """Several uses of one tensor as one with more positions, as those of a recurrent net."""

    uses: Sequence[ProductUse]

    def __init__(self, uses: Sequence[ProductUse]) -> None:
        self.__dict__.update(uses[0].__dict__)
        self.uses = uses

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        return torch.cat([u.read(run, block) for u in self.uses], 2)

    def sends(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        return torch.cat([u.sends(run, block) for u in self.uses], 3)

    def sizes(self, run: Run) -> tuple[int, int, int]:
        p, o, k = self.uses[0].sizes(run)
        return p * len(self.uses), o, k


def patches(x: torch.Tensor, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
    """The windows of `[n, c, *space]` as `[n, p, c * kernel]`."""
    return unfolded(x, kernel, tuple(stride), [(p, p) for p in padding], tuple(dilation)).mT


class Convolution(ProductUse):
    """A convolution, whose windows are read block by block."""

    def __init__(
        self, node: Node, value: torch.Tensor, a: torch.Tensor, a_axis: Axis, axis: Axis, window: tuple, groups: int
    ) -> None:
        """`window` are its strides, paddings and dilations."""
        super().__init__(node, value, a, a_axis, axis, None, None, ((), (0,), (1,)))
        self.window, self.groups, self.stacked, self.layer = window, groups, 1, True

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        x = self.inputs(run, block)  # [n, 1 or more, c, *space]
        n, more = x.shape[:2]
        stride, padding, dilation = self.window
        x = patches(x.flatten(0, 1), self.shape[2:], stride, padding, dilation)
        x = x.unflatten(-1, (self.groups, -1)).transpose(1, 2)  # [n more, g, p, k]
        return x if more == 1 else x.unflatten(0, (n, more)).transpose(1, 2).flatten(2, 3)

    def sends(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        x = self.sent(run, block)  # [V, n, more, o, *space]
        x = x.flatten(4).unflatten(3, (self.groups, -1))  # [V, n, more, g, o, p]
        return x.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)

    def shaped(self, w: torch.Tensor) -> torch.Tensor:
        return w.reshape(*w.shape[:-3], *self.shape)

    def parted(self, w: torch.Tensor) -> torch.Tensor:
        return w.reshape(self.groups, self.shape[0] // self.groups, -1, *w.shape[len(self.shape) :])

    def sizes(self, run: Run) -> tuple[int, int, int]:
        places = self.d[0].shape[2 - len(self.shape) :].numel() * max(1, self.a.shape[0] // run.n)
        return places, self.shape[0] // self.groups, self.shape[1:].numel()

    def size(self, run: Run) -> int:
        places = self.sizes(run)[0]
        return super().size(run) + places * (self.shape[1:].numel() * self.groups + self.shape[0] * run.columns)

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        d = self.sent(run)
        d = d[0] if len(d) == 1 else d.sum(0)
        d = d if weights is None else d * weights.to(d.dtype).view(-1, *[1] * (d.ndim - 1))
        return self.backward(run, self.inputs(run, WHOLE).flatten(0, 1), d.flatten(0, 1))

    def backward(self, run: Run, a: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """The gradient of all samples that were read and sent."""
        kernel = len(self.shape) - 2
        stride, padding, dilation = self.window
        weight, zeros = run.strip(self.value.new_zeros(())).expand(self.shape), [0] * kernel
        rest = (weight, None, stride, padding, dilation, False, zeros, self.groups, (False, True, False))
        return torch.ops.aten.convolution_backward(d, a, *rest)[1]

    def alone(self, run: Run) -> bool:
        """Tells whether the gradient of a sample is a backward pass of the convolution: of many multiplications."""
        places, device = self.sizes(run)[0], self.value.device.type
        known = self.value.dtype in thresholds.TOTAL_DTYPES and device in thresholds.TOTAL_ON
        if run.deep or run.columns > 1 or not known or self.shape.numel() * places < thresholds.ALONE:
            return False
        return places >= thresholds.TOTAL_POSITIONS * self.shape[0]

    def formed(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        if not self.alone(run):
            return super().formed(run, block)
        a, d = self.inputs(run, block), self.sent(run, block)[0]
        each = torch.stack([self.backward(run, *one) for one in zip(a, d, strict=True)])
        return each.view(1, len(a), self.groups, -1, self.shape[1:].numel())

    def gram(self, run: Run) -> torch.Tensor | None:
        """`sum_np a a^T` without windows; None where these are the better way."""
        stride, padding, dilation = self.window
        if self.groups > 1 or max(stride) > 1:
            return None
        kernel, pads = tuple(self.shape[2:]), [(p, p) for p in padding]
        return patches_gram(self.inputs(run, WHOLE).flatten(0, 1), kernel, pads, dilation)


class Expanded(Use):
    """A pointwise use: the operation gets the parameter expanded, and the gradient of that is summed over positions.

    factor: what it is multiplied with where the operation got the parameter itself; view: its shape to broadcast.
    """

    def __init__(
        self,
        node: Node,
        value: torch.Tensor,
        axis: Axis | None,
        factor: Callable[[Run, Block], torch.Tensor] | None = None,
        view: tuple[int, ...] | None = None,
    ) -> None:
        self.node, self.value, self.shape = node, value, value.shape
        self.axis, self.factor, self.view = axis, factor, view

    def rows(self, run: Run, block: Block = WHOLE) -> tuple[None, torch.Tensor] | None:
        d, shape = self.d, self.shape
        if self.factor is not None or self.uses or isinstance(d, list) or self.view not in (None, shape):
            return None
        if d.shape[1:] != (run.n, *shape) or (run.n > 1 and self.axis != (-1 - len(shape), 1, 1)):
            return None
        d = d if block is WHOLE and run.chosen is None else run.taken(d, block, 1)
        return None, d if len(shape) == 1 else d.reshape(*d.shape[:2], -1)

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        d, factor = self.d, None if self.factor is None else self.factor(run, block)
        if isinstance(d, list):
            parts = [run.taken(front(x, self.axis, run.n), block)[None] for x in d]
            return torch.cat([self.narrowed(run, x, factor, block) for x in parts])
        return self.narrowed(run, self.sent(run, block), factor, block)

    def places(self, run: Run) -> int:
        return self.d[0].numel() // (run.n * self.shape.numel())

    def squares(self, run: Run) -> torch.Tensor:
        factor = None if self.factor is None else self.factor(run, WHOLE).square()
        return self.narrowed(run, self.sent(run).square(), factor, WHOLE).sum((0, 1))

    def narrowed(self, run: Run, d: torch.Tensor, factor: torch.Tensor | None, block: Block) -> torch.Tensor:
        """The per-sample gradients of cotangents `[V, n, ...]`."""
        d = d if factor is None else d * factor
        shape, at = self.view or self.shape, self.axis[0]
        if run.n > 1 and -at <= len(shape) and shape[at] == run.n and d.shape[at] == 1:
            own = torch.eye(run.n, dtype=d.dtype, device=d.device)
            own = run.taken(own[:, self.axis[1].rows] if isinstance(self.axis[1], Order) else own, block)
            lead = [1, len(own), *[1] * (d.ndim - 2)]
            lead[at] = run.n
            d = d * own.view(lead)  # an entry for each sample
        extra = d.ndim - len(shape)
        away = [i for i, s in enumerate(d.shape) if i > 1 and s != 1 and (i < extra or shape[i - extra] == 1)]
        d = d.sum(away) if away else d
        if d.shape[2:].numel() != self.shape.numel():
            raise Unsupported("a parameter with an entry for each sample")
        return d.reshape(*d.shape[:2], *self.shape)


class Grown(Expanded):
    """A parameter that f itself expanded to all samples, as the class token of a vision transformer."""


class Copies(Use):
    """Any other use: the operation runs under vmap, with a copy of the parameter for each sample."""

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        return run.taken(self.d, block, 1)


class Shared(Use):
    """A term in the parameters alone, which counts 1/N for each sample."""

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        return run.taken((self.d / run.n).unsqueeze(1).expand(len(self.d), run.n, *self.shape), block, 1)


class TableRows(Use):
    """A table whose rows are picked: `G[n, i]` is the sum of the d at the places where the index is i."""

    def __init__(
        self, node: Node, value: torch.Tensor, index: torch.Tensor, a_axis: Axis, axis: Axis, padding: int | None
    ) -> None:
        super().__init__(node, value)
        self.index, self.a_axis, self.axis, self.padding = index, a_axis, axis, padding
        self.version = version(index)

    def parts(self, run: Run, block: Block = WHOLE) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices `[n, p]` and the cotangents `[V, n, p, d]`."""
        if version(self.index) != self.version:
            raise Unsupported("an index was changed in place later")
        i = run.taken(front(run.strip(self.index), self.a_axis, run.n), block).flatten(1)
        d = self.sent(run, block)
        d = d.reshape(*d.shape[:2], i.shape[1], -1)
        return i, d if self.padding is None else d.masked_fill((i == self.padding)[..., None], 0)

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        i, d = self.parts(run, block)
        zeros = d.new_zeros(*d.shape[:2], self.shape[0], d.shape[-1])
        return zeros.scatter_add(2, i[..., None].expand_as(d), d).view(*d.shape[:2], *self.shape)

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        i, d = self.parts(run)
        d = d[0] if len(d) == 1 else d.sum(0)
        d = d if weights is None else d * weights.to(d.dtype)[:, None, None]
        return self.added(run, i.flatten(), d.flatten(0, 1))

    def added(self, run: Run, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sums of rows `[u, d]` at their indices, in the layout of the table."""
        table = rows.new_zeros(self.shape[0], rows.shape[-1])
        table = table.index_add(0, index, rows) if run.deep else table.index_add_(0, index, rows)  # without a copy
        return table.view(self.shape)

    def places(self, run: Run) -> int:
        return self.index.numel() // run.n

    def squares(self, run: Run) -> torch.Tensor:
        i, d = self.parts(run)
        return self.added(run, i.flatten(), d.square().sum(0).flatten(0, 1))

    def touched(self, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows that samples touch: their samples (those of each column after the other), indices, and gradients
        `[u, d]`; and 1 where there is one, as a sample has as many as places, with zeros in row 0 behind the last."""
        i, d = self.parts(run)
        i, d = i.repeat(len(d), 1) if len(d) > 1 else i, d.flatten(0, 1)
        i, order = i.sort(1)
        number = torch.cat([torch.zeros_like(i[:, :1]), (i[:, 1:] != i[:, :-1]).long().cumsum(1)], 1)
        d = d.gather(1, order[..., None].expand_as(d))
        sums = torch.zeros_like(d).scatter_add(1, number[..., None].expand_as(d), d)
        index = torch.zeros_like(i).scatter(1, number, i)
        there = torch.arange(i.shape[1], device=i.device) <= number[:, -1:]
        samples = torch.arange(len(i), device=i.device)[:, None].expand_as(i)
        return samples.flatten(), index.flatten(), sums.flatten(0, 1), there.reshape(-1, 1).to(d.dtype)


# How operations read parameters: rules `(run, args, kwargs, nodes, axes, out_axis, func) -> uses`, None without a rule

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
        window = (stride, each(padding, rest), dilation)
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
        return [TableRows(nodes[id(w)], w, i, axes[id(i)], axis, None)]
    return None


FACTORS: dict[Any, Callable] = {
    func: rule
    for names, rule in [
        ("linear", of_linear),
        ("matmul mm bmm mv", of_matmul),
        ("addmm", of_addmm),
        ("einsum", of_einsum),
        ("conv1d conv2d conv3d", of_convolution),
        ("layer_norm", of_norm((2, 3), layer=True)),
        ("rms_norm", of_norm((2, None), layer=True)),
        ("group_norm", of_norm((2, 3))),
        ("getitem", of_index),
    ]
    for func in called(names) - {torch.Tensor.__rmatmul__}
}
FACTORS |= {F.batch_norm: of_norm((3, 4)), F.instance_norm: of_norm((3, 4)), F.embedding: of_embedding}
"""The rules of operations that read parameters."""
