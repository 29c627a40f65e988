"""Labels: on which entries of some roots each entry of each tensor can depend, while a function runs on one sample.

A root is a tensor whose entries get coordinates along some axes. The label of an entry has two rows for each axis,
`-lo` and `hi`, of a box of coordinates, so that the hull of boxes is a maximum; -inf depends on nothing. All roots have
rows of their own in one tensor of labels, `[rows, *shape]`. They follow from the operations of aten alone, never from
values: a dead unit hides nothing. A box may be too large, but not too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import TorchDispatchMode, mapped, memory_of, storage_of, unwatched
from invfunc.core.marks import Unsupported, tensors

_LEAVING = {"is_nonzero", "masked_select", "nonzero_static", "to_sparse", "_to_sparse", "equal"}
"""Operations that give numbers of Python or a shape that depends on values, beyond those that torch tags as such."""
_MASKS = (torch.bool, torch.uint8)


class _Called(NamedTuple):
    """Facts about an operation of aten."""

    name: str
    fact: Fact
    skipped: bool
    leaves: bool
    """True if values become numbers or shapes."""
    writes: tuple[str, ...]
    """The arguments that it writes to."""


@lru_cache(maxsize=4096)
def _called(func: Any) -> _Called:
    arguments = func._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    writes = tuple(a.name for a in written)
    if func.namespace != "aten":
        return _Called(str(func), Fact(), False, False, writes)
    packet, tags = str(func.overloadpacket).split(".")[-1], func.tags
    name = packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet
    fact = FACTS.get(packet) or FACTS.get(packet.rstrip("_"))
    fact = fact or (Fact(entrywise) if torch.Tag.pointwise in tags else Fact())
    if any(a.kwarg_only for a in written) or packet.startswith("_foreach"):
        fact = fact._replace(rule=None)
    leaves = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*tags}) or packet in _LEAVING
    return _Called(name, fact, fact.skipped or torch.Tag.inplace_view in tags, leaves, writes)


class Region:
    """The labels of a memory, `[rows, *shape]` of a contiguous tensor that fills it."""

    __slots__ = ("memory", "size", "itemsize", "rows", "shape")

    def __init__(self, x: torch.Tensor, height: int) -> None:
        self.memory = memory_of(x)  # kept, so that no other tensor gets it
        self.size, self.itemsize = self.memory.nbytes(), x.element_size()
        self.shape = torch.Size([self.size // self.itemsize])
        self.rows = blank(x, (height, 1))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The labels of a tensor in this memory."""
        self._check(x)
        if x.shape == self.shape and x.is_contiguous():
            return self.rows.expand(-1, *self.shape)
        return self._view(self._flat(), x)

    def write(self, x: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Put labels, which broadcast to `[rows, *x.shape]`, in the place of those that a tensor had; None for none."""
        self._check(x)
        rows = blank(self.rows, (len(self.rows), *[1] * x.ndim)) if rows is None else rows
        if x.is_contiguous() and x.numel() * self.itemsize == self.size:
            self.rows, self.shape = rows, x.shape
            return
        flat = self._flat().clone()
        self._view(flat, x).copy_(rows.expand(-1, *x.shape))
        self.rows, self.shape = flat, torch.Size([self.size // self.itemsize])

    def _flat(self) -> torch.Tensor:
        return self.rows.expand(-1, *self.shape).contiguous().view(len(self.rows), -1)

    def _check(self, x: torch.Tensor) -> None:
        if x.element_size() != self.itemsize or self.memory.nbytes() != self.size:
            raise Unsupported("a tensor is read as one of entries of another size")

    @staticmethod
    def _view(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape, strides = (len(rows), *x.shape), (rows.stride(0), *x.stride())
        return rows.as_strided(shape, strides, rows.storage_offset() + x.storage_offset())


class LabelRows(NamedTuple):
    """Rows of labels."""

    start: int
    axes: int

    @property
    def rows(self) -> slice:
        """Its place among all rows."""
        return slice(self.start, self.start + 2 * self.axes)


class Labels(TorchDispatchMode):
    """A mode in which each operation gives its results labels."""

    def __init__(self) -> None:
        super().__init__()
        self.height = 0
        self.regions: dict[int, Region] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook of torch: what asks the compiler to leave us alone would import it, which takes two seconds."""
        return False

    def root(self, axes: int) -> LabelRows:
        """A new root, before anything has labels."""
        self.height += 2 * axes
        return LabelRows(self.height - 2 * axes, axes)

    def of(self, x: torch.Tensor, root: LabelRows) -> torch.Tensor | None:
        """The labels `[2, axes, *x.shape]`; None if nothing in its memory has any."""
        with unwatched(), torch.no_grad():
            region = self.regions.get(_key(x))
            return None if region is None else region.of(x)[root.rows].unflatten(0, (2, root.axes))

    def set(self, x: torch.Tensor, root: LabelRows, rows: torch.Tensor) -> None:
        """Write `[2, axes, *x.shape]` as the labels of x."""
        with unwatched(), torch.no_grad():
            self.write(x, {root: rows})

    def write(self, x: torch.Tensor, found: dict[LabelRows, torch.Tensor]) -> None:
        """Write labels of several roots."""
        key = _key(x)
        if key not in self.regions:
            self.regions[key] = Region(x, self.height)
        region, parts, start = self.regions[key], list[torch.Tensor](), 0
        before = region.of(x)
        for root, rows in found.items():
            parts += [before[start : root.start], rows.flatten(0, 1).to(x.device, torch.float32).expand(-1, *x.shape)]
            start = root.rows.stop
        region.write(x, shrunk(torch.cat([*parts, before[start:]])))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [*tensors((*args, *kwargs.values()))]
        if any(_key(x) in self.regions for x in given):
            called = _called(func)
            if not called.skipped:
                with unwatched(), torch.no_grad():
                    self._follow(Step(func, args, kwargs), called, given[1:] if called.fact.fills else given, out)
        return out

    def _follow(self, step: Step, called: _Called, given: list[torch.Tensor], out: Any) -> None:
        """Label what a call gave and what it wrote."""
        for x in given:
            if x.numel() and (region := self.regions.get(_key(x))) is not None:
                step.reads(x, region.of(x))
        masks = any(x.dtype in _MASKS for x in step.labelled)
        if called.leaves and step.labelled and (called.name != "index" or masks):
            raise Unsupported(f"{called.name} makes numbers or a shape of values")
        written = [y for name in called.writes for y in tensors([step[name]])]
        keys = {_key(x) for x in written}
        fresh = [x for x in tensors(out) if x.numel() and (key := _key(x)) not in self.regions and key not in keys]
        targets = [*written[:1], *fresh] if called.writes == ("self",) else [*fresh, *written]
        if not targets:
            return
        for x, rows in zip(targets, _labels(step, called, targets), strict=True):
            key = _key(x)
            if key not in self.regions:
                if rows is None:
                    continue
                self.regions[key] = Region(x, self.height)
            self.regions[key].write(x, rows)


def _labels(step: Step, called: _Called, targets: list[torch.Tensor]) -> Sequence[Rows]:
    """The labels of each target by the operation's rule; where it has none, the hull of all that it reads."""
    if not step.labelled:
        return [None] * len(targets)
    given: Any = None
    if called.fact.rule is not None:
        try:
            given = called.fact.rule(step, targets[0])
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError):  # an unknown overload
            given = None
    if isinstance(given, torch.Tensor):
        given = [given if x.shape == targets[0].shape else None for x in targets]
    given = [*(given or ()), *[None] * len(targets)]
    whole, found = None, list[Rows]()
    for x, rows in zip(targets, given, strict=False):
        if rows is None or not _fits(rows, x):
            whole = hull(step) if whole is None else whole
            rows = whole.view(-1, *[1] * x.ndim)
        found.append(rows)
    return found


def _fits(rows: torch.Tensor, x: torch.Tensor) -> bool:
    return rows.ndim == x.ndim + 1 and all(a in (1, b) for a, b in zip(rows.shape[1:], x.shape, strict=True))


def _key(x: torch.Tensor) -> int:
    """The memory that a tensor is in."""
    if x.layout is not torch.strided:
        raise Unsupported("a tensor that is not strided")
    return storage_of(x)


def shrunk(rows: torch.Tensor) -> torch.Tensor:
    """Labels with one entry along the dims in which all are equal."""
    for dim in range(1, rows.ndim):
        first = rows.narrow(dim, 0, 1)
        if rows.shape[dim] > 1 and bool((rows == first).all()):
            rows = first
    return rows


def coordinates(x: torch.Tensor, axes: int) -> torch.Tensor:
    """The places of the entries along the last dims that have several, as labels."""
    if axes == 1:  # all are told apart
        at = [torch.arange(x.numel(), dtype=torch.float32, device=x.device).reshape(x.shape)]
    else:
        dims, at = [d for d in range(x.ndim) if x.shape[d] > 1][-axes:], []
        for d in dims:
            numbers = torch.arange(x.shape[d], dtype=torch.float32, device=x.device)
            at.append(numbers.reshape([-1 if e == d else 1 for e in range(x.ndim)]))
        at = [*[x.new_zeros((), dtype=torch.float32)] * (axes - len(dims)), *at]
    whole = torch.stack([c.expand(x.shape) for c in at])
    return torch.stack([-whole, whole])


Rows = torch.Tensor | None
"""Labels `[rows, *shape]`; None: of nothing."""
Rule = Callable[["Step", torch.Tensor], Any]
NONE = -math.inf


@lru_cache(maxsize=4096)
def _places(func: Any) -> dict[str, tuple[int, Any]]:
    """The position and the default of each argument of an operation."""
    return {a.name: (i, a.default_value) for i, a in enumerate(func._schema.arguments)}


class Step:
    """One call of an operation with labelled arguments."""

    def __init__(self, func: Any, args: tuple, kwargs: dict) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.labelled: list[torch.Tensor] = []
        """The arguments with labels, as often as they are there."""
        self.height = 0
        self._rows: dict[int, torch.Tensor] = {}

    def reads(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Take an argument with its labels."""
        self.labelled.append(x)
        self._rows[id(x)], self.height = rows, len(rows)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the operation's schema."""
        at, default = _places(self.func)[name]
        if at < len(self.args):
            return self.args[at]
        return self.kwargs.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in _places(self.func)

    def rows(self, x: Any) -> Rows:
        """The labels of an argument; None if it has none (or is not a tensor)."""
        return self._rows.get(id(x))

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """The labels of an argument, also if it has none."""
        rows = self._rows.get(id(x))
        return blank(x, (self.height, *[1] * x.ndim)).expand(-1, *x.shape) if rows is None else rows

    def only(self, x: torch.Tensor) -> bool:
        """True if no other argument has labels."""
        return len(self.labelled) == 1 and self.labelled[0] is x


# What rules do with labels


def blank(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The labels of entries that depend on nothing, on the device of a tensor."""
    return torch.full(tuple(shape), NONE, dtype=torch.float32, device=like.device)


def core(rows: torch.Tensor) -> torch.Tensor:
    """Labels with one entry along the dims in which they are expanded."""
    for dim, (size, stride) in enumerate(zip(rows.shape, rows.stride(), strict=True)):
        if dim and size > 1 and stride == 0:
            rows = rows.narrow(dim, 0, 1)
    return rows


def hull(step: Step, *tensors: torch.Tensor) -> torch.Tensor:
    """One label for all that these tensors (or all arguments) depend on, `[rows]`."""
    found = [most(r, range(1, r.ndim)).flatten() for x in tensors or step.labelled if (r := step.rows(x)) is not None]
    return torch.stack(found).amax(0) if found else blank(step.labelled[0], (step.height,))


def joined(*parts: Rows) -> Rows:
    """The entrywise maximum of those labels that are not None: the hull of their boxes."""
    result = None
    for part in parts:
        if part is not None and part is not result:
            result = part if result is None else _maximum(result, part)
    return result


def _maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.maximum(core(a), core(b)).expand([max(sizes) for sizes in zip(a.shape, b.shape, strict=True)])


def most(rows: Any, dims: Sequence[int]) -> Any:
    """The maximum over some dims, which stay as ones; None for None."""
    dims = [] if rows is None else [d % rows.ndim for d in dims if rows.shape[d] != 1]
    if rows is None or not dims:
        return rows
    one, kept = core(rows), [1 if d in dims else s for d, s in enumerate(rows.shape)]
    dims = [d for d in dims if one.shape[d] != 1]
    return (one.amax(dims, keepdim=True) if dims else one).expand(kept)


def raised(rows: Rows, ndim: int) -> Rows:
    """Labels `[rows, *shape]` with ones before the shape, as broadcasting puts them."""
    return rows if rows is None or rows.ndim > ndim else rows[(slice(None), *[None] * (ndim + 1 - rows.ndim))]


def behind(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """The places of dims of a tensor in its labels; all of them for None."""
    if dims is None or ndim == 0:
        return list(range(1, ndim + 1))
    return [d % ndim + 1 for d in ([dims] if isinstance(dims, int) else dims)] or list(range(1, ndim + 1))


def flattened(rows: torch.Tensor, d: int, then: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies a function to the last d dims of labels, when all others are flattened into one."""
    first, last = rows.shape[: rows.ndim - d], rows.shape[rows.ndim - d :]
    one = core(rows.expand(*first, *last))
    one = one.expand(*one.shape[: rows.ndim - d], *last)
    found = then(one.reshape(-1, *last))
    found = found.reshape(*one.shape[: rows.ndim - d], *found.shape[1:])
    return found.expand(*first, *found.shape[rows.ndim - d :])


# Entry by entry, and along dims


def entrywise(step: Step, out: torch.Tensor) -> Rows:
    """Each entry reads those at its own place."""
    return joined(*(raised(step.rows(x), out.ndim) for x in step.labelled))


def along(step: Step, out: torch.Tensor) -> Rows:
    """Each entry reads those along a dim."""
    x = step["self"]
    return most(step.filled(x), behind(step["dim"] if "dim" in step else 0, x.ndim)) if step.only(x) else None


def reduced(step: Step, out: torch.Tensor) -> Rows:
    """Each entry reads all that are reduced to it."""
    x = step.args[0]
    axes = behind(step["dim"] if "dim" in step else None, x.ndim)
    return most(step.filled(x), axes).reshape(-1, *out.shape) if step.only(x) else None


# Movements: the same on the labels


def moved(step: Step, out: torch.Tensor) -> Rows:
    """The operation on the labels of its first argument."""
    x, rest = step.args[0], step.args[1:]
    if not step.only(x):
        return None
    return mapped(lambda row: step.func(row, *rest, **step.kwargs))(step.filled(x))


def put_together(step: Step, out: torch.Tensor) -> Rows:
    """The operation on the labels of several tensors."""
    given = [step.filled(x) for x in step["tensors"] if x.ndim or str(step.func).startswith("aten.stack")]
    dim = behind(step["dim"], out.ndim)[0]
    if "stack" in str(step.func):
        return torch.stack(given, dim)
    return torch.cat([rows for rows in given if rows.ndim == out.ndim + 1], dim)


def padded_with(step: Step, out: torch.Tensor) -> Rows:
    """A padding that depends on nothing."""
    return torch.constant_pad_nd(step.filled(step["self"]), step["pad"], NONE)


def looked_up(step: Step, out: torch.Tensor) -> Rows:
    """Rows of a table."""
    entries, read = step.rows(step["indices"]), step.rows(step["weight"])
    return joined(None if entries is None else entries[..., None], raised(most(read, (1, 2)), out.ndim))


# Products and norms


def product(step: Step, out: torch.Tensor) -> Rows:
    """Rows of the one with columns of the other, and what is added."""
    names = [("self", "mat2"), ("mat1", "mat2"), ("batch1", "batch2"), ("self", "vec"), ("mat", "vec")]
    a, b = max(((a, b) for a, b in names if a in step and b in step), key=lambda pair: pair[0] != "self")
    added = step.rows(step["self"]) if a != "self" else None
    left, right = step.rows(step[a]), step.rows(step[b])
    if b == "vec":
        return joined(raised(added, 1), None if left is None else most(left, (2,)).squeeze(2), most(right, (1,)))
    return joined(raised(added, out.ndim), most(left, (-1,)), most(right, (-2,)))


def linear(step: Step, out: torch.Tensor) -> Rows:
    """Rows of the input with rows of the weight, and the bias."""
    weight = most(step.rows(step["weight"]), (-1,))
    weight = None if weight is None else raised(weight.squeeze(-1), out.ndim)
    return joined(most(step.rows(step["input"]), (-1,)), weight, raised(step.rows(step["bias"]), out.ndim))


def _scaled(step: Step, rows: Rows, shape: Sequence[int], ndim: int) -> Rows:
    names = [name for name in ("weight", "bias", "running_mean", "running_var") if name in step]
    parts = [r for name in names if (r := step.rows(step[name])) is not None]
    return joined(rows, *(raised(r.reshape(-1, *shape), ndim) for r in parts))


def layer_norm(step: Step, out: torch.Tensor) -> list[Rows]:
    """All over the last dims."""
    rows, last = step.filled(step["input"]), len(step["normalized_shape"])
    over = most(rows, range(rows.ndim - last, rows.ndim))
    return [_scaled(step, over, step["normalized_shape"], out.ndim), over, over]


def batch_norm(step: Step, out: torch.Tensor) -> list[Rows]:
    """Each by itself, or in training all of a channel."""
    rows, channels = step.filled(step["input"]), (out.shape[1], *[1] * (out.ndim - 2))
    rows = most(rows, (1, *range(3, rows.ndim))) if step["training"] else rows
    return [_scaled(step, rows, channels, out.ndim)]


# Windows


_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _each(sizes: Sequence[int], d: int) -> list[int]:
    return [*sizes] if len(sizes) == d else [*sizes] * d


def _padded(rows: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return F.pad(rows, [p for pair in reversed(pairs) for p in pair], value=NONE) if any(map(any, pairs)) else rows


def _windows(rows: torch.Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
    """The maximum of each window over the last dims."""
    d = len(kernel)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        rows, padding = _padded(rows, [(p, p) for p in padding]), [0] * d
    if all(k == 1 for k in kernel) and not any(padding):
        return rows if all(s == 1 for s in stride) else rows[(..., *(slice(None, None, s) for s in stride))]
    sizes = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
    return flattened(rows, d, lambda maps: _POOLS[d](maps, *sizes))


def convolution(step: Step, out: torch.Tensor) -> Rows:
    """The windows of all channels of a group."""
    x, weight, added = step.rows(step["input"]), step["weight"], step.rows(step["bias"])
    parts: list[Rows] = [None] if step.rows(weight) is None else [hull(step, weight).view(-1, *[1] * out.ndim)]
    if added is not None:
        parts.append(added.view(-1, 1, added.shape[1], *[1] * (out.ndim - 2)))
    return joined(*parts, None if x is None else _convolved(step, x, weight.shape[2:], out))


def _convolved(step: Step, rows: torch.Tensor, kernel: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    d, groups = len(kernel), step["groups"]
    stride, padding, dilation = (_each(step[name], d) for name in ("stride", "padding", "dilation"))
    height, n, _, *sizes = rows.shape
    rows = most(rows.reshape(height * n, groups, -1, *sizes), (2,)).squeeze(2)
    if step["transposed"]:
        wide = blank(rows, (*rows.shape[:-d], *((n - 1) * s + 1 for n, s in zip(sizes, stride, strict=True))))
        wide[(..., *(slice(None, None, s) for s in stride))] = rows
        reach = [gap * (k - 1) - p for gap, k, p in zip(dilation, kernel, padding, strict=True)]
        pairs = [(r, r + m) for r, m in zip(reach, _each(step["output_padding"], d), strict=True)]
        rows = _windows(_padded(wide, pairs), kernel, [1] * d, [0] * d, dilation)
    else:
        rows = _windows(rows, kernel, stride, padding, dilation)
    rows = rows.reshape(height, n, groups, 1, *rows.shape[2:])
    rows = rows.expand(-1, -1, -1, out.shape[1] // groups, *[-1] * d)
    return rows.flatten(2, 3) if groups > 1 else rows.squeeze(2)


def pooled(step: Step, out: torch.Tensor) -> Rows:
    """Windows of each channel."""
    d = int(str(step.func).split("pool")[1][0])
    dilation = step["dilation"] if "dilation" in step else [1]
    kernel, padding, dilation = (tuple(_each(v, d)) for v in (step["kernel_size"], step["padding"], dilation))
    rows, stride, ceil = step.filled(step["self"]), tuple(_each(step["stride"] or kernel, d)), step["ceil_mode"]
    return flattened(rows, d, lambda maps: _POOLS[d](maps, kernel, stride, padding, dilation, ceil))


def resized(step: Step, out: torch.Tensor) -> Rows:
    """Positions that are seen with one input position at a time, since the weights depend on shapes only."""
    x, rows = step["self"], step.filled(step["self"])
    d, align = x.ndim - 2, step["align_corners"] if "align_corners" in step else None
    scales = [a.name for a in step.func._schema.arguments if a.name.startswith("scales")]
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    for axis in range(d):
        sizes = [(min(n, 3), min(n, 3)) for n in x.shape[2:]]
        sizes[axis] = x.shape[2 + axis], out.shape[2 + axis]
        index = _read(step.func, axis, tuple(sizes), align, step[scales[axis]], dtype, x.device)
        if index is not None:
            at = 3 + axis
            rows = rows.index_select(at, index.flatten()).unflatten(at, index.shape).amax(at + 1)
    return rows


@lru_cache(maxsize=512)
def _read(func: Any, axis: int, sizes: Any, align: Any, scale: Any, dtype: Any, device: Any) -> torch.Tensor | None:
    """The input positions `[output positions, window]` that are read along an axis; None where it stays as it is.

    `sizes` are those of input and output; all other axes are given as short ones, of length one only if they are so.
    """
    size, wanted = sizes[axis]
    shape, scales = [1, size, *(n for n, _ in sizes)], [scale if a == axis else None for a in range(len(sizes))]
    one_hot = torch.eye(size, dtype=dtype, device=device)
    one_hot = one_hot.view([1, size, *(size if a == axis else 1 for a in range(len(sizes)))]).expand(shape).contiguous()
    result = func(one_hot, [m for _, m in sizes], *([] if align is None else [align]), *scales)
    hit = (result[0] != 0).movedim(1 + axis, 1).flatten(2).any(2) if len(sizes) > 1 else result[0] != 0
    first, last = hit.int().argmax(0), size - 1 - hit.flip(0).int().argmax(0)
    if not hit.any(0).all():
        first, last = torch.zeros_like(first), torch.full_like(last, size - 1)
    width = int((last - first).max()) + 1
    index = torch.minimum(first[:, None] + torch.arange(width, device=device), last[:, None])
    same = width == 1 and size == wanted and torch.equal(first, torch.arange(size, device=device))
    return None if same else index


# The table


class Fact(NamedTuple):
    """Facts about an operation."""

    rule: Rule | None = None
    fills: bool = False
    """True if it writes all of its first argument, and does not read it."""
    skipped: bool = False
    """True if it reads the form of its arguments alone."""


FACTS: dict[str, Fact] = {
    name: fact
    for fact, names in [
        (
            Fact(entrywise),
            "add sub rsub neg positive where masked_fill fill _to_copy lift_fresh_copy copy clone detach tril triu mul "
            "div hardswish _prelu_kernel log_sigmoid_forward bitwise_not logical_not bernoulli native_dropout "
            "rrelu_with_noise _fused_dropout normal poisson view_as_complex mse_loss smooth_l1_loss huber_loss pow "
            "binary_cross_entropy soft_margin_loss",
        ),
        (
            Fact(entrywise, fills=True),
            "copy_ zero_ fill_ uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_",
        ),
        (
            Fact(skipped=True),
            "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided "
            "new_zeros new_ones new_full",
        ),
        (Fact(along), "_softmax _log_softmax _safe_softmax softmax log_softmax sort topk argsort glu"),
        (
            Fact(reduced),
            "sum mean nansum amax amin max min median nanmedian kthvalue prod logsumexp norm linalg_vector_norm var "
            "std var_mean std_mean argmax argmin all any count_nonzero mode aminmax",
        ),
        (
            Fact(moved),
            "flip roll repeat pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle index_select "
            "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
            "replication_pad3d diag_embed",
        ),
        (Fact(put_together), "cat stack"),
        (Fact(padded_with), "constant_pad_nd"),
        (Fact(looked_up), "embedding"),
        (Fact(product), "mm bmm mv addmm addmv baddbmm _addmm_activation"),
        (Fact(linear), "linear"),
        (Fact(layer_norm), "native_layer_norm _fused_rms_norm"),
        (Fact(batch_norm), "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit"),
        (Fact(convolution), "convolution"),
        (
            Fact(pooled),
            "max_pool2d_with_indices max_pool3d_with_indices max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d "
            "avg_pool3d",
        ),
        (
            Fact(resized),
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
            "upsample_trilinear3d upsample_bicubic2d",
        ),
    ]
    for name in names.split()
}
"""The operations of aten whose results depend on some entries of their arguments alone."""
