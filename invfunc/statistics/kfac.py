"""Kronecker-factored curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from invfunc.arguments.problem import Indices, InDims
from invfunc.column_options import by_method, check_factors, fisher_columns, most_of
from invfunc.reductions.kronecker_factors import KroneckerFactors
from invfunc.statistic import Statistic


def kfac(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["mc", "exact", "empirical"] = "mc",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
    method: Literal["auto", "dense"] = "auto",
    weight_sharing: Literal["expand", "reduce", "backpack"] = "expand",
    joint: bool = False,
    unsupported: Literal["error", "diagonal", "skip"] = "error",
    max_factor_dim: int | None = 16_384,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """Kronecker factors of each parameter's block of the Fisher matrix, or of the GGN (K-FAC).

        A = torch.einsum("nri,nrj->ij", a, a) / (N * R)        # a[n, r]: what a linear layer reads, in + possibly 1
        B = torch.einsum("vnro,vnrp->op", s, s)                # s[v, n, r]: column v at what it returns
        torch.kron(B, A)                                       # about the block of its weight [out, in]

    The columns v are gradients of the loss at the outputs (or a square root of its Hessian, see `fisher`), pulled back
    to the layer. R positions share the weight (pixels of a convolution, tokens of a sequence, calls of a module). With
    `"expand"` (KFC) each counts as a sample of its own, as above. With `"reduce"` they are averaged first: `a.mean(r)`
    in A and `s.sum(r)` in B. `"backpack"` takes `A = 1/N sum_nr a a^T` with the `s.sum(r)`. B contains the scale of the
    loss, such as the 1/N of a mean, and A does not. If samples were selected, repeated or have unequal numbers of
    positions, N * R is the number of all positions.

    * A bias or the scale of a norm has the factor `B = sum g g^T` of its gradient g at each position, or of their sum.
      Any other vector (a temperature, a gate that is not linear) has that of its whole gradient, which is the block
      itself.
    * A parameter with several dims that is added or multiplied entry by entry, such as positions `[T, D]` in `h +
      positions`, counts as an embedding: each row has its own positions, with unit vectors a, so A is a diagonal.
    * A convolution in groups has factors for each group, and nothing between groups: `Kronecker.blocks`.
    * A weight that operations read in two roles, as an embedding that is also the head, has the factors whose product
      is nearest (in the Frobenius norm) to the sum of its products in both roles. Correlations of the two roles are
      left out, as "expand" leaves out those of two positions.

    (The B of curvlinops' `KFACLinearOperator` with fisher_type="empirical" is E times this one, with E the losses that
    a mean averages: N times the entries of an output of mse_loss and binary_cross_entropy_with_logits, N times the
    positions of a cross_entropy, 1 of a sum. Its A is this one.)

    Args:
        f, loss, sample, peel, samples, argnums, in_dims, out_dims, has_aux: as in `diag_ggn`. f and loss are pure in
            torch.func's sense (see the conventions).
        fisher: the kind of columns. "mc" draws mc_samples of them at targets from the model's prediction. "exact" takes
            all columns of a square root of the loss Hessian (KFLR): for one sample, or a deep linear network, the
            product of the factors is the block of the GGN itself. "empirical" takes the per-sample gradients at the
            given targets, with the scale of `batch_grad`: return the `[N]` losses if it matters.
        mc_samples, generator: as in `diag_ggn`, for fisher="mc".
        method: as in `diag_ggn`, for fisher="exact". With "expand" only, where each position counts on its own, columns
            whose receptive fields are disjoint share a pullback, and a last layer whose entries are the outputs has
            its factors in closed form: `diag(p) - p p^T` of a cross entropy.
        weight_sharing: "expand", "reduce" or "backpack". Take "reduce" if positions are averaged before the loss
            (pooling, vision transformers), "expand" if each has a loss of its own (each token).
        unsupported: for parameters without factors, which no operation reads linearly, such as the w of `x @ w.exp()`:
            "error" names all of them, "diagonal" takes the diagonal of their block from the same columns (a `Kronecker`
            of a vector), "skip" returns None for them.
        joint: a weight and the bias of the same operation have one matrix over `[out, in + 1]`, in the entry of the
            weight (for a convolution `in` is the size of a patch). The bias is the last input, and its own entry is
            None.
        max_factor_dim: the largest size of a full factor. A larger one is replaced by its diagonal, a vector: for
            50,257 words, the counts of the words in an embedding, and sums of squares in a head. None keeps all factors
            full.

    Returns:
        A function `(params, *inputs, target) -> tree`, without `loss` `(params, *batch) -> tree`, with a `Kronecker`
        for each parameter. Its factors are in the order of the dims: (B, A) for a weight `[out, in]` or `[out, in,
        *k]`, (A, B) for W in `x @ W`. The A of an embedding is a diagonal. No two results share memory.

    Raises:
        ArgumentError: parameters that no operation linear in them reads (all are named); unknown options; a loss
            without a known sampler; factors that need more than the free memory (`explain` shows their sizes).
        SplitError, ConvexityError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(2, 1))
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.zeros(2, 1)
        >>> factors = invfunc.kfac(f, torch.nn.functional.mse_loss, fisher="exact")(params, x, y)
        >>> factors["weight"].factors
        (tensor([[2.]]), tensor([[1., 1.],
                [1., 2.]]))

    Composes with: `chunked` over outputs, samples and params; `together` with the diagonals, which shares the columns;
    `torch.func.grad` around it, and `vmap` where the result is used inside. `invfunc.kronecker` takes its result, with
    `solve` for all parameters at once, and `merge` for the factors of several batches.

    Cost: one forward pass, a pullback of mc_samples columns (if exact, that of `diag_ggn`, with products of matrices in
    place of squares), and the products of each layer's inputs with themselves.

    Source: Martens and Grosse (ICML 2015); Botev, Ritter and Barber (ICML 2017) for "exact"; Grosse and Martens (ICML
    2016) for "expand"; Eschenhagen et al. (NeurIPS 2023) for "reduce"; Dangel, Mucsanyi, Weber and Eschenhagen, "KFAC
    from scratch", arXiv 2507.05127.
    """
    check_factors("kfac", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    columns = fisher_columns("kfac", fisher, mc_samples, generator, sample, peel)
    degree = None if samples is not None else 2 if fisher == "empirical" else 1
    factors = KroneckerFactors(weight_sharing, joint, unsupported, most_of("kfac", max_factor_dim), degree)
    return Statistic("kfac", f, factors, loss=loss, options=by_method("kfac", f, method), **columns, **options)
