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

    In a Laplace approximation S is the inverse of the curvature plus the precision of the prior: `inverse(prior)` of a
    `Kronecker` or of `Eigenpairs`, or `1 / (d + prior)` for a `diag_ggn` d. f is taken as linear around its parameters.
    For operations with a rule J is not formed: with the input a of a layer, the gradients s at its output, and S = B
    (x) A, the covariance is `(s^T B s) (a^T A a)`.

    Args:
        f: a model function `f(params, *inputs)`, which returns one tensor `[N, *out]`. f is pure in torch.func's sense
            (see the conventions).
        covariance: a tree like the parameters: for each a tensor of variances of its shape, a `Kronecker` (its own, or
            with `joint=True` that of a weight and its bias), or None if it has no uncertainty. Or a symmetric matrix
            over all parameters: a tensor `[P, P]`, in the order of the parameters, or a `LowRank`. Or a number, the
            variance of all entries.
        out_dims: the sample axis of the outputs.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *inputs) -> [N, *out, *out]`, in the unit of outputs squared. The variances are its
        diagonal.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_jacobian`; a covariance of other parameters or shapes, or with
            negative eigenvalues; several outputs.
        ArgumentTypeError: the covariance has something else in it.

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

        A Laplace approximation with Kronecker factors and a prior of variance 1 / 0.1:

        >>> model, params = invfunc.functional(torch.nn.Linear(2, 1))
        >>> mse, y = torch.nn.MSELoss(reduction="sum"), torch.zeros(2, 1)
        >>> factors = invfunc.kfac(model, mse, fisher="exact")(params, x, y)
        >>> S = {name: K.inverse(0.1) for name, K in factors.items()}
        >>> invfunc.predictive_covariance(model, S)(params, x).shape
        torch.Size([2, 1, 1])

        The same with the whole GGN, and a prior of variance 1 / 2:

        >>> pairs = invfunc.eigenpairs(model, mse)(params, x, y)
        >>> invfunc.predictive_covariance(model, pairs.inverse(2.0))(params, x).flatten().round(decimals=3)
        tensor([0.2940, 0.4120])

        Covariances between samples are `gram` of the outputs as a function of standard normal numbers z.

        >>> std = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).sqrt()
        >>> invfunc.gram(lambda z, x: f(w + std * z, x))(torch.zeros_like(w), x)[:, 0, :, 0]
        tensor([[ 1.,  1.],
                [ 1., 13.]])

    Composes with: `chunked` over samples and params, `streamed`, `distributed`; `torch.func.grad`, `vmap`, `jvp` around
    it, and the gradient in the covariance.

    Cost: one forward pass, a pullback of all outputs of a sample at once, products of each layer's inputs and gradients
    with the matrices, and a decomposition of each `Kronecker`, once. If an operation has no rule, or S does not factor
    as the operation does, the rows of J are formed, for some samples at a time. A `LowRank` of k vectors takes k such
    products and `[N, C, k]`; a matrix `[P, P]` takes all of J.

    Source: MacKay (1992); Ritter, Botev and Barber, "A scalable Laplace approximation for neural networks", ICLR 2018;
    Immer, Korzepa and Bauer, "Improving predictions of Bayesian neural nets via local linearization", AISTATS 2021.
    """
    options: dict[str, Any] = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    reduction = PredictiveCovariance(covariances("predictive_covariance", covariance))
    return Statistic("predictive_covariance", f, reduction, kind=JACOBIAN, out_dims=out_dims, **options)
