"""Layers that move numbers only: axes, margins, pixels and channels; and what all layers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible, PairLaw
from invfunc.problem import of_numpy


@dataclass(frozen=True, repr=False)
class DataDependent(Invertible):
    """An `Invertible` whose parameters start from a batch."""

    law: Any = None

    def start(self, x: torch.Tensor) -> Any:
        """The parameters for a first batch."""
        return self.law.start(x)


def at_full_precision(op: Callable[..., torch.Tensor], x: torch.Tensor, *params: torch.Tensor | None) -> torch.Tensor:
    """`op(x, *params)` in the widest of their dtypes, given in that of x: what autocast rounds off is lost for the
    inverse."""
    dtype = reduce(torch.promote_types, [p.dtype for p in params if p is not None], x.dtype)
    if dtype.is_complex != x.is_complex():
        return op(x, *params)  # torch says what does not fit
    kind, params = x.device.type, tuple(None if p is None else p.to(dtype) for p in params)
    with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():
        return op(x.to(dtype), *params).to(x.dtype)


def _autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape as a plain tuple, which reads best in a message."""
    return tuple(x.shape)


def need_tensor(call: str, name: str, x: Any) -> None:
    """The first of the checks: each raises an error that opens with the call."""
    if not isinstance(x, torch.Tensor):
        array = f" Pass torch.as_tensor({name})." if of_numpy(x) else ""
        raise ArgumentTypeError(f"{call}: {name} is of type {type(x).__name__}, but has to be a tensor.{array}")


def need_axes(call: str, name: str, x: Any, form: str, least: int, most: int | None = None) -> None:
    """A tensor with so many axes; `form` says which."""
    need_tensor(call, name, x)
    if x.ndim < least or (most is not None and x.ndim > most):
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}, but has to be {form}.")


def need_size(call: str, name: str, x: torch.Tensor, axis: int, size: int, why: str) -> None:
    """So many numbers along an axis; `why` says where the size is from."""
    if x.shape[axis] != size:
        place = "the last axis" if axis == -1 else f"axis {axis}"
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}, but {place} has to have size {size}, {why}.")


def need_pair(call: str, name: str, given: Any, names: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of these names, each with a number for each channel."""
    form = f"({names[0]}, {names[1]})"
    if not isinstance(given, (tuple, list)):
        kind = type(given).__name__
        raise ArgumentTypeError(f"{call}: {name} is of type {kind}, but has to be {form}, both [C].")
    if len(given) != 2:
        raise ArgumentError(f"{call}: {name} has {len(given)} entries, but has to be {form}, both [C].")
    for which, v in zip(names, given, strict=True):
        need_axes(call, which, v, "[C]", 1, 1)
    return given[0], given[1]


def need_number(call: str, name: str, value: Any) -> None:
    """A finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ArgumentError(f"{call}: {name} has to be a finite number above 0.")


def need_integers(call: str, name: str, values: Any, least: int) -> None:
    """A tuple or list of integers that are not too small."""
    if not isinstance(values, (tuple, list)):
        raise ArgumentTypeError(
            f"{call}: {name} is of type {type(values).__name__}, but has to be a tuple of integers."
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(f"{call}: {value!r} in {name}, whose entries have to be integers of at least {least}.")


def need_count(call: str, name: str, value: Any) -> None:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{call}: {name} has to be an integer of at least 1.")


def for_each(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One value repeated for each entry of the leading axis of x, `[N]`."""
    return value.repeat(x.shape[0])


def keeps_volume(call: str, form: str = "[N, ...]", least: int = 1) -> Callable[..., torch.Tensor]:
    """The log-determinant of a layer that only moves or turns the numbers of each sample: zeros `[N]`."""
    return partial(_no_volume, f"{call}.log_det(x)", form, least)


def _no_volume(call: str, form: str, least: int, x: Any, params: Any = None) -> torch.Tensor:
    first = next(iter(tree.tensors(x)), x)
    need_axes(call, "x", first, form, least)
    return first.new_zeros(first.shape[0], dtype=torch.promote_types(first.dtype, torch.float32))


def weight_and_bias(call: str, params: Any, name: str = "W") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The two of `(W, b)`, `(W, None)` or `W` alone."""
    if isinstance(params, torch.Tensor):
        return params, None
    if not isinstance(params, (tuple, list)):
        kind = type(params).__name__
        raise ArgumentTypeError(
            f"{call}: params is of type {kind}, but has to be {name}, ({name}, b) or ({name}, None)."
        )
    if len(params) != 2:
        raise ArgumentError(
            f"{call}: params has {len(params)} entries, but has to be {name}, ({name}, b) or ({name}, None)."
        )
    weight, bias = params
    need_tensor(call, name, weight)
    if bias is not None:
        need_tensor(call, "b", bias)
        if weight.ndim and shape(bias) != shape(weight)[:1]:
            raise ArgumentError(
                f"{call}: b has shape {shape(bias)}, but has to have shape {shape(weight)[:1]} beside {name} of shape "
                f"{shape(weight)}."
            )
    return weight, bias


def matrix_and_bias(call: str, params: Any, square: str = "") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, a matrix, and the bias; `square`: what the matrix is called if it has to be square."""
    name = square or "W"
    weight, bias = weight_and_bias(call, params, name)
    need_axes(call, name, weight, "[C, C]" if square else "[out, in]", 2, 2)
    if square and weight.shape[0] != weight.shape[1]:
        raise ArgumentError(f"{call}: {name} has shape {shape(weight)}, but has to be square.")
    if weight.shape[0] < weight.shape[1]:
        raise no_way_back(call, weight, weight.shape[1])
    return weight, bias


def no_way_back(call: str, weight: torch.Tensor, numbers: int) -> ArgumentError:
    """The error for a matrix that gives fewer numbers than it gets."""
    return ArgumentError(
        f"{call}: W has shape {shape(weight)}: it makes {weight.shape[0]} numbers of {numbers}, from which there is no "
        f"way back. It has to give at least as many as it gets: out >= {numbers}."
    )


def no_determinant(call: str, weight: torch.Tensor, numbers: int) -> ArgumentError:
    """The error for a matrix that gives more numbers than it gets, where a determinant is asked for."""
    return ArgumentError(
        f"{call}: W has shape {shape(weight)}: it makes {weight.shape[0]} numbers of {numbers}, so that dy/dx is not "
        f"square and has no determinant. A log-determinant needs out == {numbers}."
    )


def solved(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x `[..., in]` of `y = x W^T + b` `[..., out]`; for out > in the one with the least squared error."""
    z = wide(y) if bias is None else wide(y) - wide(bias)
    x = at_full_precision(_solved, z.reshape(-1, weight.shape[0]), wide(weight))
    return x.reshape(*y.shape[:-1], weight.shape[1]).to(y.dtype)


def _solved(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if w.shape[0] == w.shape[1]:
        return torch.linalg.solve(w.mT, rows, left=False)
    q, r = torch.linalg.qr(w)
    return torch.linalg.solve_triangular(r.mT, rows @ q, upper=False, left=False)


def log_abs_det(weight: torch.Tensor) -> torch.Tensor:
    """A number, -inf if the matrix is singular."""
    return torch.linalg.slogdet(wide(weight)).logabsdet


def rotation(a: torch.Tensor) -> torch.Tensor:
    """The rotation `-H_1 ... H_C` `[C, C]`, of the reflections `H_i = 1 - 2 v_i v_i^T / |v_i|^2`.

    v_i is column i of a below the diagonal, with a 1 on the diagonal and zeros above: a = 0 gives the identity.
    """
    below = wide(a).tril(-1)
    return -torch.linalg.householder_product(below, 2 / (1 + below.square().sum(-2)))


def identity() -> Invertible:
    """The identity: `y = x`, the neutral element of a chain.

    Args: none.

    Returns:
        An `Invertible` `x -> y` for any pytree x. Its log-determinant is zeros `[N]`, N as of the first tensor in x.

    Raises:
        ArgumentError, ArgumentTypeError: log_det of an x without a tensor or without a leading axis.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.identity()(torch.ones(2))
        tensor([1., 1.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: none; y is x itself, without a copy.

    Source: invtorch's Identity.
    """
    return Invertible(_same, _same, log_det=keeps_volume("identity()"), name="identity()")


def _same(x: Any) -> Any:
    return x


def flatten(start_dim: int = 1, end_dim: int = -1) -> Invertible:
    """The axes from one to another as a single one: `y = x.flatten(start_dim, end_dim)`, `x = y.reshape(x.shape)`.

    Args:
        start_dim, end_dim: the first and the last of these axes, as in `torch.flatten`.

    Returns:
        An `Invertible` `x -> y`. `forward` returns `(y, shape)`, with the shape of x as a tuple of ints, and the
        inverse is `inverse(y, shape) -> x`. The log-determinant of x `[N, ...]` is zeros `[N]`.

    Raises:
        ArgumentError: x does not have these axes; y does not fit the shape; log_det where the leading axis is
            flattened.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> y, shape = layers.flatten().forward(torch.ones(2, 3, 4))
        >>> y.shape, shape, layers.flatten().inverse(y, shape).shape
        (torch.Size([2, 12]), (2, 3, 4), torch.Size([2, 3, 4]))

    Composes with: `chain`, and every transform of torch.func. `invert` cannot know the shape; `unflatten` and its
    inverse do.

    Cost: none; y is a view of x where torch can make one.

    Source: invtorch's Flatten.
    """
    options = [str(start_dim)] * (start_dim != 1 or end_dim != -1) + [str(end_dim)] * (end_dim != -1)
    called = f"flatten({', '.join(options)})"

    return _Flatten(called, start_dim, end_dim).pair(called, hidden=True)


@dataclass(frozen=True, eq=False)
class _Flatten(PairLaw):
    called: str
    start: int
    end: int

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        return x.flatten(*self._axes(f"{self.called}(x)", x)), shape(x)

    def inverse(self, y: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        call = f"{self.called}.inverse(y, shape)"
        need_tensor(call, "y", y)
        if y.numel() != torch.Size(sizes).numel():
            raise ArgumentError(f"{call}: y has shape {shape(y)}, which does not have the numbers of shape {sizes}.")
        return y.reshape(sizes)

    def log_det(self, x: torch.Tensor) -> torch.Tensor:
        call = f"{self.called}.log_det(x)"
        need_axes(call, "x", x, "[N, ...]", 1)
        first, last = self._axes(call, x)
        if first == 0 < last:
            raise ArgumentError(f"{call}: the leading axis is flattened too, and the samples with it. Start at 1.")
        return keeps_volume(self.called)(x)

    def _axes(self, call: str, x: torch.Tensor) -> tuple[int, int]:
        """The first and the last, from the front."""
        need_tensor(call, "x", x)
        n = max(x.ndim, 1)
        first, last = (d + n if d < 0 else d for d in (self.start, self.end))
        if not 0 <= first <= last < n:
            raise ArgumentError(
                f"{call}: x has shape {shape(x)}, which has no axes from {self.start} to {self.end}. "
                "Give start_dim and end_dim in this order and among those of x."
            )
        return first, last


def unflatten(dim: int, sizes: Sequence[int]) -> Invertible:
    """One axis as several: `y = x.unflatten(dim, sizes)`, `x = y.flatten(dim, dim + len(sizes) - 1)`.

    Args:
        dim: the axis of x; a negative one counts from the end of x.
        sizes: those of the axes that take its place; one of them may be -1.

    Returns:
        An `Invertible` `x -> y`. The log-determinant of x `[N, ...]` is zeros `[N]`.

    Raises:
        ArgumentError: `sizes` is empty, has two -1 or other numbers below 0; x or y does not have these axes; log_det
            where the leading axis is split.
        ArgumentTypeError: x is not a tensor, or `sizes` is not a tuple.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer = layers.unflatten(1, (3, -1))
        >>> layer(torch.ones(2, 12)).shape, layer.inverse(torch.ones(2, 3, 4)).shape
        (torch.Size([2, 3, 4]), torch.Size([2, 12]))

    Composes with: `invert`, which is a flatten that hides nothing; `chain`, and every transform of torch.func.

    Cost: none; y is a view of x where torch can make one.

    Source: `torch.nn.Unflatten`.
    """
    called = f"unflatten({dim}, {sizes!r})"
    need_integers(called, "sizes", sizes, -1)
    if not sizes or sizes.count(-1) > 1:
        raise ArgumentError(f"{called}: sizes has to have at least one entry, and at most one -1.")
    known = math.prod(s for s in sizes if s != -1)
    return _Unflatten(called, dim, tuple(sizes), known).pair(called)


@dataclass(frozen=True, eq=False)
class _Unflatten(PairLaw):
    called: str
    dim: int
    sizes: tuple[int, ...]
    known: int
    """The product of the sizes that are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim, sizes = self.dim, self.sizes
        need_tensor(f"{self.called}(x)", "x", x)
        if not -x.ndim <= dim < x.ndim or not self._fits(x.shape[dim]):
            raise ArgumentError(
                f"{self.called}(x): x has shape {shape(x)}, which has no axis {dim} to split as {sizes}."
            )
        return x.unflatten(dim, sizes)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        dim, sizes, call = self.dim, self.sizes, f"{self.called}.inverse(y)"
        last = dim + len(sizes) - 1 if dim >= 0 else dim
        first = last - len(sizes) + 1
        need_tensor(call, "y", y)
        own = [y.shape[d] for d in range(first, last + 1) if -y.ndim <= d < y.ndim]
        if len(own) < len(sizes) or any(s not in (-1, o) for s, o in zip(sizes, own, strict=True)):
            raise ArgumentError(f"{call}: y has shape {shape(y)}, whose axes {first} to {last} are not {sizes}.")
        return y.flatten(first, last)

    def log_det(self, x: torch.Tensor) -> torch.Tensor:
        need_axes(f"{self.called}.log_det(x)", "x", x, "[N, ...]", 1)
        if self.dim in (0, -x.ndim) and len(self.sizes) > 1:
            raise ArgumentError(f"{self.called}.log_det(x): the leading axis is split, and the samples with it.")
        return keeps_volume(self.called)(x)

    def _fits(self, size: int) -> bool:
        return size == self.known if -1 not in self.sizes else self.known > 0 and size % self.known == 0


def pad(padding: Sequence[int], value: float = 0.0) -> Invertible:
    """A margin of constants: `y = F.pad(x, list(padding), value=value)`; the inverse crops it.

    Args:
        padding: how many to add in front of and behind the last axis, then of the one before it, and so on, as in
            `F.pad`.
        value: the constant.

    Returns:
        An `Invertible` `x -> y`. It has no log-determinant: y has more numbers than x.

    Raises:
        ArgumentError: `padding` has an odd number of entries or one that is not an integer of at least 0; x has fewer
            axes than are padded; y is smaller than its margins.
        ArgumentTypeError: x is not a tensor, or `padding` is not a tuple.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pad((1, 0))(torch.ones(2)), layers.pad((1, 0)).inverse(torch.arange(3.0))
        (tensor([0., 1., 1.]), tensor([1., 2.]))

    Composes with: `chain`, and every transform of torch.func. `invert` gives a crop, which is the inverse of pad only
    on what has these margins.

    Cost: a copy forward; the inverse is a view.

    Source: invtorch's ConstantPad1d, ConstantPad2d, ConstantPad3d and ZeroPad2d.
    """
    called = f"pad({padding!r}{'' if value == 0 else f', value={value!r}'})"
    need_integers(called, "padding", padding, 0)
    if len(padding) % 2:
        raise ArgumentError(f"{called}: padding has {len(padding)} entries, but has to have two for each axis.")
    return Invertible(partial(_padded, called, padding, value), partial(_cropped, called, padding), name=called)


def _padded(called: str, padding: Sequence[int], value: float, x: torch.Tensor) -> torch.Tensor:
    axes = len(padding) // 2
    need_axes(f"{called}(x)", "x", x, f"of at least {axes} axes", axes)
    return F.pad(x, list(padding), value=value)


def _cropped(called: str, padding: Sequence[int], y: torch.Tensor) -> torch.Tensor:
    call, axes = f"{called}.inverse(y)", len(padding) // 2
    need_axes(call, "y", y, f"of at least {axes} axes", axes)
    x = y
    for axis, before, behind in zip(range(-1, -axes - 1, -1), padding[::2], padding[1::2], strict=True):
        size = y.shape[axis] - before - behind
        if size < 0:
            raise ArgumentError(f"{call}: y has shape {shape(y)}, which is smaller along axis {axis} than its margins.")
        x = x.narrow(axis, before, size)
    return x


def pixel_shuffle(r: int) -> Invertible:
    """Channels as pixels: `y = F.pixel_shuffle(x, r)`, `x = F.pixel_unshuffle(y, r)`.

    Args:
        r: how many times as high and as wide y is.

    Returns:
        An `Invertible` `x -> y`: x `[*, C * r * r, H, W]`, y `[*, C, H * r, W * r]`. The log-determinant of
        x `[N, C * r * r, H, W]` is zeros `[N]`.

    Raises:
        ArgumentError: `r` is not an integer above 0; x has too few axes, or channels that r * r does not divide; y has
            a size that r does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pixel_shuffle(2)(torch.arange(4.0).reshape(1, 4, 1, 1))
        tensor([[[[0., 1.],
                  [2., 3.]]]])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: a copy in each direction.

    Source: invtorch's PixelShuffle; Shi et al., "Real-time single image and video super-resolution", CVPR 2016.
    """
    called = f"pixel_shuffle({r!r})"
    return _pair(called, r, _shuffled, _unshuffled)


def pixel_unshuffle(r: int) -> Invertible:
    """Pixels as channels, also called squeeze: `y = F.pixel_unshuffle(x, r)`, `x = F.pixel_shuffle(y, r)`.

    Args:
        r: how many times as high and as wide x is.

    Returns:
        An `Invertible` `x -> y`: x `[*, C, H * r, W * r]`, y `[*, C * r * r, H, W]`. The log-determinant of
        x `[N, C, H * r, W * r]` is zeros `[N]`.

    Raises:
        ArgumentError: `r` is not an integer above 0; x has too few axes, or a size that r does not divide; y has
            channels that r * r does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pixel_unshuffle(2)(torch.arange(4.0).reshape(1, 1, 2, 2)).flatten()
        tensor([0., 1., 2., 3.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: a copy in each direction.

    Source: invtorch's PixelUnshuffle; the squeeze of Dinh et al., "Density estimation using Real NVP", ICLR 2017.
    """
    called = f"pixel_unshuffle({r!r})"
    return _pair(called, r, _unshuffled, _shuffled)


def _pair(called: str, r: int, forward: Callable, inverse: Callable) -> Invertible:
    need_count(called, "r", r)
    forward, inverse = partial(forward, f"{called}(x)", "x", r), partial(inverse, f"{called}.inverse(y)", "y", r)
    return Invertible(forward, inverse, log_det=keeps_volume(called, "[N, C, H, W]", 4), name=called)


def _shuffled(call: str, name: str, r: int, x: torch.Tensor) -> torch.Tensor:
    need_axes(call, name, x, "[*, C, H, W]", 3)
    if x.shape[-3] % (r * r):
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}: {r * r} does not divide its {x.shape[-3]} channels.")
    return F.pixel_shuffle(x, r)


def _unshuffled(call: str, name: str, r: int, x: torch.Tensor) -> torch.Tensor:
    need_axes(call, name, x, "[*, C, H, W]", 3)
    if x.shape[-2] % r or x.shape[-1] % r:
        size = shape(x)[-2:]
        raise ArgumentError(
            f"{call}: {name} has shape {shape(x)}: {r} does not divide its size {size}. Pad it, by layers.pad."
        )
    return squeezed(x, r)


def squeezed(x: torch.Tensor, r: int) -> torch.Tensor:
    """`F.pixel_unshuffle`, which gives an x without samples back as it is (torch 2.13)."""
    blocks = x.unflatten(-1, (x.shape[-1] // r, r)).unflatten(-3, (x.shape[-2] // r, r))  # [*, C, H, r, W, r]
    return blocks.movedim((-3, -1), (-4, -3)).flatten(-5, -3)


def haar() -> Invertible:
    """The Haar wavelets of blocks of 2 x 2 pixels: an orthonormal squeeze.

        a, b, c, d = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
        (a + b + c + d) / 2, (a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2

    Args: none.

    Returns:
        An `Invertible` `x -> y`: x `[*, C, H, W]` and y `[*, 4 * C, H / 2, W / 2]`, in which the four of a channel are
        neighbours: twice the mean, the differences along W and along H, and the one along both. The log-determinant of
        x `[N, C, H, W]` is zeros `[N]`.

    Raises:
        ArgumentError: x has too few axes, or an odd size; y has channels that 4 does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.haar()(torch.arange(4.0).reshape(1, 1, 2, 2)).flatten()
        tensor([ 3., -1., -2.,  0.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: x is read a few times in each direction.

    Source: Haar, "Zur Theorie der orthogonalen Funktionensysteme", 1910; Ardizzone et al., "Guided image generation
    with conditional invertible neural networks", 2019.
    """

    return Invertible(_haar_forward, _haar_inverse, log_det=keeps_volume("haar()", "[N, C, H, W]", 4), name="haar()")


def _haar_forward(x: torch.Tensor) -> torch.Tensor:
    need_axes("haar()(x)", "x", x, "[*, C, H, W]", 3)
    if x.shape[-2] % 2 or x.shape[-1] % 2:
        raise ArgumentError(f"haar()(x): x has shape {shape(x)}, but H and W have to be even. Pad it, by layers.pad.")
    return _mixed(squeezed(x, 2))


def _haar_inverse(y: torch.Tensor) -> torch.Tensor:
    need_axes("haar().inverse(y)", "y", y, "[*, 4 * C, H, W]", 3)
    if y.shape[-3] % 4:
        raise ArgumentError(f"haar().inverse(y): y has shape {shape(y)}: 4 does not divide its {y.shape[-3]} channels.")
    return F.pixel_shuffle(_mixed(y), 2)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """The symmetric Hadamard matrix, halved, on each four channels: its own inverse."""
    a, b, c, d = (z / 2).unflatten(-3, (z.shape[-3] // 4, 4)).unbind(-3)
    p, q, r, s = a + b, c + d, a - b, c - d
    return torch.stack([p + q, r + s, p - q, r - s], -3).flatten(-4, -3)
