"""Covariances of a model's outputs, where its parameters are known up to a covariance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from invfunc import tree
from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import covariances
from invfunc.linear_algebra.low_rank import LowRank
from invfunc.reductions.predictive import PredictiveCovariance
from invfunc.reductions.quantity import JACOBIAN
from invfunc.statistic import Statistic


def predictive_covariance(
    f: Callable,
    covariance: tree.Tree | LowRank | float,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The covariance of the outputs of each sample, where the parameters have a covariance: `J S J^T`.

        J = torch.cat([j.flatten(2) for j in batch_jacobian(f)(params, *inputs).values()], 2)    # [N, C, P]
        torch.einsum("ncp,pq,ndq->ncd", J, S, J)     # S [P, P]: a block for each parameter, or of low rank over all

    It is that of a Laplace approximation, whose S is the inverse of a curvature with that of a prior (`inverse` of a
    `Kronecker` or of `Eigenpairs` with damping, the reciprocal of a `diag_ggn` with something added), and whose f is
    linear around its parameters. J is not formed where an operation has a rule: of the factors of a layer s and a, and
    S = B (x) A, it is `(s^T B s) (a^T A a)`.

    Args:
        f: a model function `f(params, *inputs)`, which returns one tensor `[N, *out]`. f is pure in torch.func's sense
            (see the conventions).
        covariance: a tree like the parameters, with the variances of a parameter in a tensor of its shape, its matrix
            in a `Kronecker` (of its own, or of a weight and its bias, `joint=True`), or None for one that is known; or
            a matrix over all parameters, symmetric, as a tensor `[P, P]` in the order of their leaves or a `LowRank`;
            or a number, the variance of all entries.
        out_dims: the sample axis of the outputs.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *inputs) -> [N, *out, *out]`, in the unit of outputs squared. The variances are its
        diagonal.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_jacobian`; a covariance of other parameters or shapes, or with
            negative eigenvalues; several outputs.
        ArgumentTypeError: a covariance with something else in it.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [1.0, 2.0]])
        >>> invfunc.predictive_covariance(f, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))(w, x)
        tensor([[[ 1.,  0.],
                 [ 0.,  2.]],
        <BLANKLINE>
                [[13.,  0.],
                 [ 0., 18.]]])

        Of the Laplace approximation with Kronecker factors and a prior of variance 1 / 0.1:

        >>> model, params = invfunc.functional(torch.nn.Linear(2, 1))
        >>> mse, y = torch.nn.MSELoss(reduction="sum"), torch.zeros(2, 1)
        >>> factors = invfunc.kfac(model, mse, fisher="exact")(params, x, y)
        >>> S = {name: K.inverse(0.1) for name, K in factors.items()}
        >>> invfunc.predictive_covariance(model, S)(params, x).shape
        torch.Size([2, 1, 1])

        Of that with the whole GGN, and a prior of variance 1 / 2:

        >>> pairs = invfunc.eigenpairs(model, mse)(params, x, y)
        >>> invfunc.predictive_covariance(model, pairs.inverse(2.0))(params, x).flatten().round(decimals=3)
        tensor([0.2940, 0.4120])

        Between samples, too: `gram` of the outputs as a function of standard normal numbers z.

        >>> std = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).sqrt()
        >>> invfunc.gram(lambda z, x: f(w + std * z, x))(torch.zeros_like(w), x)[:, 0, :, 0]
        tensor([[ 1.,  1.],
                [ 1., 13.]])

    Composes with: `chunked` over samples and params, `streamed`, `distributed`; `torch.func.grad`, `vmap`, `jvp` around
    it, and the gradient in the covariance.

    Cost: one forward pass, a pullback of all outputs of a sample at once, and products of what layers read and of their
    cotangents with the matrices. Where an operation has no rule, or S does not factor as its operation does, the rows
    of J are formed, for some samples at a time. A decomposition of each `Kronecker`, once. Of k vectors of a `LowRank`
    what layers read and their cotangents times each of them, and `[N, C, k]` is kept; of a matrix `[P, P]` all of J.

    Source: MacKay (1992); Ritter, Botev and Barber, "A scalable Laplace approximation for neural networks", ICLR 2018;
    Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021.
    """
    options: dict[str, Any] = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    reduction = PredictiveCovariance(covariances("predictive_covariance", covariance))
    return Statistic("predictive_covariance", f, reduction, kind=JACOBIAN, out_dims=out_dims, **options)
