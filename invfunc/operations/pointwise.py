"""Element by element: arithmetic, activations, masks, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import transforming
from invfunc.operations import equations
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Recipe, Site
from invfunc.operations.factors.scales import scale
from invfunc.operations.operation import define, define_tagged, known
from invfunc.operations.receptive_fields.step import elementwise

# The batch axis


def pointwise(call: Call) -> Place:
    """The samples are where they are in all that is read."""
    place, back = side_by_side(call)
    return place.at(tree.tensors(call.out)[0].ndim + back)


def side_by_side(call: Call) -> tuple[Axis, int]:
    """The sample axis that all operands of an entrywise operation share, and its dimension counted from the end."""
    first, place = call.samples[0]
    assert isinstance(place, Axis) and place.dim is not None
    back = place.dim - first.ndim
    for x, other in call.samples[1:]:
        assert isinstance(other, Axis) and other.dim is not None
        if other.dim - x.ndim != back or not other.like(place):
            shapes = f"of a tensor {list(first.shape)} with samples along {other} of one {list(x.shape)}"
            raise Mixed(f"it combines samples along {place} {shapes}")
    return place, back


def entrywise(name: str) -> bool:
    """Whether each entry of the result is computed from those at its place."""
    return known(name).batch_axis is pointwise


def entry_by_entry(args: tuple, kwargs: dict[str, Any], x: torch.Tensor, dim: int, param: torch.Tensor) -> int:
    """The dimension of a parameter that is paired with one of a tensor of samples, counted from the end."""
    return dim - x.ndim + param.ndim


def _prelu_axis(call: Call) -> Place:
    axis = call.place(call.first)
    if not isinstance(axis, Axis) or (axis.dim == 1 and call.arg("weight").numel() > 1):
        raise Mixed("its channels are the samples")
    return axis


# The others


def _prelu_factor(site: Site, param: torch.Tensor) -> Recipe | None:
    """`y = x` above 0, `weight * x` below."""
    x, weight = site.call.arg("input"), site.call.arg("weight")
    axis = site.call.place(x)
    if param is not weight or param is x or not isinstance(axis, Axis):
        return None
    labels = LETTERS[1] if param.numel() > 1 else ""
    return scale(site, labels, lambda part: site.exposed(x, axis, part).clamp(max=0), (x,))


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`prelu` written out, as the derivative of torch's is wrong where torch.vmap batches both arguments."""
    if weight.numel() > 1 and input.ndim > 1:
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight * input)


def _abs(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The absolute value of a complex number, with derivatives of 0 at 0, where torch's become NaN."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_complex() or "out" in kwargs:
        return func(*args, **kwargs)
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).abs())


def _by_reciprocal(call: Call, _: Any, added: Callable[[torch.Tensor], Any]) -> Callable[[], torch.Tensor] | None:
    """A sum over the samples by parameters: it is multiplied, which takes apart what each sample adds."""
    total, divisor = call.args if not call.kwargs else (None, None)
    if isinstance(total, torch.Tensor) and isinstance(divisor, torch.Tensor) and added(total) is not None:
        return lambda: total * divisor.reciprocal()


ENTRYWISE: dict[str, Any] = {"batch_axis": pointwise, "paired": entry_by_entry, "receptive_field": elementwise}
define_tagged(torch.Tag.pointwise, **ENTRYWISE)
define("abs absolute", linear="all", piecewise=True, twice=_abs, **ENTRYWISE)
define("__abs__", twice=_abs)
define("add", linear="all", equation=equations.add)
define("sub subtract", linear="all", equation=equations.sub, **ENTRYWISE)
define("rsub", linear="all", equation=equations.rsub, **ENTRYWISE)
define("mul multiply", linear="each", equation=equations.mul, **ENTRYWISE)
define("div divide true_divide", linear=1, unless="rounding_mode", instead=_by_reciprocal, **ENTRYWISE)
define("lerp", linear=2)
define(
    "neg negative positive zero type cpu cuda copy get:real where masked_fill fill _to_copy lift_fresh_copy",
    linear="all",
    **ENTRYWISE,
)
define("detach", linear="all", constant=True, keeps=True, **ENTRYWISE)
define("float double half bfloat16 contiguous clone", linear="all", picks="once", **ENTRYWISE)
define("to type_as", linear="all", picks="once", reads="first", **ENTRYWISE)
define(
    "relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink clamp clip maximum minimum fmax "
    "fmin sign sgn floor ceil round trunc fix nan_to_num",
    linear="all",
    piecewise=True,
    **ENTRYWISE,
)
define(
    "hardswish softsign tanhshrink int long bool floor_divide square special_expit "
    "greater less greater_equal less_equal not_equal isclose and or xor invert lshift rshift complex polar conj "
    "conj_physical resolve_conj resolve_neg real imag angle get:imag rdiv rpow pow _prelu_kernel "
    "log_sigmoid_forward",
    **ENTRYWISE,
)
define("log_sigmoid", loss="logarithm", hessian="elementwise", predictive="bernoulli", **ENTRYWISE)
define(
    "prelu",
    batch_axis=_prelu_axis,
    factor=_prelu_factor,
    composed=_prelu,
    composed_if=lambda name: transforming(),
    linear=1,
    piecewise=True,
)
define("requires_grad", keeps=True, **ENTRYWISE)
define("copy_ zero_ fill_", linear="all", fills=True, receptive_field=elementwise)
define("bitwise_not logical_not", receptive_field=elementwise)
