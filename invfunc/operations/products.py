"""Products: each is one einsum, which tells where the samples go and how a share factorises."""

from __future__ import annotations

import torch

from invfunc.errors import samples_lost
from invfunc.operations import equations
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import BATCH_SUM, Call, Mixed, Place, Unknown
from invfunc.operations.batch_axis.samples import NONE, located, samples_of
from invfunc.operations.operation import define
from invfunc.operations.receptive_fields.step import Rows, Step, columns_of, joined, most, raised, rows_of


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


def _read_by_product(step: Step, a: torch.Tensor, b: torch.Tensor) -> Rows:
    return joined(rows_of(step.rows(a)), columns_of(step.rows(b)))


def _mm(step: Step, out: torch.Tensor) -> Rows:
    return _read_by_product(step, step["self"], step["mat2"])


def _addmm(step: Step, out: torch.Tensor) -> Rows:
    a, b = ("batch1", "batch2") if "batch1" in step else ("mat1", "mat2")
    added = step.rows(step["self"])
    return joined(None if added is None else raised(added, out.ndim), _read_by_product(step, step[a], step[b]))


def _mv(step: Step, out: torch.Tensor) -> Rows:
    matrix = step["mat"] if "mat" in step else step["self"]
    read, whole = step.rows(matrix), step.hull(step["vec"])
    return joined(
        None if read is None else most(read, (2,)).squeeze(2),
        None if whole is None else whole[:, None],
        raised(step.filled(step["self"]), 1) if "mat" in step else None,
    )


def _linear(step: Step, out: torch.Tensor) -> Rows:
    weight, bias = rows_of(step.rows(step["weight"])), step.rows(step["bias"])
    return joined(
        rows_of(step.rows(step["input"])),
        None if weight is None else raised(weight.squeeze(-1), out.ndim),
        None if bias is None else raised(bias, out.ndim),
    )


define(
    "linear",
    batch_axis=product,
    equation=equations.linear,
    receptive_field=_linear,
    linear="each",
    added=["bias"],
    biased=True,
)
define("matmul", batch_axis=product, equation=equations.matmul, linear="each")
define("rmatmul", batch_axis=product, equation=equations.rmatmul, linear="each")
define("mm bmm", batch_axis=product, equation=equations.mm, receptive_field=_mm, linear="each")
define("mv", batch_axis=product, equation=equations.mv, receptive_field=_mv, linear="each")
define("dot", batch_axis=product, equation=equations.dot, linear="each")
define("vdot", batch_axis=product, equation=equations.matmul, linear="each")
define("addmm", batch_axis=product, equation=equations.addmm, receptive_field=_addmm, linear="each", added=["self"])
define("addmv", batch_axis=product, equation=equations.addmv, receptive_field=_mv, linear="each", added=["self"])
define("baddbmm", batch_axis=product, equation=equations.baddbmm, receptive_field=_addmm, linear="each", added=["self"])
define("_addmm_activation", receptive_field=_addmm)
define("inner", batch_axis=product, equation=equations.inner, linear="each")
define("outer", batch_axis=product, equation=equations.outer, linear="each")
define("bilinear", batch_axis=product, equation=equations.bilinear, linear="each")
define("tensordot", batch_axis=product, equation=equations.tensordot, linear="each")
define("einsum", batch_axis=product, equation=equations.einsum, linear="each")
define("kron", batch_axis=_kron, linear="each")
define("_grouped_mm", composed=grouped_mm)
