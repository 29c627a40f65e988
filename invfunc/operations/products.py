"""Products: each is one einsum, which tells where the samples go and how a share factorises."""

from __future__ import annotations

import torch

from invfunc.errors import samples_lost
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import BATCH_SUM, Call, Mixed, Place, Unknown
from invfunc.operations.batch_axis.samples import NONE, located, samples_of
from invfunc.operations.operation import define
from invfunc.operations.receptive_fields.step import Rows, Step, joined, raised, rows_of


def product(call: Call) -> Place:
    parsed = call.equation
    if parsed is None:
        raise Unknown("it has no rule that follows the sample axis")
    found: set[tuple[str, Axis]] = set()
    for x, labels in zip(parsed.operands, parsed.inputs, strict=True):
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            found.add((labels[axis.dim], axis.at(0)))
    for x, _ in parsed.added:
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            found.add((parsed.output[axis.dim - x.ndim + len(parsed.output)], axis.at(0)))
    if len(found) != 1:
        raise Mixed("it multiplies samples with each other")
    label, axis = found.pop()
    if label not in parsed.output:
        return BATCH_SUM
    return axis.at(parsed.output.index(label))


def _kron(call: Call) -> Place:
    x, y = (call.arg("input"), call.arg("other"))
    if call.place(x) is not None and call.place(y) is not None:
        raise Mixed("it multiplies samples with each other")
    factors = [samples_of(call, a) - NONE if call.place(a) is not None else torch.ones_like(a.long()) for a in (x, y)]
    return located(torch.kron(*factors) + NONE, call.n)


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The rows up to each of the ends `offs`, as the tokens of each expert are, times a matrix of their own."""
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None:
        raise samples_lost("`grouped_mm` (only groups of rows are followed, without a bias)", unknown=True)
    ends = offs.tolist()
    groups = [mat_a[start:end] @ own for start, end, own in zip([0, *ends], ends, mat_b.unbind(), strict=False)]
    rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])  # which torch leaves as they are
    found = torch.cat([*groups, rest] if len(rest) else groups)
    return found if out_dtype is None else found.to(out_dtype)


# Receptive fields


def _linear(step: Step, out: torch.Tensor) -> Rows:
    weight, bias = rows_of(step.rows(step["weight"])), step.rows(step["bias"])
    return joined(
        rows_of(step.rows(step["input"])),
        None if weight is None else raised(weight.squeeze(-1), out.ndim),
        None if bias is None else raised(bias, out.ndim),
    )


define("_grouped_mm", composed=grouped_mm)
