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
from invfunc.core.marks import Node, Run, Unsupported, named
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import in_place, patches_gram, summed, unfolded
from invfunc.operations.axis import Axis, Order, front

Block = slice | torch.Tensor
"""Some of the samples."""
WHOLE = slice(None)


class Use:
    """A use of a parameter, or of `value`, which is computed from some: `node` is known of it."""

    edge: Any = None
    """The edge of the graph by which its cotangent comes, or the copy of the parameter that the operation got."""
    end: bool = True
    """True if nothing but copies of parameters lies below the edge."""
    form: tuple[Sequence[int], list[int] | None] | None = None
    """Form of the entries of the tensor at the edge in the result, where that is a view of it."""
    func: Any = None
    """The operation; None where f is evaluated on each sample alone."""
    d: Any = None
    """The cotangent, or a list with that of each column."""
    axis: Any = None
    a_axis: Any = None
    matrix: torch.Tensor | None = None
    """Weights of the products of the columns, where these are unit columns that all samples share."""
    count = 0
    """Number of entries of the result of its operation."""
    stacked = 1
    """The dim of the columns, where they are put together."""
    uses: Sequence[Use] = ()
    """Uses that it stands for, if it is several."""
    layer = False
    """True if its operation may have a bias."""
    grown = False
    """True if f itself expanded the parameter to all samples, as the class token of a vision transformer."""

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
    """Inputs of the operation."""
    factor: Any = None

    def free(self) -> None:
        """Let go of what was read and sent."""
        self.d = self.a = self.factor = None


def weighted(rows: torch.Tensor, weights: torch.Tensor | None, block: Block) -> torch.Tensor:
    """`sum_nv weights[n] rows[v, n]`."""
    if weights is None:
        return rows.sum((0, 1))
    return torch.tensordot(weights[block].to(rows.dtype), rows.sum(0) if len(rows) > 1 else rows[0], 1)


def columns_sum(d: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """`weights[n] sum_v d[v, n]`."""
    d = d[0] if len(d) == 1 else d.sum(0)
    return d if weights is None else d * weights.to(d.dtype).view(-1, *[1] * (d.ndim - 1))


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
            return x[:, None, None] if x.ndim == 2 else x.flatten(1, -2).unsqueeze(1)  # of one sample, a vector
        return _arranged(x, self.of_a, 1)

    def sends(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        """d as `[V, n, g, p, o]`."""
        x = self.sent(run, block)
        if self.of_d is None:
            return x[:, :, None, None] if x.ndim == 3 else x.flatten(2, -2).unsqueeze(2)
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
        return self.shaped(product(columns_sum(self.sends(run), weights), self.read(run)))

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

    transposed = False

    def __init__(
        self, node: Node, value: torch.Tensor, a: torch.Tensor, a_axis: Axis, axis: Axis, window: tuple, groups: int
    ) -> None:
        """`window` are its strides, paddings, dilations, and paddings of the result if it is transposed."""
        o, k = ((1,), (0, *range(2, value.ndim))) if self.transposed else ((0,), (1,))
        super().__init__(node, value, a, a_axis, axis, None, None, ((), o, k))
        self.window, self.groups, self.stacked, self.layer = window, groups, 1, True

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        x = self.inputs(run, block)  # [n, 1 or more, c, *space]
        n, more = x.shape[:2]
        x = self.windows(x.flatten(0, 1)).transpose(1, 2)  # [n more, g, p, k]
        return x if more == 1 else x.unflatten(0, (n, more)).transpose(1, 2).flatten(2, 3)

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        """The entries that each position reads, `[n, p, g, k]`."""
        return patches(x, self.shape[2:], *self.window[:3]).unflatten(-1, (self.groups, -1))

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
        p, o, k = self.sizes(run)
        return super().size(run) + p * self.groups * (k + o * run.columns)

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        d = columns_sum(self.sent(run), weights)
        return self.backward(run, self.inputs(run, WHOLE).flatten(0, 1), d.flatten(0, 1))

    def backward(self, run: Run, a: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        """The gradient of all samples that were read and sent."""
        weight, (*window, extra) = run.strip(self.value.new_zeros(())).expand(self.shape), self.window
        rest = (weight, None, *window, self.transposed, extra, self.groups, (False, True, False))
        return torch.ops.aten.convolution_backward(d, a, *rest)[1]

    def alone(self, run: Run) -> bool:
        """Tells whether the gradient of a sample is a backward pass of the convolution: of many multiplications."""
        places, device = self.sizes(run)[0], self.value.device.type
        known = self.value.dtype in thresholds.TOTAL_DTYPES and device in thresholds.TOTAL_ON
        if (
            self.transposed
            or run.deep
            or run.columns > 1
            or not known
            or self.shape.numel() * places < thresholds.ALONE
        ):
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
        stride, padding, dilation, _ = self.window
        if self.transposed or self.groups > 1 or max(stride) > 1:
            return None
        kernel, pads = tuple(self.shape[2:]), [(p, p) for p in padding]
        return patches_gram(self.inputs(run, WHOLE).flatten(0, 1), kernel, pads, dilation)


class Transposed(Convolution):
    """A transposed convolution: that of an input with zeros between its entries, with the mirrored kernel."""

    transposed = True

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        stride, padding, dilation, extra = self.window
        kernel = self.shape[2:]
        edges = [gap * (k - 1) - p for gap, k, p in zip(dilation, kernel, padding, strict=True)]
        sizes = [(i - 1) * s + 1 for i, s in zip(x.shape[2:], stride, strict=True)]
        apart = x.new_zeros(*x.shape[:2], *sizes)
        apart[(..., *(slice(None, None, s) for s in stride))] = x
        ends = [(e, e + m) for e, m in zip(edges, extra, strict=True)]
        apart = F.pad(apart, [end for pair in ends[::-1] for end in pair])  # also by less than nothing
        x = patches(apart, kernel, (1,) * len(kernel), (0,) * len(kernel), dilation)
        return x.unflatten(-1, (self.groups, -1, kernel.numel())).flip(-1).flatten(-2)

    def shaped(self, w: torch.Tensor) -> torch.Tensor:
        w = w.unflatten(-1, (-1, *self.shape[2:]))  # [..., g, o, c, *kernel]
        lead = w.ndim - len(self.shape) - 1
        return w.transpose(lead + 1, lead + 2).flatten(lead, lead + 1)

    def parted(self, w: torch.Tensor) -> torch.Tensor:
        w = w.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return w.flatten(2, len(self.shape))

    def sizes(self, run: Run) -> tuple[int, int, int]:
        return super().sizes(run)[0], self.shape[1], self.shape[0] // self.groups * self.shape[2:].numel()


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
        d = columns_sum(d, weights)
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
