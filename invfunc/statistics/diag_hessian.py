"""The diagonal of the Hessian."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import spelled
from invfunc.reductions.quantity import HESSIAN
from invfunc.reductions.squares import SquaresOfEach, SumOfSquares
from invfunc.statistic import Statistic


def diag_hessian(
    f: Callable,
    loss: Callable | None = None,
    *,
    per_sample: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The exact diagonal of the Hessian of a loss in the parameters.

        torch.func.hessian(f)(params, *batch).diagonal()      # of the sum, where f returns [N] losses
        [torch.func.hessian(lambda p: f(p, *batch)[n])(params).diagonal() for n in range(N)]      # with per_sample=True

    It is the diagonal of the GGN and of second-order terms: each nonlinear operation of the model adds its own second
    derivative. Piecewise linear ones (ReLU, pooling, linear layers) add none, so a network of these costs what its GGN
    costs.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. With `loss`, a model function
            `f(params, *inputs)`, which returns outputs `[N, ...]` or a pytree of them. f and loss are pure in
            torch.func's sense (see the conventions).
        loss: `loss(outputs, target)`; it need not be convex.
        per_sample: return the part of each sample, which has the scale of the whole and sums to it.
        samples: the indices of the samples whose part of the Hessian is wanted.
        argnums, in_dims, out_dims, has_aux: as in `diag_ggn`.

    Returns:
        A function `(params, *batch) -> tree`, with loss `(params, *inputs, target) -> tree`, with tensors shaped like
        the parameters, in the unit of loss / parameter^2; tensors `[N, *p]` `per_sample`.

    Raises:
        SampleAxisError: samples are mixed; or, per_sample, a parameter is read again by what depends on it, or not
            linearly, in a scalar loss that is neither the mean nor the sum of those of the samples: return these.
        RandomnessError: a nonlinear operation draws random numbers.
        ArgumentError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x @ w).sin()
        >>> invfunc.diag_hessian(f)(torch.full((1,), torch.pi / 2), torch.tensor([[1.0], [3.0]]))
        tensor([8.])
        >>> invfunc.diag_hessian(f, per_sample=True)(torch.full((1,), torch.pi / 2), torch.tensor([[1.0], [3.0]]))
        tensor([[-1.],
                [ 9.]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `diag_ggn`, and a pullback (vector-Jacobian product) for each entry of a sample at every element-wise
    operation that is nonlinear, two at the other nonlinear ones. Parameters that are read again by what depends on them
    (tied in series, recurrent), or that are not read linearly (`exp(w)`, `weight_norm`), take one more run of f, and a
    second derivative for each of their entries.

    Source: BackPACK's DiagHessian and BatchDiagHessian (Dangel, Kunstner and Hennig, ICLR 2020) for chains of modules.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    reduction, options["spelled"] = SquaresOfEach() if per_sample else SumOfSquares(), spelled(per_sample=per_sample)
    return Statistic("diag_hessian", f, reduction, kind=HESSIAN, loss=loss, **options)
