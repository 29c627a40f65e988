"""Statistics of square roots of the curvature, and of the Jacobian of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc.callables import by_method, covariances, describe, drawing, spelled
from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import LowRank
from invfunc.problem import Indices, InDims
from invfunc.reductions.columns import (
    JacobianRows,
    MatrixTrace,
    PredictiveCovariance,
    SquareRoot,
    SquaresOfEach,
    SumOfSquares,
)
from invfunc.reductions.estimates import EstimatedSquares, EstimatedTrace
from invfunc.reductions.reduction import GGN, HESSIAN, JACOBIAN
from invfunc.statistic import Statistic


def diag_ggn(
    f: Callable,
    loss: Callable | None = None,
    *,
    method: Literal["auto", "dense"] = "auto",
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    with_error: bool = False,
    per_sample: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The diagonal of the generalised Gauss-Newton matrix (GGN) of a loss in the parameters, exact or drawn.

        J = jacrev(f)(params, *inputs)                        # [N, C, P]
        H = hessian(lambda z: loss(z, target))(f(params, *inputs))
        torch.einsum("ncp,ncmd,mdp->p", J, H, J)
        torch.einsum("ncp,ncnd,ndp->np", J, H, J)             # with per_sample=True

    H has the scale of the loss: the 1/N of a mean, class weights, ignored targets. Columns are vectors r at the outputs
    whose products sum to H: `sum r r^T == H`. A pullback (vector-Jacobian product) takes each of them to the
    parameters, where its square is added up.

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs `[N, ...]` or a pytree of them. Without `loss`,
            a loss function `f(params, *batch)`, which returns a scalar or `[N]`: its outputs are the inputs of torch's
            convex losses (`cross_entropy`, `mse_loss`, `binary_cross_entropy_with_logits`, `huber_loss`,
            `smooth_l1_loss`, `poisson_nll_loss`; for `nll_loss` and `kl_div` the input of the `log_softmax` or
            `logsigmoid` before it), or tensors that `outputs(z)` marks. f and loss are pure in torch.func's sense (see
            the conventions).
        loss: `loss(outputs, target)`, convex in the outputs. A loss that is linear in them has the GGN 0, as `nll_loss`
            of an f that ends in `log_softmax`: leave `loss` out, or return logits and pass `cross_entropy`.
        method: "dense" pulls back every column. "auto" uses the structure of f if an estimate says that it pays
            (`explain` shows it): columns with disjoint receptive fields share a pullback, below a narrow layer there
            are only as many columns as it is wide, and the last layer has a closed form.
        mc_samples: the number of drawn columns, in place of all columns. A drawn column is the gradient of a sample's
            loss at a target that is drawn from the model's prediction (categorical, normal of variance 1/2 for
            `mse_loss`, Bernoulli), times `sqrt(c / mc_samples)` for the scale c of the sample in the loss. Losses with
            other element-wise Hessians h have columns `sqrt(h / mc_samples)` with random signs. The result is right on
            average.
        generator: the `torch.Generator` that draws them; needed with mc_samples.
        sample: a function `sample(outputs, generator) -> target` that draws targets for a loss of your own. That loss
            has to be passed as `loss`, and to return the `[N]` negative log-likelihoods, without a factor: the drawn
            gradients are squared, and a factor would be, too.
        peel: with mc_samples, another way to draw: this many columns are the largest ones of each sample, unchanged,
            and the others mix all remaining ones by random signs. "auto" takes for each sample the number with the
            smallest error of the trace, which is known before anything is pulled back. For a cross entropy the columns
            are those of the Cholesky factor of its Hessian, the likeliest class first: if the model is sure of its
            classes, the rest is small. With as many mc_samples as columns the result is exact. If samples have several
            positions with classes (tokens, pixels), these share columns, and "auto" mixes them all.
        with_error: return an `Estimate(value, standard_error)`, two trees like the parameters. The error comes from the
            differences of each sample's drawn columns, two or more; with "auto" half of the columns are drawn. If a few
            samples dominate, the error is uncertain itself: for small classifiers, 85 to 95 % of the entries were
            within two standard errors.
        per_sample: return each sample's part. They have the scale of the whole, and sum to it.
        samples: the indices of some samples, as in `batch_grad`: the result is for their columns alone.
        argnums, in_dims, has_aux: as in `batch_grad`; aux is that of f.
        out_dims: the sample axis of the outputs of a model function.

    Returns:
        A function `(params, *inputs, target) -> tree`, without `loss` `(params, *batch) -> tree`, with tensors shaped
        like the parameters, in the unit of loss / parameter^2; an `Estimate` of two such trees `with_error`; tensors
        `[N, *p]` `per_sample`.

    Raises:
        ArgumentError: mc_samples with a loss that has no known sampler; a number for peel if samples have several
            positions, or with no column left to draw; with_error together with per_sample.
        SplitError: no outputs are found, or a path from the parameters to the result goes around them.
        ConvexityError: the loss is not convex in the outputs.
        ArgumentError, SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(2, 3, bias=False))
        >>> x, y = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 3)
        >>> invfunc.diag_ggn(f, torch.nn.functional.mse_loss)(params, x, y)["weight"]
        tensor([[0.6667, 2.6667],
                [0.6667, 2.6667],
                [0.6667, 2.6667]])

        An estimate from 8 of the 99 columns of a classifier with a hundred classes, with its standard error:

        >>> f, params = invfunc.functional(torch.nn.Linear(2, 100))
        >>> options = {"mc_samples": 8, "peel": "auto", "generator": torch.Generator().manual_seed(0)}
        >>> ggn = invfunc.diag_ggn(f, torch.nn.functional.cross_entropy, with_error=True, **options)
        >>> found = ggn(params, torch.ones(3, 2), torch.tensor([0, 1, 2]))
        >>> found.value["bias"].shape, found.standard_error["bias"].shape
        (torch.Size([100]), torch.Size([100]))

    Composes with: `chunked` over samples, params and, without with_error, outputs; `torch.func.grad`, `vmap`, `jvp`
    around it.

    Cost: one forward pass and a pullback of M columns for M outputs of a sample (C - 1 for a cross entropy over C
    classes), in blocks that fit the cache. A loss without known structure: twice the pullbacks, and its Hessian. By
    structure a convolutional network takes as many pullbacks as its receptive field has pixels, at every image size;
    looking for it takes one more forward pass, and one of a single sample. If the result is differentiated, every
    column is pulled back. With per_sample, the result itself. With mc_samples that many columns, for any M;
    `with_error` forms each sample's part, block by block. If T tokens share a parameter, a drawn column has the error
    of all T^2 products of tokens: long sequences need many columns, or many samples.

    Source: Schraudolph (2002); BackPACK's DiagGGNExact, BatchDiagGGNExact and DiagGGNMC (Dangel, Kunstner and Hennig,
    ICLR 2020). To take a class out of the softmax: Fast Gauss-Newton (arXiv 2605.06081).
    """
    if with_error and per_sample:
        raise ArgumentError(
            f"diag_ggn({describe(f)}, with_error=True, per_sample=True): an error is that of a sum over samples. Leave "
            "one of the two out."
        )
    return Statistic(
        "diag_ggn",
        f,
        EstimatedSquares() if with_error else SquaresOfEach() if per_sample else SumOfSquares(),
        kind=GGN,
        loss=loss,
        argnums=argnums,
        in_dims=in_dims,
        out_dims=out_dims,
        has_aux=has_aux,
        samples=samples,
        drawing=drawing("diag_ggn", mc_samples, generator, sample, peel, with_error),
        options=by_method("diag_ggn", f, method),
        spelled=spelled(per_sample=per_sample),
    )


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


def ggn_trace(
    f: Callable,
    loss: Callable | None = None,
    *,
    per_parameter: bool = False,
    method: Literal["auto", "dense"] = "auto",
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    with_error: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The trace of the generalised Gauss-Newton matrix (GGN) of a loss in the parameters, exact or drawn.

        sum(d.sum() for d in tree_leaves(diag_ggn(f, loss)(params, *inputs, target)))

    Args:
        per_parameter: the trace of each parameter's block instead of their sum.
        f, loss, method, mc_samples, generator, sample, peel, with_error, samples, argnums, in_dims, out_dims,
            has_aux: as in `diag_ggn`. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, *inputs, target) -> trace`, without `loss` `(params, *batch) -> trace`, a tensor without
        dimensions in the unit of loss / parameter^2; with `per_parameter` a tree like the parameters of these. With
        `with_error` an `Estimate(trace, standard_error)` of two of these.

    Raises:
        SplitError, ConvexityError, ArgumentError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggn_trace(f, torch.nn.functional.mse_loss)(torch.ones(2, 1), x, y)
        tensor(6.)

    Composes with: `chunked` over samples, params and, without with_error, outputs; `torch.func.grad`, `vmap`, `jvp`
    around it.

    Cost: that of `diag_ggn`, without its result. `estimate_trace(ggnvp(f, loss), ...)` is an estimate for networks with
    many outputs.

    Source: BackPACK's tutorial on extension hooks sums the diagonal so.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    how = by_method("ggn_trace", f, method)
    drawn = drawing("ggn_trace", mc_samples, generator, sample, peel, with_error)
    trace = EstimatedTrace(per_parameter) if with_error else MatrixTrace(per_parameter)
    return Statistic("ggn_trace", f, trace, kind=GGN, loss=loss, drawing=drawn, options=how, **options)


def sqrt_ggn(
    f: Callable,
    loss: Callable | None = None,
    *,
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """A square root of the generalised Gauss-Newton matrix (GGN): `sum_vn S[v, n] S[v, n]^T` is the GGN.

        J = jacrev(f)(params, *inputs)                        # [N, C, P]
        H = hessian(lambda z: loss(z, target))(f(params, *inputs))
        R = ...                                               # [V, N, C], with R[:, n].T @ R[:, n] == H[n, :, n]
        torch.einsum("vnc,ncp->vnp", R, J)

    There are many square roots: only the products `S S^T` have a meaning. For a cross entropy over C classes V is
    `C - 1`, for other losses the number of outputs of a sample.

    Args:
        f, loss, mc_samples, generator, sample, peel, samples, argnums, in_dims, out_dims, has_aux: as in `diag_ggn`. f
            and loss are pure in torch.func's sense (see the conventions).

    Returns:
        A function `(params, *inputs, target) -> S`, without `loss` `(params, *batch) -> S`, with tensors `[V, N, *p]`,
        in the unit of sqrt(loss) / parameter.

    Raises:
        SplitError, ConvexityError, ArgumentError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.zeros(2, 1)
        >>> S = invfunc.sqrt_ggn(f, torch.nn.functional.mse_loss)(torch.ones(2, 1), x, y).flatten(2)
        >>> torch.einsum("vnp,vnq->pq", S, S)
        tensor([[5., 1.],
                [1., 1.]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it. The root of a
    loss without known structure comes from an eigendecomposition, which has no derivative at equal eigenvalues.

    Cost: that of `diag_ggn`, and the result itself.

    Source: BackPACK's SqrtGGNExact; Dangel, Tatzel and Hennig, "ViViT", TMLR 2022.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    drawn = drawing("sqrt_ggn", mc_samples, generator, sample, peel)
    return Statistic("sqrt_ggn", f, SquareRoot(), kind=GGN, loss=loss, drawing=drawn, **options)


def batch_jacobian(
    f: Callable,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The Jacobian in the parameters of the outputs of each sample.

        torch.stack([jacrev(lambda p: f(p, *inputs)[n])(params) for n in range(N)])

    It is `torch.func.jacrev(f)(params, *inputs)` where a sample's outputs depend on that sample only, but takes as many
    backward passes as one sample has outputs, not as all have together.

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs `[N, *out]` or a pytree of them. f is pure in
            torch.func's sense (see the conventions).
        out_dims: the sample axis of the outputs.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *inputs) -> J`, a tree like the parameters with tensors `[N, *out, *p]`, in the unit of
        output / parameter. For a pytree of outputs, a tree like these of such trees.

    Raises:
        ArgumentError: f returns a scalar, or outputs without the sample axis; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: torch.stack([x @ w, (x @ w).square()], 1)
        >>> invfunc.batch_jacobian(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]))
        tensor([[[1.],
                 [2.]],
        <BLANKLINE>
                [[2.],
                 [8.]]])

    Composes with: `chunked` over outputs, samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one forward pass, a pullback (vector-Jacobian product) for each output of a sample, batched, and the result
    itself.

    Source: BackPACK's SqrtGGN without the loss; Dangel, Tatzel and Hennig, "ViViT", TMLR 2022.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples, "out_dims": out_dims}
    return Statistic("batch_jacobian", f, JacobianRows(), kind=JACOBIAN, **options)


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
