"""Products with Fisher matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc.arguments.problem import InDims
from invfunc.column_options import drawing
from invfunc.products.curvature import of_fisher
from invfunc.products.product import Product


def fvp(
    f: Callable,
    loss: Callable | None = None,
    *,
    mc_samples: int | None = None,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """The product of the Fisher matrix, empirical or drawn, with a vector, a tree like the parameters.

        G = batch_grad(f)(params, *batch)
        sum(g * (g * v).sum() for g in G)                    # for one tensor of parameters

    That is the empirical one, of the per-sample gradients: a mean loss puts 1/N^2 into it, so `[N]` losses, each of
    which is a negative log-likelihood, are what it is meant for. With `mc_samples=M` they are the rows `S[m, n]` of
    `sqrt_ggn(..., mc_samples=M)`, gradients at targets that are drawn from the model's predictive: their products
    average to the Fisher matrix, which is the GGN, with the scale of the loss.

    The steps, pixels or entries of a sample belong to one gradient, which is squared as a whole. (curvlinops'
    `EFLinearOperator` takes each step of outputs `[N, T, C]` for a sample of its own, and puts 1/E in place of 1/E^2,
    with E the losses that a mean averages: N T C of mse_loss and binary_cross_entropy_with_logits, N T of a
    cross_entropy, 1 of a sum. It is E times this one for T = 1, and else the sum over t of 1/E times that of the `[N]`
    losses of step t, each summed over its entries.)

    Args:
        f: a loss function `f(params, *batch)`, which returns `[N]` losses, or a scalar whose outputs are found as those
            of `diag_ggn` are. With `loss`, a model function `f(params, *inputs)`. f and loss are pure in torch.func's
            sense (see the conventions).
        loss: `loss(outputs, target)`, a scalar or `[N]`, which keeps the samples apart.
        mc_samples: how many targets are drawn for each sample; None takes the per-sample gradients at the given ones.
        generator: from which they are drawn, needed with `mc_samples`. A linearisation draws once for all vectors.
        sample: `sample(outputs, generator) -> target`, draws from the predictive of a loss of one's own.
        in_dims, out_dims, has_aux: as in `ggnvp`.

    Returns:
        A function `(params, v, *batch) -> tree`, with loss `(params, v, *inputs, target) -> tree`, of tensors like the
        parameters and v. Its `.linearize(params, *batch)` gives a function `v -> tree` that has run f once.

    Raises:
        SplitError: f returns a scalar, and no outputs are found, or a path goes around them.
        SampleAxisError: the samples are mixed.
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, there is no generator, or no sampler
            for the loss.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square() / 2
        >>> w, x, y = torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([1.0, 3.0])
        >>> invfunc.fvp(f)(w, torch.tensor([1.0, 0.0]), x, y)
        tensor([10.,  9.])

    Composes with: `linear_operator`, `estimate_trace`, `estimate_diagonal`, `streamed`; `torch.func.grad`, `vmap`,
    `jvp` around it and around its linearisation.

    Cost: that of `ggnvp`.

    Source: Martens, "New insights and perspectives on the natural gradient method", JMLR 2020; Kunstner, Balles and
    Hennig, "Limitations of the empirical Fisher approximation", NeurIPS 2019.
    """
    drawn = drawing("fvp", mc_samples, generator, sample)
    degree = 2 if drawn is None else 1
    return Product("fvp", f, of_fisher, loss, in_dims, out_dims, has_aux, degree=degree, drawing=drawn, forward=True)
