"""K-factors of one parameter, from what the operations that use it send back and read at each position.

Kronecker-factored curvature divides a gradient `sum_p s[p] a[p]^T` into `B = sum s s^T` and `A = sum a a^T`. Uses in
which the dims of the parameter have the same roles are added up.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from invfunc._torch.functorch import batch_first, unseen
from invfunc._torch.values import fake
from invfunc.core.marks import LEAF, SWAP, Final, Node
from invfunc.core.run import Run
from invfunc.core.uses import WHOLE, Block, Convolution, Expanded, Joined, ProductUse, TableRows, Transposed, Use
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.places import PART, Place, Unfactored, grid, rows
from invfunc.linear_algebra.contract import joined, outer, summed
from invfunc.operations.axis import Order
from invfunc.reductions.factors import Factors, added


@dataclass
class Sent:
    """The operands of one use."""

    s: torch.Tensor
    """Cotangents, `[V, n, g, p, o]`."""
    places: list[Place]
    """Places of the entries of `s`, and of the inputs, in the parameter."""
    read: Callable[[Block], torch.Tensor] | None = None
    """Inputs, `[n, g, p, k]`."""
    blocks: tuple[int, ...] | None = None
    """Into how many parts with factors of their own each dim of the parameter is divided."""
    index: torch.Tensor | None = None
    """Rows of a table in place of what is read, `[n, p]`; the number of rows where there is none."""
    joint: bool = False
    """True if a bias is one more input, which is always 1."""
    key: Any = None
    """A key that a weight and its bias share, where the same is sent to both."""

    def __post_init__(self) -> None:
        first, *more = self.places
        self.s = first.spread(self.s, self.s.ndim - 1)
        if self.read is not None and more and more[0].at is not None:
            read, place = self.read, more[0]
            self.read = lambda block: place.spread(read(block), 3)
        self.sends, self.reads = first.covered, more[0].covered if more else 1.0
        """The fractions of the factors that the operation uses."""

    @property
    def role(self) -> tuple:
        return (*[place.dims for place in self.places], self.blocks or ())

    @property
    def flipped(self) -> bool:
        """Tells whether the dims of what is read come before those of what is sent back."""
        return len(self.places) > 1 and not self.joint and self.places[1].dims < self.places[0].dims

    def total(self, run: Run, use: Use) -> torch.Tensor:
        """The sum of what is read over the positions, `[n, g, k]`; of rows, how often they are picked."""
        if self.index is not None:
            counts = self.s.new_zeros(len(self.index), self.places[1].size + 1)
            counts = counts.scatter_add(1, self.index, torch.ones_like(self.index, dtype=self.s.dtype))
            return counts[:, None, :-1]
        assert self.read is not None
        return joined([self.read(block).sum(2) for block in run.blocks([use], use.size(run))])

    def products(self, run: Run, use: Use, diagonal: bool) -> torch.Tensor:
        """`sum_np a a^T`, or its diagonal, which is all that there is of rows."""
        if self.index is not None:
            rows = self.places[1].size
            rows_read = self.index.flatten()
            counts = rows_read.new_zeros(rows + 1).index_add(0, rows_read, torch.ones_like(rows_read))
            return counts[:-1].to(self.s.dtype)
        if isinstance(use, Convolution) and not (run.deep or self.joint or self.blocks or diagonal):
            if (gram := use.gram(run)) is not None:  # without windows
                return gram
        read = self.read
        assert read is not None
        if type(use) is ProductUse and use.of_a is None and not (self.joint or diagonal):
            return _outer(read(WHOLE), diagonal)  # without a copy
        size = use.size(run)
        if isinstance(use, Convolution):  # of windows alone
            p, _, k = use.sizes(run)
            size = p * k * use.groups
        return summed(_outer(read(block), diagonal) for block in run.blocks([use], size))


def _outer(x: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """`sum_bp x x^T` of `[b, g, p, k]`, or its diagonal; one for each g if there are several."""
    return outer(x[:, 0].mT if x.shape[1] == 1 else x.mT, diagonal=diagonal)


def _between(s: torch.Tensor, matrix: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """`1/n sum_np s^T M s` of columns `[V, n, g, p, o]`, or its diagonal."""
    b = torch.einsum("vngpo,vngpq->goq", s, torch.tensordot(matrix / s.shape[1], s, 1))
    b = b[0] if len(b) == 1 else b
    return b.diagonal(dim1=-2, dim2=-1) if diagonal else b


def _of_hessian(s: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """The sum of the parts of a Hessian at each position, whose diagonal has the root `s[0]`, beside `-u u^T`."""
    on = s[0].square().sum((0, 2))
    on = on[0] if len(on) == 1 else on
    if diagonal:
        return on
    beside = torch.diag_embed(torch.zeros_like(on)) if len(s) == 1 else -_outer(s[1], diagonal)
    beside.diagonal(dim1=-2, dim2=-1).copy_(on)
    return beside


def kronecker(
    run: Run, leaf: torch.Tensor, uses: list[Use], sharing: str, bias: str, again: bool, most: float
) -> dict[Any, Factors]:
    """The sums of outer products in each role; `bias` names one that is read as one more input, which is always 1.

    Of a factor of more than `most` entries, the diagonal is kept.
    """
    if len(uses) == 1 and (found := _of_layer(run, leaf, uses[0], bias, again, most)) is not None:
        return found
    roles: dict[Any, list[tuple[Use, Sent]]] = {}
    for use in uses:
        each = operands(run, leaf, use, bool(bias))
        if each is not None:
            roles.setdefault(each.role, []).append((use, each))
    if not roles:
        raise Unfactored("none of its entries is read")
    if len(roles) > 1 and len({(frozenset(role[:-1]), role[-1]) for role in roles}) > 1:
        raise Unfactored("operations that read it divide its dimensions differently")
    return {role: _added(run, leaf, some, sharing, bias, again, most) for role, some in roles.items()}


def _of_layer(run: Run, leaf: torch.Tensor, use: Use, bias: str, again: bool, most: float) -> dict[Any, Factors] | None:
    """The same of a layer in which each sample has one position, so that no way of sharing differs; None of others."""
    if use.node.kind is not LEAF or use.edge is None or use.matrix is not None or run.of_hessian or 1 in leaf.shape:
        return None
    rows = use.rows(run)
    if rows is None or leaf.ndim != 1 + (rows[0] is not None):
        return None
    read, s = rows
    places = [Place((0,), len(leaf))]
    if isinstance(use, ProductUse):
        places = [*_whole(leaf.shape, use.of_w[1], use.of_w[2], False)]
    large = places[0].size > most
    key = "sent", large, id(use.edge)
    if (b := run.known.get(key)) is not None:
        b = b.clone()  # a weight and its bias have matrices of their own
    else:
        run.known[key] = b = outer(s.flatten(0, 1).unsqueeze(-1), diagonal=large)
    a = None
    if read is not None and not again:
        read = torch.cat([read, torch.ones_like(read[:, :1])], 1) if bias else read
        a = outer(read.unsqueeze(-1), diagonal=places[1].size + bool(bias) > most)
    role = (places[0].dims, ()) if read is None else (places[0].dims, places[1].dims, ())
    return {role: Factors(b, a, float(run.count), places, bias, leaf.shape)}


def _added(
    run: Run, leaf: torch.Tensor, some: list[tuple[Use, Sent]], sharing: str, bias: str, again: bool, most: float
) -> Factors:
    """The factors of uses in one role; if each of them reads a part of the parameter, no part counts twice."""
    first, pooled = some[0][1], sharing != "expand"
    if pooled and not _even(run, some):
        raise Unfactored("samples have different numbers of rows, which share their positions")
    large = [place.size + (k and bool(bias)) > most for k, place in enumerate(first.places)]
    key = (first.key, pooled, first.s.shape[-1]) if len(some) == 1 and first.key is not None else None
    b = run.known.get(key)
    if b is None:
        b = _of_sent(run, some, pooled, large[0])
        if key is not None:
            run.known[key] = b
    count = sum([_positions(run, use, each) * each.sends * each.reads for use, each in some])
    a = None
    if len(first.places) > 1 and not again and sharing == "reduce":
        total = summed(_scaled(each.total(run, use), each.sends) for use, each in some)
        a = _outer((total / (count or 1)).reshape(run.count, -1, 1, total.shape[-1]), large[1])
    elif len(first.places) > 1 and not again:
        a = added([_scaled(each.products(run, use, large[1]), each.sends) for use, each in some])
    if sharing == "backpack":  # it does not divide by the positions
        sends, reads = (min(1.0, sum(x)) for x in zip(*[(each.sends, each.reads) for _, each in some], strict=True))
        a, b = None if a is None else _scaled(a, 1 / sends), _scaled(b, reads**-2)
    positions = run.count if sharing == "reduce" else run.count * count
    return Factors(b, a, positions, first.places, bias, leaf.shape, first.blocks)


def _orders(run: Run, use: Use, each: Sent) -> list[tuple[int, Order | None]]:
    """The number of positions in each sample of several uses that are one, and the orders of these."""
    if isinstance(use, Joined):
        return [(u.sizes(run)[0], next(iter(u.orders), None)) for u in use.uses]
    return [(each.s.shape[3], next(iter(use.orders), None))]


def _positions(run: Run, use: Use, each: Sent) -> float:
    """The number of positions a sample has; on average, where some have more than others."""
    if not use.uses and not (run.ordered and use.orders):
        return each.s.shape[3]
    counts = _orders(run, use, each)
    return sum(p if order is None else p * len(order.rows) / (run.n * max(1, order.width)) for p, order in counts)


def _even(run: Run, some: list[tuple[Use, Sent]]) -> bool:
    """Tells whether all samples have the same number of positions in all uses together."""
    count = torch.zeros(run.n)
    for p, order in [pair for use, each in some for pair in _orders(run, use, each)]:
        if order is not None:
            count += order.rows.bincount(minlength=run.n).cpu() * (p // max(1, order.width))
    return bool((count == count[0]).all())


def _of_sent(run: Run, some: list[tuple[Use, Sent]], pooled: bool, diagonal: bool) -> torch.Tensor:
    """`sum_vnp s s^T`, or its diagonal."""
    use, first = some[0]
    if pooled:
        sent = [summed(_scaled(each.s.sum(3, keepdim=True), each.reads) for _, each in some)]
    else:
        sent = [_scaled(each.s, each.reads**0.5) for _, each in some]
    if use.matrix is not None:
        sent = [s[:, :1] for s in sent] if isinstance(use, ProductUse) else sent  # the same of all samples
        return summed(_between(s, use.matrix, diagonal) for s in sent)
    if run.of_hessian:
        return summed(_of_hessian(s, diagonal) for s in sent)
    return summed([_outer(s.flatten(0, 1), diagonal) for s in sent])


def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x if by == 1 else by * x


def operands(run: Run, leaf: torch.Tensor, use: Use, joint: bool = False) -> Sent | None:
    """The operands of a use; `joint`, with one more input that is always 1. None if it reads no entry (`zeros @ w`)."""
    if (
        run.ordered
        and use.orders
        and (joint or run.chosen is not None or not isinstance(use, ProductUse) or type(use) is Convolution)
    ):
        raise Unfactored("it reads samples that are picked or permuted")
    if isinstance(use, ProductUse):
        return _of_pair(run, leaf, use, joint)
    if isinstance(use, TableRows) and leaf.ndim > 1:
        return _of_rows(run, leaf, use)
    if isinstance(use, Expanded):
        return _of_expanded(run, leaf, use)
    if run.apart:
        raise Final("K-factors of a function whose operations are not followed")
    raise Unfactored("it is read by an operation that is not known to be linear in it")


def _entries(leaf: torch.Tensor, use: Use) -> torch.Tensor:
    """The number of the entry of the parameter that each entry is that the operation read; -1 for those of others."""
    value, kind = use.value, use.node.kind
    numbers = torch.arange(leaf.numel(), device=leaf.device).view(leaf.shape)
    if kind in (LEAF, SWAP):
        return numbers if kind is LEAF else numbers.mT
    weights = torch.zeros_like(value, requires_grad=True)
    with torch.enable_grad():
        (pulled,) = torch.autograd.grad(value, leaf, weights, create_graph=True, retain_graph=True)

    def read(numbers: torch.Tensor) -> torch.Tensor:
        """The value, were these the parameter, if it is a selection of the entries."""
        found = torch.autograd.grad(pulled, weights, numbers.to(leaf.dtype), retain_graph=True)[0]
        plain = batch_first(found.detach())
        return plain.reshape(-1, *found.shape)[0]  # of any place of a vmap around

    there = read(torch.ones_like(numbers))
    found, scale = torch.zeros_like(there, dtype=torch.long), 1
    chosen = there == there.square()
    while scale < leaf.numel():  # digits whose squares any precision holds
        digits = numbers // scale % 16
        each = read(digits)
        chosen &= each.square() == read(digits.square())
        found, scale = found + each.long() * scale, scale * 16
    if not bool(chosen.all()):
        raise Unfactored("it is read through a computation")
    return torch.where(there > 0, found, -1)


def _numbered(leaf: torch.Tensor) -> AbstractContextManager:
    """A context in which numbers of entries are there, also where those of tensors are not."""
    return unseen() if fake(leaf) else nullcontext()


def _once(entries: torch.Tensor) -> torch.Tensor:
    if len(entries.unique()) < entries.numel():
        raise Unfactored("some of its entries are read several times")
    return entries


def _of_rows(run: Run, leaf: torch.Tensor, use: TableRows) -> Sent:
    """The operands of a table."""
    i, s = use.parts(run)
    if use.node.kind is LEAF:
        places = [Place((*range(1, leaf.ndim),), leaf[0].numel()), Place((0,), len(leaf))]
    else:
        with _numbered(leaf):
            entries = _once(_entries(leaf, use))
            places = grid(entries, leaf.shape, [(*range(1, entries.ndim),), (0,)], ()).places
    there = places[1]
    i = i if use.padding is None else i.masked_fill(i == use.padding, len(use.value))
    if there.at is not None:
        i = torch.cat([there.at, there.at.new_tensor([there.size])])[i]
    elif use.padding is not None:
        i = i.masked_fill(i == len(use.value), there.size)
    return Sent(s[:, :, None], places, index=i)


def _of_pair(run: Run, leaf: torch.Tensor, use: ProductUse, joint: bool) -> Sent:
    """The operands of a product."""
    s = use.sends(run)
    places, blocks = _places(leaf, use, s.shape[2] == 1)

    def read(block: Block) -> torch.Tensor:
        a = use.read(run, block)
        return torch.cat([a, torch.ones_like(a[..., :1])], -1) if joint else a

    key = _key(use) if s.shape[2] == 1 and not isinstance(use, Joined) else None
    return Sent(s, places, read, blocks, joint=joint, key=key)


def _key(use: Use) -> Any:
    """A key that a weight and its bias share."""
    return None if use.edge is None else id(use.edge)


def _places(leaf: torch.Tensor, use: ProductUse, whole: bool) -> tuple[list[Place], tuple[int, ...] | None]:
    """The places of a product's factors in the parameter, and the number of blocks of its dims."""
    conv = type(use) is Convolution
    g, o, k = ((0,), (0,), (*range(1, leaf.ndim),)) if conv else use.of_w
    sizes = [len(leaf), leaf[0].numel()] if conv else leaf.shape
    plain = 1 not in sizes and bool(o and k) and (conv or not g)
    if whole and plain and (use.node.kind is LEAF or (use.node.kind is SWAP and leaf.ndim == 2)):
        return [*_whole(leaf.shape, o, k, use.node.kind is SWAP)], None
    with _numbered(leaf):
        entries = _once(_entries(leaf, use))
        if conv:
            entries, g, o, k = entries.unflatten(0, (use.groups, -1)), (0,), (1,), (*range(2, len(use.shape) + 1),)
        if isinstance(use, Transposed):
            entries, g, o = entries.unflatten(0, (use.groups, -1)), (0,), (2,)
            k = (1, *range(3, len(use.shape) + 1))
        found = grid(entries, leaf.shape, [o, k], g)
    return found.places, found.blocks


@lru_cache(maxsize=4096)
def _whole(shape: torch.Size, o: tuple[int, ...], k: tuple[int, ...], swapped: bool) -> tuple[Place, Place]:
    """The places of the factors over some dims of a parameter, which may be read as its transpose."""
    o, k = (tuple(1 - i for i in dims) if swapped else dims for dims in (o, k))
    return Place(o, math.prod(shape[i] for i in o)), Place(k, math.prod(shape[i] for i in k))


def _of_expanded(run: Run, leaf: torch.Tensor, use: Expanded) -> Sent | None:
    """The operands of a scale or shift: one of several dims is a table, whose rows are picked at their positions."""
    view = list(use.view or use.shape)
    s = use.sent(run)
    s = s if use.factor is None else s * use.factor(run, WHOLE)
    at, entries = use.axis[0], None
    if run.n > 1 and -at <= len(view) and view[at] != 1:
        with _numbered(leaf):
            each = _entries(leaf, use).reshape(view)
            entries, view[at] = each.narrow(at, 0, 1), 1
            if not torch.equal(entries.expand_as(each), each):
                raise Unfactored("it has an entry for each sample")
    wide = [i - len(view) for i, size in enumerate(view) if size != 1]
    if any(s.shape[i] != view[i] for i in wide):
        raise Unfactored("it is read in another shape")
    s = s.movedim(wide, (*range(-len(wide), 0),)) if wide else s.unsqueeze(-1)
    several = sum(size != 1 for size in leaf.shape) > 1
    whole, numbers = use.node.kind is LEAF and not several, None
    with _numbered(leaf):
        if not whole:
            entries = (_entries(leaf, use) if entries is None else entries).reshape([view[i] for i in wide] or [1])
            if bool((entries < 0).all()):
                return None
            if several:
                return _in_rows(leaf, s, entries)
            numbers = entries.flatten()
            if bool((numbers < 0).any()):
                raise Unfactored(PART)
            whole = len(numbers) == leaf.numel() and bool((numbers.diff() == 1).all())
    count = leaf.numel() if numbers is None else len(numbers)
    s = s.reshape(*s.shape[:2], 1, s.shape[2 : s.ndim - len(wide or [0])].numel(), count)
    key = _key(use) if use.factor is None and leaf.ndim == 1 and whole else None
    return Sent(s, [Place((*range(leaf.ndim),), leaf.numel(), None if whole else numbers)], key=key)


def _in_rows(leaf: torch.Tensor, s: torch.Tensor, entries: torch.Tensor) -> Sent:
    """The operands of a scale or shift of several dims, `s [V, n, ..., *entries]`, as those of a table."""
    last = max(d for d, size in enumerate(leaf.shape) if size != 1)
    count, dims = math.prod(leaf.shape[:last]), (*range(last, leaf.ndim),)
    found = rows(entries, count, leaf.shape[last])
    lines = [d for d in range(entries.ndim) if d not in found.along]
    lead = s.ndim - entries.ndim
    s = s.permute(*range(lead), *[lead + d for d in (*lines, *found.along)])
    picked = found.picked.flatten()
    s = s.reshape(*s.shape[:2], -1, len(picked), entries.numel() // len(picked))
    s = s * (picked < count)[:, None] if bool((picked == count).any()) else s
    index = picked.repeat(s.shape[2]).expand(s.shape[1], -1)
    s = s.flatten(2, 3)[:, :, None]
    if count == 1:
        return Sent(s, [Place((*range(leaf.ndim),), found.place.size, found.place.at)])
    return Sent(s, [Place(dims, found.place.size, found.place.at), Place((*range(last),), count)], index=index)


def partners(of: list[list[Use]], leaves: list[torch.Tensor]) -> dict[int, tuple[str, int]]:
    """Weights and biases which the same operations read together, and no others, by their numbers."""
    edges = [{id(u.edge) for u in uses} for uses in of]
    found: dict[int, tuple[str, int]] = {}
    for i, uses in enumerate(of):
        if not uses or any(not u.layer or u.node.kind is not LEAF for u in uses):
            continue
        size = uses[0].groups * uses[0].shape[1] if isinstance(uses[0], Transposed) else leaves[i].shape[0]
        for k, others in enumerate(of):
            shifts = all(type(u) is Expanded and u.node.kind is LEAF and u.factor is None for u in others)
            if k != i and others and shifts and edges[k] == edges[i] and leaves[k].shape == (size,):
                found |= {i: ("weight", k), k: ("bias", i)}
    return found


class Turned(Use):
    """A use in the eigenbasis of K-factors: what is sent back and read is rotated, not their product."""

    def __init__(self, use: Use, each: Sent, basis: Kronecker) -> None:
        assert basis.values is not None
        self.__dict__.update(use.__dict__)
        self.each, self.shape, self.vectors = each, basis.values.shape, [*basis.factors]
        self.node = Node(None, use.node.leaf, LEAF)
        self.view, self.of_d = None, ((), (), ())
        if each.flipped:
            self.vectors.reverse()
        first = () if basis.blocks is None else (0,)
        self.of_w = (first, *((i + len(first),) for i in ((1, 0) if each.flipped else (0, 1))))

    def sends(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        return self.turned(self.each.s[:, block], 0)

    def turned(self, x: torch.Tensor, k: int) -> torch.Tensor:
        """Operands in the basis of one of the factors: a diagonal one leaves them as they are."""
        q = self.vectors[k].to(x.dtype)
        return x if q.ndim < 2 + (self.each.blocks is not None) else x @ q

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        s, index = self.sends(run, block)[:, :, 0], self.each.index
        if index is None:
            return s.sum(2)
        rows = s.new_zeros(*s.shape[:2], self.each.places[1].size + 1, s.shape[-1])
        found = rows.scatter_add(2, index[block][..., None].expand_as(s), s)[:, :, :-1]
        across = self.vectors[1].to(s.dtype)
        found = found if across.ndim == 1 else across.mT @ found  # a diagonal is in its eigenbasis
        return found if self.each.flipped else found.mT


class TurnedPair(Turned, ProductUse):
    """One of a product."""

    dense = ProductUse.dense  # pyright: ignore[reportAssignmentType]: this is a Pair

    def read(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        assert self.each.read is not None
        return self.turned(self.each.read(block), 1)


def rotated(shares: Any, basis: Kronecker, joint: bool) -> Any:
    """The per-sample gradients in the eigenbasis of their block, `Q^T G[v, n]`."""
    assert basis.values is not None
    turned: list[Use] = []
    for use in shares.apart:
        each = operands(shares.run, shares.leaf, use, joint)
        if each is None:
            continue
        if not joint and (sorted(p.dims for p in each.places) != sorted(basis.groups) or each.blocks != basis.blocks):
            raise Unfactored("its block is of other factors")
        turned.append((Turned if each.read is None else TurnedPair)(use, each, basis))
    found = copy.copy(shares)
    found.uses, found.plain = turned, None
    found.leaf = torch.empty(basis.values.shape, device="meta")
    return found
