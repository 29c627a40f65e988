"""Products with the generalised Gauss-Newton matrix, and with Fisher matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import InDims
from invfunc.column_options import fisher_columns, spelled
from invfunc.products.curvature import of_fisher, of_ggn
from invfunc.products.product import Product


def ggnvp(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["exact", "mc", "empirical"] = "exact",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    blocks: bool = False,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """The product of the generalised Gauss-Newton matrix (GGN) of a loss with a vector, a tree like the parameters.

        z, Jv = jvp(lambda p: f(p, *inputs), (params,), (v,))
        HJv = jvp(grad(lambda z: loss(z, target)), (z,), (Jv,))[1]
        vjp(lambda p: f(p, *inputs), params)[1](HJv)[0]

        G = batch_grad(f)(params, *batch)
        sum(g * (g * v).sum() for g in G)                    # with fisher="empirical", for one tensor of parameters

        for name in params:                                  # with blocks=True, over all dimensions of the parameter
            J = jacrev(lambda p: f({**params, name: p}, *inputs))(params[name])
            J^T H J V[name][k]                               # for k in range(K)

    `diag_ggn` is the diagonal of this matrix. The model may mix its samples, as batch norm in train mode does, or draw
    random numbers; only Fisher matrices need samples that are kept apart.

    The steps, pixels or entries of a sample belong to one gradient, which is squared as a whole. (curvlinops'
    `EFLinearOperator` takes each step of outputs `[N, T, C]` for a sample of its own, and puts 1/E in place of 1/E^2,
    with E the losses that a mean averages: N T C of mse_loss and binary_cross_entropy_with_logits, N T of a
    cross_entropy, 1 of a sum. It is E times this one for T = 1, and else the sum over t of 1/E times that of the `[N]`
    losses of step t, each summed over its entries.)

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs, a tensor or a pytree of them. Without `loss`,
            a loss function `f(params, *batch)`, whose outputs are found: those that are marked by `outputs(z)`, or else
            what torch's convex losses are called with. f and loss are pure in torch.func's sense (see the conventions).
        loss: `loss(outputs, target)`, convex in the outputs. A loss without known structure whose Hessian, sample by
            sample (of all outputs, where it mixes samples), has more than 2^24 numbers is not checked for that.
        fisher: the matrix. "exact" is the GGN. "mc" is made of the rows `S[m, n]` of `sqrt_ggn(..., mc_samples=M)`,
            gradients at targets drawn from the model's prediction: on average it is the Fisher matrix, which equals the
            GGN, with the scale of the loss. "empirical" is made of the per-sample gradients at the given targets. A
            mean loss puts 1/N^2 into it: return the `[N]` losses, each a negative log-likelihood.
        mc_samples: with fisher="mc", the number of targets drawn for each sample.
        generator: draws them; needed with fisher="mc". A linearisation draws once for all vectors.
        sample: `sample(outputs, generator) -> target` draws targets for a loss of your own.
        blocks: multiply the diagonal block of each parameter alone, with K vectors for each.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        out_dims: the sample axis of the outputs of a model function.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *inputs, target) -> tree`, without `loss` `(params, v, *batch) -> tree`, of tensors like
        the parameters and v; with blocks, those of V and of the result are `[K, *p]`. Its `.linearize(params, *batch)`
        gives a function `v -> tree` that has run f once.

    Raises:
        SplitError: no outputs are found, or a path from the parameters to the result goes around them.
        ConvexityError: the loss is not convex in the outputs.
        SampleAxisError: the samples are mixed, of a Fisher matrix.
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than outputs
            or a loss, or a result that depends on no parameter; there is no generator, or no sampler for the loss.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x, y = torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggnvp(f, torch.nn.functional.mse_loss)(w, torch.tensor([[1.0], [0.0]]), x, y)
        tensor([[2.],
                [1.]])

        >>> f = lambda w, x, y: (x @ w - y).square() / 2
        >>> w, y = torch.zeros(2), torch.tensor([1.0, 3.0])
        >>> invfunc.ggnvp(f, fisher="empirical")(w, torch.tensor([1.0, 0.0]), x, y)
        tensor([10.,  9.])

        >>> f = lambda p, x: x @ p["w"] + p["b"]
        >>> params, V = {"w": torch.zeros(2, 1), "b": torch.zeros(1)}, {"w": torch.ones(1, 2, 1), "b": torch.ones(1, 1)}
        >>> invfunc.ggnvp(f, torch.nn.functional.mse_loss, blocks=True)(params, V, x, torch.zeros(2, 1))["w"]
        tensor([[[3.],
                 [2.]]])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation; `streamed`; but for blocks
    `linear_operator`, `estimate_trace`, `estimate_diagonal`.

    Cost: two gradients, and little more than the memory of one. `J v` is taken in forward mode, in a run of f of its
    own that keeps no graph and draws the same random numbers. Where f has no derivative there, and inside of
    torch.func, it is three to four gradients and the memory of two. A linearisation runs f once and keeps that memory;
    each of its products takes two gradients more. Attention runs without fused kernels. With blocks, two gradients, and
    for each parameter K Jacobian products and K pullbacks through the part of the network behind it, batched. For one
    cross entropy of the outputs, `p o u - p (p . u)` overwrites u = J v, for some rows at a time, and large outputs of
    `F.linear` without a bias have one tensor of tangents: with the logits of a vocabulary, two tensors of their size
    exist at once, them and J v (of a Fisher matrix "mc" four).

    Source: Schraudolph, "Fast curvature matrix-vector products", 2002; BackPACK's hessianfree and GGNMP (Dangel,
    Kunstner and Hennig, ICLR 2020). Of Fisher matrices: Martens, "New insights and perspectives on the natural gradient
    method", JMLR 2020; Kunstner, Balles and Hennig, "Limitations of the empirical Fisher approximation", NeurIPS 2019.
    """
    drawing = fisher_columns("ggnvp", fisher, mc_samples, generator, sample).get("drawing")
    exact, degree = fisher == "exact", 2 if fisher == "empirical" else 1
    record, options = of_ggn if exact else of_fisher, spelled(fisher=None if exact else fisher, blocks=blocks)
    dims = in_dims, out_dims, has_aux
    return Product("ggnvp", f, record, loss, *dims, blocks, degree, drawing, forward=True, spelled=options)
