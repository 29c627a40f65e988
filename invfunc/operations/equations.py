"""Every product of torch as one einsum: which labels its operands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc.operations.operation import known

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Equation:
    """`scale * einsum(operands) + sum(factor * tensor for tensor, factor in added)`, broadcast from the right.

    A number that is added besides is left out.
    """

    operands: list[torch.Tensor]
    inputs: list[str]
    output: str
    scale: Any = 1
    added: tuple[tuple[torch.Tensor, Any], ...] = ()

    def meets(self, x: torch.Tensor) -> tuple[str, Any, list[tuple[str, torch.Tensor]]] | None:
        """The labels of an operand that is read once, the number that multiplies it, and the operands that do."""
        added = [factor for y, factor in self.added if y is x]
        at = [i for i, y in enumerate(self.operands) if y is x]
        if len(at) + len(added) != 1 or isinstance(scale := added[0] if added else self.scale, torch.Tensor):
            return None
        if added:
            return self.output[len(self.output) - x.ndim :], scale, []
        others = [(self.inputs[i], y) for i, y in enumerate(self.operands) if i != at[0]]
        return self.inputs[at[0]], scale, others


def equation(name: str, args: tuple, kwargs: dict[str, Any]) -> Equation | None:
    """The equation of a call, None where it cannot be written as one."""
    parse = known(name).equation
    return parse(*args, **{k: v for k, v in kwargs.items() if k != "out"}) if parse else None


def matmul(input: torch.Tensor, other: torch.Tensor) -> Equation:
    x, y = input, other
    batch = LETTERS[: max(x.ndim, y.ndim, 2) - 2]
    i, j, k = LETTERS[-3:]
    left = batch[len(batch) - max(x.ndim - 2, 0) :] + (i if x.ndim > 1 else "") + j
    right = batch[len(batch) - max(y.ndim - 2, 0) :] + j + (k if y.ndim > 1 else "")
    return Equation([x, y], [left, right], batch + (i if x.ndim > 1 else "") + (k if y.ndim > 1 else ""))


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Equation:
    batch = LETTERS[: input.ndim - 1]
    out = "y" if weight.ndim == 2 else ""
    added = () if bias is None else ((bias, 1),)
    return Equation([input, weight], [batch + "z", out + "z"], batch + out, added=added)


def addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Equation:
    product = matmul(mat1, mat2)
    return Equation(product.operands, product.inputs, product.output, alpha, ((input, beta),))


def inner(input: torch.Tensor, other: torch.Tensor) -> Equation:
    left, right = LETTERS[: input.ndim - 1], LETTERS[input.ndim - 1 : input.ndim + other.ndim - 2]
    return Equation([input, other], [left + "z", right + "z"], left + right)


def outer(input: torch.Tensor, vec2: torch.Tensor) -> Equation:
    return Equation([input, vec2], ["a", "b"], "ab")


def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Equation:
    batch = LETTERS[: input1.ndim - 1]
    added = () if bias is None else ((bias, 1),)
    return Equation([input1, input2, weight], [batch + "x", batch + "y", "zxy"], batch + "z", added=added)


def tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2) -> Equation | None:
    if isinstance(dims, torch.Tensor):
        return None
    if isinstance(dims, int):
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    left, right = list(LETTERS[: a.ndim]), list(LETTERS[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*dims, strict=True):
        right[j] = left[i]
    shared = set(left) & set(right)
    return Equation([a, b], ["".join(left), "".join(right)], "".join(c for c in left + right if c not in shared))


def einsum(equation: Any, *operands: Any) -> Equation | None:
    """The equation with lower-case labels only and its ellipsis spelled out; the list format is not parsed."""
    tensors = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    left, arrow, output = equation.partition("->")
    inputs = left.split(",")
    if not arrow:
        letters = left.replace(",", "").replace("...", "")
        output = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    free = [c for c in LETTERS if c not in equation]
    names = {c: c if c.islower() else free.pop() for c in dict.fromkeys(equation) if c.isalpha()}
    width = max((t.ndim - len(s) + 3 for s, t in zip(inputs, tensors, strict=True) if "..." in s), default=0)
    if width > len(free):
        return None
    dots = "".join(free[:width])

    def spell(labels: str, ndim: int | None = None) -> str:
        labels = "".join(names.get(c, c) for c in labels)
        have = width if ndim is None else ndim - len(labels.replace("...", ""))
        return labels.replace("...", dots[width - have :])

    inputs = [spell(s, t.ndim) for s, t in zip(inputs, tensors, strict=True)]
    if any(len(set(s)) < len(s) for s in inputs):
        return None  # a diagonal
    return Equation(tensors, inputs, spell(output))


def mul(input: Any, other: Any) -> Equation | None:
    pair = [input, other]
    if not all(isinstance(x, torch.Tensor) for x in pair):
        return None
    labels = LETTERS[: max(x.ndim for x in pair)]
    return Equation(pair, [labels[len(labels) - x.ndim :] for x in pair], labels)


def add(input: Any, other: Any, *, alpha: Any = 1) -> Equation:
    added = tuple((x, c) for x, c in ((input, 1), (other, alpha)) if isinstance(x, torch.Tensor))
    return Equation([], [], LETTERS[: max(x.ndim for x, _ in added)], added=added)


def mm(input: torch.Tensor, mat2: torch.Tensor) -> Equation:
    return matmul(input, mat2)


def mv(input: torch.Tensor, vec: torch.Tensor) -> Equation:
    return matmul(input, vec)


def dot(input: torch.Tensor, tensor: torch.Tensor) -> Equation:
    return matmul(input, tensor)


def addmv(input: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, **scales: Any) -> Equation:
    return addmm(input, mat, vec, **scales)


def baddbmm(input: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **scales: Any) -> Equation:
    return addmm(input, batch1, batch2, **scales)


def sub(input: Any, other: Any, *, alpha: Any = 1) -> Equation:
    return add(input, other, alpha=-alpha)


def rsub(input: Any, other: Any, *, alpha: Any = 1) -> Equation:
    return add(other, input, alpha=-alpha)
