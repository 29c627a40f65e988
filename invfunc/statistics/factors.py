"""Kronecker factors of the curvature of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from invfunc.callables import by_method, check_count, check_factors, fisher_columns, most_of
from invfunc.problem import Indices, InDims
from invfunc.reductions.factors import BothSides, ChainFactors, InEigenbasis, KroneckerFactors, OneSide
from invfunc.reductions.reduction import CHAIN
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


def ekfac(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["mc", "exact", "empirical"] = "mc",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    peel: int | str | None = None,
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
    """Each parameter's block of the Fisher matrix or of the GGN in the eigenbasis of its K-factors (EKFAC).

        Q_B, Q_A = (torch.linalg.eigh(factor).eigenvectors for factor in kfac(f, loss)(...)["weight"].factors)
        values = torch.einsum("vnoi,ok,ij->vnkj", G, Q_B, Q_A).square().sum((0, 1))       # G: rows of `sqrt_ggn`

    The eigenvalues are those of the block's diagonal in that basis, so that it has the trace of the block, and is at
    least as near to it (in the Frobenius norm) as the product of the factors. If a factor has equal eigenvalues (as the
    one of a transposed convolution whose stride is its kernel has), its eigenvectors are not unique. The result may
    then depend on rounding, for example on the chunks of samples: two such results differ by more, and each is right.

    Args:
        f, loss, fisher, mc_samples, generator, sample, peel, weight_sharing, joint, unsupported, max_factor_dim,
            samples, argnums, in_dims, out_dims, has_aux: as in `kfac`; the same columns give the basis and the
            eigenvalues, and the basis of a side that is kept as a diagonal is the identity. f and loss are pure in
            torch.func's sense (see the conventions).

    Returns:
        As `kfac`, but each `Kronecker` has `values`, and eigenvectors as its factors.

    Raises:
        ArgumentError, SplitError, ConvexityError, SampleAxisError: as in `kfac`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> invfunc.ekfac(f, torch.nn.functional.mse_loss, fisher="exact")(torch.ones(2, 1), x, y).dense()
        tensor([[1., 0.],
                [0., 4.]])

    Composes with: `chunked` over outputs, samples and params; `streamed`, which goes through the loader twice;
    `torch.func.vmap` where the result is used inside. Eigenvectors have no derivative at equal eigenvalues.

    Cost: that of `kfac`, a second pullback, and eigendecompositions of the factors.

    Source: George et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis", NeurIPS 2018.
    """
    check_factors("ekfac", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    columns = fisher_columns("ekfac", fisher, mc_samples, generator, sample, peel)
    factors = KroneckerFactors(weight_sharing, joint, unsupported, most_of("ekfac", max_factor_dim))
    return Statistic("ekfac", f, InEigenbasis(factors), loss=loss, **columns, **options)


def kfoc(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = None,
    *,
    sweeps: int = 3,
    fisher: Literal["mc", "exact", "empirical"] = "mc",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable[..., Any] | None = None,
    peel: int | str | None = None,
    max_factor_dim: int | None = 16_384,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The Kronecker product nearest to each parameter's own block of the Fisher matrix or of the GGN (KFOC, Shampoo).

        A = torch.eye(inputs)                                       # G: of column v (see `kfac`) and sample n
        B = torch.einsum("vnoi,ij,vnpj->op", G, A, G) / A.square().sum()
        A = torch.einsum("vnoi,op,vnpj->ij", G, B, G) / B.square().sum()
        B = torch.einsum("vnoi,ij,vnpj->op", G, A, G) / A.square().sum()          # and so on, one for each sweep
        torch.kron(B, A)                                            # about the block of the weight [out, in]

    Each line is the best factor for the other one, in the Frobenius norm, so the error falls with each sweep to that of
    the best product. With one sweep it is Shampoo's: `kron(sum G G^T, sum G^T G)` over the trace of either. Unlike
    `kfac`, it assumes nothing about the use of a parameter: any matrix has factors, also one that is tied, masked, or
    computed from others, and correlations of the positions of a sequence count.

    Args:
        f, loss, fisher, mc_samples, generator, sample, peel, samples, argnums, in_dims, out_dims, has_aux: as in
            `kfac`; the same columns in all sweeps. f and loss are pure in torch.func's sense (see the conventions).
        sweeps: the number of factors that are computed, one after the other.
        max_factor_dim: as in `kfac`; the factor of the other side is the best one for a diagonal.

    Returns:
        A function `(params, *inputs, target) -> tree`, without `loss` `(params, *batch) -> tree`, with a `Kronecker`
        for each parameter: a factor for the first dim, and one for all others together, of the same trace. For a
        vector, as a bias, it is the block itself.

    Raises:
        ArgumentError: `sweeps` is below 1, or as in `kfac`.
        SplitError, ConvexityError, SampleAxisError: as in `diag_ggn`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w.mT
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
        >>> invfunc.kronecker.kfoc(f, torch.nn.functional.mse_loss, fisher="exact")(torch.ones(1, 2), x, y).dense()
        tensor([[1., 0.],
                [0., 4.]])

    Composes with: `chunked` over outputs, samples and params; `streamed`, which goes through the loader once for each
    sweep; `together`; `torch.func.grad` around it. `invfunc.kronecker` takes its result; `kronecker.merge` does not, as
    the nearest product of two batches does not follow from those of each.

    Cost: a pullback of the columns for each sweep, and of each per-sample gradient the product with itself, from its
    factors where that is cheaper; of an embedding `[V, D]` they are formed.

    Source: Schnaus et al., "Kronecker-factored optimal curvature", 2021, for the best product; Gupta, Koren and Singer,
    "Shampoo", ICML 2018; Morwani et al., "A new perspective on Shampoo's preconditioner", 2024, for what both are.
    """
    check_count("kfoc(", "sweeps", sweeps)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    columns = fisher_columns("kfoc", fisher, mc_samples, generator, sample, peel)
    most = most_of("kfoc", max_factor_dim)
    sides = BothSides(most) if sweeps == 1 else OneSide(most, sweeps - 1)
    return Statistic("kfoc", f, sides, loss=loss, **columns, **options)


def kfra(
    f: Callable[..., Any],
    loss: Callable[..., Any] | None = None,
    *,
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
    """Kronecker factors of each parameter's block of the GGN, with B from a recursion through a chain of layers (KFRA).

        G = sum(hessian(loss)(z[n]) for n in range(N))         # at the outputs
        for layer in reversed(layers):                         # with Jacobians J[n]; B of a linear layer is this G
            G = sum(J[n].T @ G @ J[n] for n in range(N)) / N

    Args:
        f, loss, weight_sharing, joint, unsupported, max_factor_dim, samples, argnums, in_dims, out_dims, has_aux: as in
            `kfac`. f is a chain: each operation reads one tensor, which comes from the one before, and each parameter
            is read once. f and loss are pure in torch.func's sense (see the conventions).

    Returns:
        As `kfac`.

    Raises:
        ArgumentError: f is not a chain; otherwise as in `kfac`.
        SplitError, ConvexityError, SampleAxisError: as in `kfac`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: torch.tanh(x @ w[0]) @ w[1]
        >>> params, x, y = [torch.zeros(2, 1), torch.ones(1, 1)], torch.eye(2), torch.zeros(2, 1)
        >>> A, B = invfunc.kronecker.kfra(f, torch.nn.functional.mse_loss)(params, x, y)[0].factors
        >>> B
        tensor([[2.]])

    Composes with: `torch.func.grad` around it, and `vmap` where the result is used inside.

    Cost: one forward pass, and at each layer with d inputs and outputs of a sample a matrix `[d, d]` and pullbacks
    (vector-Jacobian products) of 2d vectors through it; element-wise operations are cheap. It is for layers of moderate
    width.

    Source: Botev, Ritter and Barber, "Practical Gauss-Newton optimisation for deep learning", ICML 2017.
    """
    check_factors("kfra", weight_sharing, unsupported)
    options = {"argnums": argnums, "in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux, "samples": samples}
    factors = ChainFactors(weight_sharing, joint, unsupported, most_of("kfra", max_factor_dim))
    return Statistic("kfra", f, factors, kind=CHAIN, loss=loss, **options)
