# Made by `python -m tests.stub`.

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, TypeVar, overload

import torch

from invfunc.around import Explainable
from invfunc.errors import InvFuncError as InvFuncError
from invfunc.errors import InvFuncWarning as InvFuncWarning
from invfunc.invertible.checks import InverseReport
from invfunc.kronecker.matrix import Kronecker, LowRank
from invfunc.operation import Operation
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible as Invertible
from invfunc.plan import Explanation
from invfunc.problem import Indices, InDims
from invfunc.products.eigenpairs import Decomposition, Largest
from invfunc.products.operators import Estimator, Linearization, Operator
from invfunc.products.product import Product
from invfunc.reductions.estimates import Estimate, NoiseScale
from invfunc.statistic import Statistic

from . import errors as errors
from . import kronecker as kronecker
from . import layers as layers
from . import pairs as pairs
from . import thresholds as thresholds
from . import tree as tree

_T = TypeVar("_T")
_K = TypeVar("_K")
_S = TypeVar("_S", bound=Callable[..., Any])

class _LikeParams(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> _T: ...

class _Pair(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, _T]: ...

class _Triple(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, _T, _T]: ...

class _WithNorms(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, torch.Tensor]: ...

class _WithNoise(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, NoiseScale]: ...

class _OfTensor(Statistic):
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> torch.Tensor: ...

class _OfFactors(Statistic):
    @overload
    def __call__(self, params: torch.Tensor, /, *batch: Any, **constants: Any) -> Kronecker: ...
    @overload
    def __call__(self, params: dict[_K, torch.Tensor], /, *batch: Any, **constants: Any) -> dict[_K, Kronecker]: ...
    @overload
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> Any: ...

class _OfVector(Product):
    def __call__(self, params: _T, v: _T, /, *batch: Any, **constants: Any) -> _T: ...
    def linearize(self, params: _T, /, *batch: Any, **constants: Any) -> Callable[[_T], _T]: ...

class _Estimator(Estimator):
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> Estimate: ...

__version__ = "0.2.0"
__all__ = [
    "InvFuncError",
    "InvFuncWarning",
    "Invertible",
    "additive_coupling",
    "affine_coupling",
    "batch_grad",
    "batch_jacobian",
    "batch_l2_grad",
    "certified",
    "chain",
    "check_inverse",
    "chunked",
    "clipped_grad",
    "compiled",
    "diag_ggn",
    "diag_hessian",
    "distributed",
    "eigenpairs",
    "ekfac",
    "errors",
    "estimate_diagonal",
    "estimate_trace",
    "explain",
    "functional",
    "ggn_trace",
    "ggnvp",
    "grad_and_variance",
    "gram",
    "hvp",
    "invert",
    "invertible_checkpoint",
    "kfac",
    "kronecker",
    "layers",
    "linear_operator",
    "linearize",
    "noise_scale",
    "operation",
    "outputs",
    "pairs",
    "predictive_covariance",
    "reduced",
    "repeated",
    "sketched_grad",
    "sqrt_ggn",
    "streamed",
    "sum_grad_squared",
    "together",
    "variance",
    "with_log_det",
]

def additive_coupling(
    F: Callable[..., Any], G: Callable[..., Any], *, split_dim: int | None = ..., exact: bool | Grid = ...
) -> Invertible: ...
def affine_coupling(
    F: Callable[..., Any], G: Callable[..., Any], *, log_scale: Callable[..., Any] = ..., split_dim: int | None = ...
) -> Invertible: ...
@overload
def batch_grad(
    f: Callable[..., Any],
    *,
    sum_of: Callable[[torch.Tensor], torch.Tensor] | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
) -> _LikeParams: ...
@overload
def batch_grad(
    f: Callable[..., Any],
    *,
    sum_of: Callable[[torch.Tensor], torch.Tensor] | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def batch_jacobian(
    f: Callable[..., Any],
    *,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def batch_l2_grad(f: Callable[..., Any], *, samples: Indices | None = ..., in_dims: InDims = ...) -> _LikeParams: ...
@overload
def batch_l2_grad(
    f: Callable[..., Any],
    *,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def certified(t: _S, *, generator: torch.Generator | int, confidence: float = ..., share: float = ...) -> _S: ...
def chain(*blocks: Callable[..., Any], anchor_every: int | None = ...) -> Invertible: ...
def check_inverse(
    pair: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
    x: Any,
    *args: Any,
    tolerance: float | None = ...,
    **kwargs: Any,
) -> InverseReport: ...
@overload
def chunked(
    f: _S,
    n: int | None = ...,
    *,
    chunk_size: int | None = ...,
    memory: int | float | str | None = ...,
    over: Literal["outputs", "samples", "params"] | None = ...,
    fold: Any = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
    progress: bool = ...,
) -> _S: ...
@overload
def chunked(
    f: None = ...,
    n: int | None = ...,
    *,
    chunk_size: int | None = ...,
    memory: int | float | str | None = ...,
    over: Literal["outputs", "samples", "params"] | None = ...,
    fold: Any = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
    progress: bool = ...,
) -> Callable[[_S], _S]: ...
@overload
def clipped_grad(
    f: Callable[..., Any],
    max_norm: float | torch.Tensor | Mapping[str, float | torch.Tensor],
    *,
    weight: Callable[[torch.Tensor, Any], torch.Tensor] | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    value: bool = ...,
) -> _WithNorms: ...
@overload
def clipped_grad(
    f: Callable[..., Any],
    max_norm: float | torch.Tensor | Mapping[str, float | torch.Tensor],
    *,
    groups: Literal["layer"] | Callable[[str], str] | Mapping[str, str] | None = ...,
    weight: Callable[[torch.Tensor, Any], torch.Tensor] | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
    value: bool = ...,
) -> Statistic: ...
def compiled(
    t: _S, *, backend: Literal["replay", "inductor", "cudagraphs"] = ..., pad: Sequence[int] | None = ...
) -> _S: ...
@overload
def diag_ggn(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    method: Literal["auto", "dense"] = ...,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    per_sample: bool = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _LikeParams: ...
@overload
def diag_ggn(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    method: Literal["auto", "dense"] = ...,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    with_error: bool = ...,
    per_sample: bool = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def diag_hessian(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    per_sample: bool = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _LikeParams: ...
@overload
def diag_hessian(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    per_sample: bool = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def distributed(t: _S, group: Any = ..., *, each: Literal["local", "gather"] = ...) -> _S: ...
def eigenpairs(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["mc", "exact", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
    progress: bool = ...,
    top: int | None = ...,
) -> Decomposition | Largest: ...
@overload
def ekfac(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["mc", "exact", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    weight_sharing: Literal["expand", "reduce", "backpack"] = ...,
    max_factor_dim: int | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfFactors: ...
@overload
def ekfac(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["mc", "exact", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    weight_sharing: Literal["expand", "reduce", "backpack"] = ...,
    joint: bool = ...,
    unsupported: Literal["error", "diagonal", "skip"] = ...,
    max_factor_dim: int | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def estimate_diagonal(
    product: Callable[..., Any],
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = ...,
    method: Literal["hutchinson", "xdiag"] = ...,
    progress: bool = ...,
) -> _Estimator: ...
def estimate_trace(
    product: Callable[..., Any],
    *,
    probes: int,
    generator: torch.Generator,
    distribution: Literal["rademacher", "gaussian"] = ...,
    method: Literal["hutchinson", "xtrace"] = ...,
    progress: bool = ...,
) -> _Estimator: ...
def explain(statistic: Explainable) -> Callable[..., Explanation]: ...
def functional(model: Any, *, train: bool | None = ...) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]: ...
@overload
def ggn_trace(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    method: Literal["auto", "dense"] = ...,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfTensor: ...
@overload
def ggn_trace(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    per_parameter: bool = ...,
    method: Literal["auto", "dense"] = ...,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    with_error: bool = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def ggnvp(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["exact", "mc", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    blocks: bool = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfVector: ...
@overload
def ggnvp(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["exact", "mc", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    blocks: bool = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Product: ...
@overload
def grad_and_variance(
    f: Callable[..., Any],
    *,
    correction: float = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    value: bool = ...,
) -> _Pair: ...
@overload
def grad_and_variance(
    f: Callable[..., Any],
    *,
    correction: float = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
    value: bool = ...,
) -> Statistic: ...
@overload
def gram(
    f: Callable[..., Any],
    *,
    others: tuple[Any, ...] | list[Any] | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfTensor: ...
@overload
def gram(
    f: Callable[..., Any],
    *,
    others: tuple[Any, ...] | list[Any] | None = ...,
    per_parameter: bool = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def hvp(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    blocks: bool = ...,
    modify: Literal["abs", "clip"] | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfVector: ...
@overload
def hvp(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    blocks: bool = ...,
    modify: Literal["abs", "clip"] | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Product: ...
def invert(pair: Invertible) -> Invertible: ...
def invertible_checkpoint(
    f: Callable[..., Any] | None = ...,
    f_inv: Callable[..., Any] | None | EllipsisType = ...,
    *,
    keep: bool | Sequence[int] = ...,
    preserve_rng_state: bool = ...,
    check: bool | float | str = ...,
    min_bytes: int = ...,
    has_aux: bool = ...,
) -> Any: ...
@overload
def kfac(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["mc", "exact", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    method: Literal["auto", "dense"] = ...,
    weight_sharing: Literal["expand", "reduce", "backpack"] = ...,
    max_factor_dim: int | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfFactors: ...
@overload
def kfac(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    fisher: Literal["mc", "exact", "empirical"] = ...,
    mc_samples: int = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    method: Literal["auto", "dense"] = ...,
    weight_sharing: Literal["expand", "reduce", "backpack"] = ...,
    joint: bool = ...,
    unsupported: Literal["error", "diagonal", "skip"] = ...,
    max_factor_dim: int | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def linear_operator(product: Callable[..., Any], kind: Literal["scipy", "torch"] = ...) -> Operator: ...
def linearize(f: Callable[..., Any], *, has_aux: bool = ...) -> Linearization: ...
@overload
def noise_scale(
    f: Callable[..., Any],
    *,
    groups: Literal["layer"] | Callable[[str], str | None] | Mapping[str, str | None] | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    value: bool = ...,
) -> _WithNoise: ...
@overload
def noise_scale(
    f: Callable[..., Any],
    *,
    groups: Literal["layer"] | Callable[[str], str | None] | Mapping[str, str | None] | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
    value: bool = ...,
) -> Statistic: ...
def operation(fn: Callable[..., Any]) -> Operation: ...
def outputs(z: Any) -> Any: ...
@overload
def predictive_covariance(
    f: Callable[..., Any],
    covariance: tree.Tree | LowRank | float,
    *,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _OfTensor: ...
@overload
def predictive_covariance(
    f: Callable[..., Any],
    covariance: tree.Tree | LowRank | float,
    *,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def reduced(t: Statistic, fn: Callable[..., Any] | Mapping[str, Callable[..., Any]]) -> Statistic: ...
def repeated(block: Callable[..., Any], *, anchor_every: int | None = ...) -> Invertible: ...
@overload
def sketched_grad(
    f: Callable[..., Any],
    *,
    rows: int,
    columns: int,
    generator: torch.Generator,
    projection: Literal["signs", "sparse", "mask"] = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
) -> _LikeParams: ...
@overload
def sketched_grad(
    f: Callable[..., Any],
    *,
    rows: int,
    columns: int,
    generator: torch.Generator,
    projection: Literal["signs", "sparse", "mask"] = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def sqrt_ggn(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
) -> _LikeParams: ...
@overload
def sqrt_ggn(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = ...,
    *,
    mc_samples: int | None = ...,
    generator: torch.Generator | None = ...,
    sample: Callable[..., Any] | None = ...,
    peel: int | str | None = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    out_dims: int = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def streamed(
    t: _S,
    *,
    device: Any = ...,
    progress: bool = ...,
    checkpoint: Any = ...,
    every: float = ...,
    out: Any = ...,
    reduction: Literal["sum"] | None = ...,
) -> _S: ...
@overload
def sum_grad_squared(
    f: Callable[..., Any],
    *,
    per: Literal["sample", "token"] = ...,
    samples: Indices | None = ...,
    in_dims: InDims = ...,
) -> _LikeParams: ...
@overload
def sum_grad_squared(
    f: Callable[..., Any],
    *,
    per: Literal["sample", "token"] = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
) -> Statistic: ...
@overload
def together(first: _LikeParams, second: _LikeParams, /) -> _Pair: ...
@overload
def together(first: _LikeParams, second: _LikeParams, third: _LikeParams, /) -> _Triple: ...
@overload
def together(*statistics: Statistic) -> Statistic: ...
@overload
def variance(
    f: Callable[..., Any], *, correction: float = ..., samples: Indices | None = ..., in_dims: InDims = ...
) -> _LikeParams: ...
@overload
def variance(
    f: Callable[..., Any],
    *,
    correction: float = ...,
    samples: Indices | None = ...,
    argnums: int | tuple[int, ...] = ...,
    in_dims: InDims = ...,
    has_aux: bool = ...,
) -> Statistic: ...
def with_log_det(pair: Invertible) -> Invertible: ...
