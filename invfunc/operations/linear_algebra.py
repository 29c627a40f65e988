"""Linear algebra on the last dimensions, and spectra, integrals and quantiles along some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc._torch.functorch import memory_of
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, Unknown
from invfunc.operations.batch_axis.samples import located, samples_of
from invfunc.operations.operation import define, not_torchs

_LAST = dict.fromkeys(
    "det logdet slogdet inverse pinverse cholesky cholesky_solve cholesky_inverse triangular_solve svd qr lu_unpack "
    "matrix_exp matrix_power linalg_det linalg_slogdet linalg_inv linalg_inv_ex linalg_pinv linalg_cholesky "
    "linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals linalg_svd linalg_svdvals linalg_qr "
    "linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_matrix_exp "
    "linalg_matrix_power linalg_matrix_rank linalg_cond linalg_solve_triangular linalg_solve linalg_solve_ex "
    "linalg_lstsq linalg_householder_product linalg_lu_solve linalg_ldl_solve lu_solve istft".split(),
    2,
) | {"linalg_vander": 1, "stft": 1, "view_as_complex": 1, "view_as_real": 0}
"""On how many."""

_VECTORS = {"linalg_householder_product": {1}, "lu_unpack": {1}, "linalg_lu_solve": {1}, "linalg_ldl_solve": {1}}
_VECTORS |= {"lu_solve": {2}}
"""The arguments that have a vector where others have a matrix."""


def batched(call: Call) -> Place:
    columns = _columns(call)
    if columns is not None:
        return columns
    arguments = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, torch.Tensor)]
    last = [_LAST[call.name] - (i in _VECTORS.get(call.name, ())) for i in range(len(arguments))]
    if call.name in ("linalg_solve", "linalg_solve_ex", "linalg_lstsq"):
        a, b = call.arg("A", call.arg("input")), call.arg("B", call.arg("b"))
        vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
        last = [2 - (x is b and vector) for x in arguments]
    return _batch(call, arguments, last)


def _columns(call: Call) -> Place:
    """Where the samples are if they are right-hand sides of one linear system, which are solved independently."""
    names = {"linalg_solve": (0, 1), "linalg_solve_triangular": (0, 1), "cholesky_solve": (1, 0)}
    if call.name not in names or len(call.args) < 2:
        return None
    a, b = (call.args[i] for i in names[call.name])
    axis, side = call.place(b), 1 if call.kwargs.get("left", True) else 2
    vector = call.name == "linalg_solve" and (b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]))
    if vector or call.place(a) is not None or not isinstance(axis, Axis) or axis.dim != b.ndim - side:
        return None
    return axis.at(call.out.ndim - side)


def _batch(call: Call, arguments: list[torch.Tensor], last: list[int]) -> Place:
    """Where the samples are among the leading (batch) dimensions, of which some arguments may have fewer."""
    most = max(x.ndim - k for x, k in zip(arguments, last, strict=True))
    found: set[Axis] = set()
    for x, k in zip(arguments, last, strict=True):
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            if axis.dim >= x.ndim - k:
                raise Mixed("it computes across the sample axis")
            found.add(axis.at(axis.dim - (x.ndim - k) + most))
    if len(found) != 1:
        raise Mixed("its arguments have their samples along different axes")
    return found.pop()


def searched(call: Call) -> Place:
    first, second = ("sorted_sequence", "input") if call.name == "searchsorted" else ("input", "boundaries")
    given = call.arg(first), call.arg(second)
    row, x = given if call.name == "searchsorted" else given[::-1]
    if row.ndim == 1 and call.place(row) is None:
        return call.place(x)
    if not isinstance(x, torch.Tensor) or call.arg("sorter", None) is not None:
        raise Unknown("it searches in sequences that depend on the samples")
    return _batch(call, [row, x], [1, 1])


# Along dimensions that are given


def as_strided(call: Call) -> Place:
    x = call.first
    if not x.is_contiguous() or x.storage_offset() or memory_of(x).nbytes() != x.numel() * x.element_size():
        raise Unknown("it reads memory beside its input")
    others = {key: value for key, value in call.kwargs.items() if key not in ("input", "self")}
    return located(samples_of(call, x).contiguous().as_strided(*call.args[1:], **others), call.n)


# Distances


def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None) -> torch.Tensor:
    """`cdist` written out, as torch's has a wrong derivative under vmap, and no second derivative."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _solve(func: Callable, A: torch.Tensor, B: torch.Tensor, **options: Any) -> torch.Tensor:
    """`linalg.solve` with A expanded to the leading dimensions of B: under vmap torch takes those that A lacks for the
    dimension of the vmap, and its result is wrong."""
    lead, own = B.shape[:-2], A.shape[:-2]
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    wide = A if vector or len(own) >= len(lead) else A.expand(*torch.broadcast_shapes(lead, own), *A.shape[-2:])
    return func(wide, B, **options)


define("linalg_solve", twice=_solve)
define("cdist", composed=cdist, twice=not_torchs(cdist))
