"""The diagonal of the generalised Gauss-Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import describe
from invfunc.column_options import by_method, drawing, spelled
from invfunc.errors import ArgumentError
from invfunc.reductions.estimate import EstimatedSquares
from invfunc.reductions.quantity import GGN
from invfunc.reductions.squares import SquaresOfEach, SumOfSquares
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
