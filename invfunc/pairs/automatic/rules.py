"""How an operand is had from the result of a call and its other operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Number
from typing import Any

import torch

from invfunc.pairs.automatic.graph import KEEPS_SIGN, POSITIVE, Call, Constant, Node

Get = Callable[[Any], Any]
"""From an argument to its value."""
Undo = tuple[Callable[[torch.Tensor, Get], torch.Tensor], str]
"""From a result and the other operands to the operand; and how it reads."""

JOINS = {"cat", "concat", "concatenate", "stack"}
"""What joins its operands in a new tensor."""
_SAME = {"clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type_as", "detach", "positive", "alias"}
_SCALES = {"mul", "multiply", "div", "divide", "true_divide", "truediv"}
_MOVED = {"reshape", "flatten", "view", "unflatten", "ravel", "view_as", "reshape_as"}


def undo(call: Call, node: Node) -> Undo | None:
    """How one operand comes back; None where that is not known."""
    outputs = call.outputs
    if len(outputs) != 1 or sum(leaf is node for leaf in call.leaves) != 1:
        return None
    (out,), name = outputs, call.function.name
    if not _has_all_digits(out.dtype, node.dtype):
        return None
    if name in _MOVED and not call.views and out.shape.numel() == node.shape.numel():
        return lambda y, get: y.reshape(node.shape), "{y}"
    if out.shape != node.shape:
        return None
    if name in _SAME or (name.endswith("dropout") and not call.function.draws(*call.given())):
        return lambda y, get: y.clone() if name == "clone" else y, "{y}"
    whole = not (out.dtype.is_floating_point or out.dtype.is_complex)
    if whole and (name in _SCALES or call.argument("alpha", 1) != 1):  # whole numbers are not divided
        return None
    rule = _RULES.get(name)
    return None if rule is None else rule(call, node)


def needs_nonzero(call: Call, node: Node) -> str:
    """Why a product is not undone, in words; empty for other calls."""
    if call.function.name not in ("mul", "multiply", "div", "divide", "true_divide"):
        return ""
    return f"{call} scales it by what is not known to differ from 0, as what exp, sigmoid and softplus give is"


def _has_all_digits(out: torch.dtype, dtype: torch.dtype) -> bool:
    if out == dtype:
        return True
    return out.is_floating_point and dtype.is_floating_point and torch.promote_types(out, dtype) == out


def _two(call: Call) -> tuple[Any, Any]:
    return call.argument("input"), call.argument("other")


def _add(call: Call, node: Node) -> Undo:
    (a, b), alpha = _two(call), call.argument("alpha", 1)
    if a is node:
        return lambda y, get: torch.sub(y, get(b), alpha=alpha), "{y} - {0}"
    return lambda y, get: _over(y - get(a), alpha), "{y} - {0}"


def _sub(call: Call, node: Node) -> Undo:
    (a, b), alpha = _two(call), call.argument("alpha", 1)
    if a is node:
        return lambda y, get: torch.add(y, get(b), alpha=alpha), "{y} + {0}"
    return lambda y, get: _over(get(a) - y, alpha), "{0} - {y}"


def _rsub(call: Call, node: Node) -> Undo:
    (a, b), alpha = _two(call), call.argument("alpha", 1)
    if b is node:
        return lambda y, get: torch.add(y, get(a), alpha=alpha), "{y} + {0}"
    return lambda y, get: _over(get(b) - y, alpha), "{0} - {y}"


def _mul(call: Call, node: Node) -> Undo | None:
    a, b = _two(call)
    other = b if a is node else a
    return (lambda y, get: y / get(other), "{y} / {0}") if nonzero(other) else None


def _div(call: Call, node: Node) -> Undo | None:
    a, b = _two(call)
    if a is not node or not nonzero(b) or call.argument("rounding_mode") is not None:
        return None
    return lambda y, get: y * get(b), "{y} * {0}"


def _neg(call: Call, node: Node) -> Undo:
    return lambda y, get: -y, "-{y}"


def _addcmul(call: Call, node: Node) -> Undo | None:
    a, b, value = call.argument("tensor1"), call.argument("tensor2"), call.argument("value", 1)
    if call.argument("input") is not node:
        return None
    return lambda y, get: torch.addcmul(y, get(a), get(b), value=-value), "{y} - {0}"


def _flip(call: Call, node: Node) -> Undo:
    args, kwargs = call.given()
    dims = args[1:] or (kwargs["dims"],)
    return lambda y, get: y.flip(*dims), "{y}"


def _over(x: torch.Tensor, alpha: Any) -> torch.Tensor:
    return x if alpha == 1 else x / alpha


_RULES: dict[str, Callable[[Call, Node], Undo | None]] = {
    **dict.fromkeys(("add",), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    "rsub": _rsub,
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), _div),
    **dict.fromkeys(("neg", "negative"), _neg),
    "addcmul": _addcmul,
    "flip": _flip,
}


def nonzero(value: Any) -> bool:
    """Whether all numbers of an argument are known to differ from 0, but for underflow."""
    if not isinstance(value, Node):
        return (isinstance(value, Number) and value != 0) or _positive(value)
    name = _named(value)
    return _positive(value) or (name in KEEPS_SIGN and all(map(nonzero, _factors(value))))


def _positive(value: Any) -> bool:
    if isinstance(value, Constant):
        return value.positive
    if not isinstance(value, Node):
        return isinstance(value, (int, float)) and value > 0
    name, call = _named(value), value.made
    if name == "add" and call is not None:
        parts = _two(call) if call.argument("alpha", 1) == 1 else (None,)
        return all(_positive(part) or (isinstance(part, (int, float)) and part == 0) for part in parts)
    return name in POSITIVE or (name in KEEPS_SIGN - {"neg"} and all(map(_positive, _factors(value))))


def _named(value: Node) -> str:
    """The call that gives a tensor, if its numbers are not rounded to others."""
    call = value.made
    if call is None or call.writes or not value.dtype.is_floating_point:
        return ""
    return "" if call.argument("rounding_mode") is not None else call.function.name


def _factors(value: Node) -> tuple:
    call: Any = value.made
    return _two(call) if call.function.name in ("mul", "div") else (call.leaves[0],)


# Views


def covering(base: Node, pieces: Sequence[Node]) -> list[Node]:
    """Those among some views that have every entry of a tensor, and none twice; none if there are none."""
    pieces = sorted((p for p in pieces if p.dtype == base.dtype), key=lambda p: -p.shape.numel())
    laid = tuple((tuple(p.shape), p.stride, p.offset - base.offset) for p in pieces)
    return [pieces[i] for i in _covering(tuple(base.shape), base.stride, laid)]


@lru_cache(256)
def _covering(shape: tuple[int, ...], stride: tuple[int, ...], laid: tuple) -> list[int]:
    size = torch.Size(shape).numel()
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if size else 0
    seen, found, count = torch.zeros(span, dtype=torch.bool), [], 0
    for i, (piece, steps, offset) in enumerate(laid):
        number = torch.Size(piece).numel()
        view = seen.as_strided(piece, steps, offset) if number else seen[:0]
        if number and not view.any():
            view.fill_(True)
            found.append(i)
            count += number
    return found if count == size == int(seen.sum()) else []
