"""Statistics of the per-sample gradients of a loss function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._torch.functorch import dispatched, innermost, transforming
from invfunc._torch.values import doubled
from invfunc._torch.weak import WeakIdMap
from invfunc.callables import check_choice, describe, grouped, projecting, spelled, valued
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncWarning
from invfunc.problem import BoundProblem, Indices, InDims
from invfunc.reductions.columns import InnerProducts, ProductsWithOthers, SquaresOfPlaces, SumOfSquares
from invfunc.reductions.estimates import SumAndNoise
from invfunc.reductions.gradients import (
    CentredSquares,
    ClippedSum,
    EachSample,
    SquaredNorms,
    SumAndCentredSquares,
    SumOf,
)
from invfunc.reductions.reduction import GRADIENT_OR_JACOBIAN
from invfunc.statistic import Statistic


def batch_grad(
    f: Callable,
    *,
    sum_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The per-sample gradients of a loss function: what each sample adds to its gradient.

        G = torch.stack([grad(lambda p: f(p, *batch)[n])(params) for n in range(N)])     # an [N]-valued f

    For a scalar f, `G[n]` is sample n's part of its gradient: `G.sum(0) == grad(f)`. A mean loss therefore puts 1/N
    into every per-sample gradient; return the `[N]` losses of the samples where their scale matters.

    With `sum_of=torch.sign`, `torch.abs`, a power or any other function, the result is the sum of that function of each
    gradient. Only a few gradients are in memory at a time:

        torch.stack([sum_of(g) for g in G]).sum(0)

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. A term of a scalar f in the parameters
            alone counts as 1/N for each sample. f is pure in torch.func's sense (see the conventions).
        sum_of: a function of one sample's gradient in one parameter, `[*p]`, which returns as many numbers. They are
            summed in the dtype of the gradient (also booleans and integers).
        samples: the indices of some samples, in any order, also repeated; None for all. The result is for these samples
            alone, with the scale that they have in the whole batch; a result that counts samples counts these.
        argnums: the position of the parameters among the arguments; for a tuple of positions, the result is a tuple.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        has_aux: f returns `(loss, aux)`, and the transform `(result, aux)`.

    Returns:
        A function `(params, *batch) -> G` with a tensor `[N, *p]` for each parameter `p`, in the unit of loss /
        parameter, or with `sum_of` a tensor `[*p]`. For a batch without samples (N = 0), and `[N]` losses or their sum,
        it is `[0, *p]`, and sums of first-order statistics are zeros; a mean of no losses is an error.

    Raises:
        ArgumentError: f returns neither a scalar nor `[N]`, no parameter reaches it (f calls a module in place of a
            function of params), the batch arguments disagree about N, or `samples` has an index that does not exist;
            `sum_of` returns another number of entries, or reads a tensor that requires a gradient.
        SampleAxisError: f mixes samples.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.batch_grad(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[2.],
                [8.]])
        >>> invfunc.batch_grad(f, sum_of=torch.sign)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([2.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient, and the result itself; with `sum_of`, the gradients of some samples in one parameter.
    With few `samples` the backward pass is still that of the batch.

    Source: BackPACK's BatchGrad (Dangel, Kunstner and Hennig, ICLR 2020); sums of functions of them: Roulet and
    Agarwala, 2025 (arXiv 2510.00236).
    """
    if sum_of is not None and not callable(sum_of):
        raise ArgumentTypeError(f"batch_grad({describe(f)}, sum_of={sum_of!r}): sum_of has to be a function.")
    options: dict[str, Any] = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    if sum_of is None:
        return Statistic("batch_grad", f, EachSample(), **options)
    return Statistic("batch_grad", f, SumOf(sum_of), spelled=f", sum_of={describe(sum_of)}", **options)


def batch_l2_grad(
    f: Callable,
    *,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The squared Euclidean norm of each per-sample gradient, for each parameter.

        G = batch_grad(f)(params, *batch)
        {name: g.flatten(1).square().sum(1) for name, g in G.items()}

    A mean loss puts 1/N^2 into every squared norm; return the `[N]` losses of the samples where the scale matters.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` like the parameters, of tensors `[N]`, in the unit of
        (loss / parameter)^2. The sum of these tensors is the squared norm over all parameters.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.batch_l2_grad(f)(torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.zeros(2))
        tensor([ 8., 64.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and a contraction. For a layer with P positions, I inputs and O outputs, that is the cheaper of
    two ways: products of all pairs of positions, P^2 (I + O), in float64, because they cancel; or the per-sample
    gradient itself, P I O.

    Source: Goodfellow, "Efficient per-example gradient computations", 2015; Li et al., ICLR 2022 ("ghost norm");
    BackPACK's BatchL2Grad.
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("batch_l2_grad", f, SquaredNorms(), **options)


def sum_grad_squared(
    f: Callable,
    *,
    per: Literal["sample", "token"] = "sample",
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The sum over samples of the squared per-sample gradients of a loss function, entry by entry.

        batch_grad(f)(params, *batch).square().sum(0)

    It is not divided by N; a mean loss puts 1/N^2 into every square (see `batch_grad` about this scale).

    With `per="token"` the squares are those of each token's part of the gradient. For a linear layer with the input
    `a[n, t]` and the gradient `d[n, t]` at its output, that is one product:

        torch.einsum("nto,ntk->ok", d.square(), a.square())          # sum_nt (d[n, t] a[n, t]^T)^2

    Tokens are the positions of a linear layer or an einsum, the windows of a convolution, the words of an embedding,
    and the entries to which a bias is added, or that a scale multiplies. A parameter that is read twice, as tied ones
    are, has the tokens of both.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        per: "sample", or "token".
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` with tensors shaped like the parameters, in the unit of
        (loss / parameter)^2.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; per token also if the tokens of an operation that reads a
            parameter are not known, or it reads a tensor computed from the parameter.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.sum_grad_squared(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([68.])
        >>> words = lambda w, x: (x @ w).square().sum(1)  # of two tokens each
        >>> invfunc.sum_grad_squared(words, per="token")(torch.tensor([1.0]), torch.tensor([[[1.0], [2.0]]]))
        tensor([68.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and a contraction; the per-sample gradients of a linear layer are never formed, those of other
    layers for a few samples at a time. Per token, one product in place of that of the gradient.

    Source: BackPACK's SumGradSquared (Dangel, Kunstner and Hennig, ICLR 2020); per token Roulet and Agarwala, 2025
    (arXiv 2510.00236).
    """
    check_choice(f"sum_grad_squared({describe(f)}, ", "per", per, ("sample", "token"))
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    reduction, shown = (SquaresOfPlaces(), spelled(per=per)) if per == "token" else (SumOfSquares(), "")
    return Statistic("sum_grad_squared", f, reduction, spelled=shown, **options)


def variance(
    f: Callable,
    *,
    correction: float = 0,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The variance of the per-sample gradients of a loss function, entry by entry.

        batch_grad(f)(params, *batch).var(0, correction=correction)

    It is never negative, and exact in float32 even if the mean is 1e3 times the deviation. A mean loss puts 1/N into
    every per-sample gradient and 1/N^2 into the variance: for the variance of "the" gradient of a sample, let f return
    the `[N]` losses of the samples.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        correction: the divisor is N - correction; 0 for the variance of the batch, 1 for the unbiased estimate.
        samples, argnums, in_dims, has_aux: as in `batch_grad`.

    Returns:
        A function `(params, *batch) -> tree` with tensors shaped like the parameters, in the unit of
        (loss / parameter)^2.

    Raises:
        ArgumentError: N - correction is not above 0; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.variance(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([9.])

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and two contractions, in float64 where float32 would not be exact.

    Source: BackPACK's Variance (Dangel, Kunstner and Hennig, ICLR 2020).
    """
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("variance", f, CentredSquares(correction), **options)


def grad_and_variance(
    f: Callable,
    *,
    correction: float = 0,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
    value: bool = False,
) -> Statistic:
    """The gradient of a loss function and the variance of its per-sample gradients, from one backward pass.

        G = batch_grad(f)(params, *batch)
        G.sum(0), G.var(0, correction=correction)

    The gradient is that of f; for `[N]`-valued f of the sum of its entries. The variance is that of `variance`: a mean
    loss puts 1/N^2 into it, so that `N * variance` estimates the variance of its gradient over batches of size N.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        correction: the divisor of the variance is N - correction.
        samples: as in `batch_grad`; both results are those of these samples.
        argnums, in_dims, has_aux: as in `batch_grad`.
        value: also return the value of f, after the variance, as in `clipped_grad`.

    Returns:
        A function `(params, *batch) -> (grad, variance)`, two trees like the parameters, in the units of
        loss / parameter and its square; with has_aux `(grad, variance, aux)`, with value
        `(grad, variance, value)`.

    Raises:
        ArgumentError: N - correction is not above 0; and as in `batch_grad`.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.grad_and_variance(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        (tensor([10.]), tensor([9.]))

    Composes with: `chunked` over samples and params; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: that of `variance`.

    Source: Balles and Hennig, "Dissecting Adam", ICML 2018 (what the variance of the gradient is used for).
    """
    f, has_aux = valued(f, value, has_aux)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("grad_and_variance", f, SumAndCentredSquares(correction), **options)


def noise_scale(
    f: Callable,
    *,
    groups: Literal["layer"] | Callable[[str], str | None] | Mapping[str, str | None] | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
    value: bool = False,
) -> Statistic:
    """The gradient of a loss function and the parts of its gradient-noise scale, from one backward pass.

        G = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *batch).values()], 1)     # [N, P]
        grad = G.sum(0)                                                                      # as trees
        trace = G.var(0, correction=1).sum()                                                 # tr Cov G
        squared_norm = G.mean(0).square().sum() - trace / N                                  # |E G|^2
        scale = trace / squared_norm

    Both parts are unbiased estimates, for the gradient G of a random sample. The scale is a batch size: the mean
    gradient of so many samples has as much noise as signal. Much larger batches hardly save training steps.

    The squared norm is a difference. If the batch is much smaller than the scale, it is often negative: one such batch
    cannot tell the gradient from its noise. It is not clamped, as its average over steps would be biased. Average the
    two parts over steps, as in the example below, and never their ratio.

    A mean loss puts 1/N into every per-sample gradient and 1/N^2 into both parts; the scale is the same for a mean, a
    sum and `[N]` losses. Return the `[N]` losses where the parts matter, as in averages over batches of several sizes.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        groups: splits the parameters into groups, each with a noise of its own; without it all parameters are one
            group. `"layer"`: a group for each layer, so `"0.weight"` and `"0.bias"` are in `"0"`. Or a function from
            the key path of a parameter (`"['0.weight']"`) to the name of its group, None to leave it out: `lambda path:
            path` makes a group of each. Or a dict from names of parameters to names of groups (`{"0.weight":
            "first"}`); it leaves out all others.
        samples, argnums, in_dims, has_aux: as in `batch_grad`; the gradient is that of these samples.
        value: also return the value of f, after the noise, as in `clipped_grad`.

    Returns:
        A function `(params, *batch) -> (grad, noise)`: a tree like the parameters, and a `NoiseScale(squared_norm,
        trace)` of two tensors without dimensions in the unit of (loss / parameter)^2, whose `.scale` is their ratio, a
        number of samples. With `groups` noise is a dict of these by the names. With has_aux `(grad, noise, aux)`, with
        value `(grad, noise, value)`.

    Raises:
        ArgumentError: there is one sample only, or `groups` names no parameter; and as in `batch_grad`.
        ArgumentTypeError: `groups` is of another kind, or its function returns something else than names and None.
        SampleAxisError: as in `batch_grad`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> w, x, y = torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2)
        >>> grad, noise = invfunc.noise_scale(f)(w, x, y)
        >>> grad, noise
        (tensor([10.]), NoiseScale(squared_norm=tensor(16.), trace=tensor(18.)))
        >>> noise.scale
        tensor(1.1250)

        Averaged over steps of a training, the parts first and then divided:

        >>> average = noise
        >>> for step in range(3):
        ...     grad, noise = invfunc.noise_scale(f)(w, x + step, y)
        ...     w = w - 0.01 * grad
        ...     average = type(noise)(*(0.9 * a + 0.1 * b for a, b in zip(average, noise)))
        >>> average.scale
        tensor(0.4606)

        Of the norm layers alone, from which Gray et al. predict that of the whole of a transformer:

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
        >>> norms = {f"['{name}.{own}']" for name, module in model.named_modules()
        ...          if isinstance(module, torch.nn.LayerNorm) for own, _ in module.named_parameters()}
        >>> f, params = invfunc.functional(model)
        >>> of_norms = invfunc.noise_scale(
        ...     lambda params, x: f(params, x)[:, 0], groups=lambda path: "norms" if path in norms else None)
        >>> list(of_norms(params, torch.eye(2))[1])
        ['norms']

    Composes with: `chunked` over samples and params, `streamed`, `distributed`, `together`, `compiled`, `certified`;
    `reduced`, whose function gets the gradient of each parameter; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one gradient and the norms of `batch_l2_grad`; per-sample gradients that are formed for a norm are summed for
    the gradient, too. Parameters without a group need no norms: with norm layers alone it is hardly more than the
    gradient. `compiled` removes the Python of a call.

    Both parts are differences of sums in float64, of per-sample gradients in the dtype of the parameters: in float32
    the trace has an error of about 1e-7 of the squared norm, so scales below 1e-5 have few digits. (`grad_and_variance`
    subtracts the mean first.) If the squared norm of the gradient overflows, the trace is NaN.

    Source: McCandlish et al., "An empirical model of large-batch training", 2018, appendix A; Gray et al.,
    "Normalization layer per-example gradients are sufficient to predict gradient noise scale in transformers", NeurIPS
    2024.
    """
    names = grouped("noise_scale", f, groups)
    f, has_aux = valued(f, value, has_aux)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("noise_scale", f, SumAndNoise(names), **options)


def clipped_grad(
    f: Callable,
    max_norm: float | torch.Tensor | Mapping[str, float | torch.Tensor],
    *,
    groups: Literal["layer"] | Callable[[str], str] | Mapping[str, str] | None = None,
    weight: Callable[[torch.Tensor, Any], torch.Tensor] | None = None,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
    value: bool = False,
) -> Statistic:
    """The sum of the per-sample gradients, each clipped to a norm, and their norms before clipping.

        G = batch_grad(f)(params, *batch)                                       # a dict, say
        norms = sum(g.flatten(1).square().sum(1) for g in G.values()).sqrt()    # [N], over all parameters
        {name: torch.einsum("n...,n->...", g, (max_norm / norms).clamp(max=1)) for name, g in G.items()}, norms

    With `groups="layer"` each layer is clipped by its own norm; other groups of parameters are possible, too. Each
    layer is then done during the backward pass, so a reversible network trains privately in the memory of one block.
    (The whole gradient of a sample has a norm of up to `max_norm` times the root of the number of groups: scale the
    noise of DP-SGD with it.)

    Warning: a mean loss puts 1/N into every per-sample gradient, and so into the norms that are compared with
    `max_norm`. Return the `[N]` losses, and divide the result by N for a mean:

        losses = lambda params, x, y: F.cross_entropy(model(params, x), y, reduction="none")
        clipped, norms = clipped_grad(losses, max_norm=1.0)(params, x, y)

    Args:
        f: a loss function `f(params, *batch)`, better `[N]`-valued than scalar. f is pure in torch.func's sense (see
            the conventions).
        max_norm: the largest norm of a per-sample gradient, above 0; a number, or a tensor without dims, in which the
            result has a derivative; or a dict of these by the names of the groups.
        groups: as in `noise_scale`: `"layer"`, a function from the key path of a parameter to the name of its group, or
            a dict of these by name. Each parameter has to be in a group.
        weight: a function `weight(norm, max_norm)`: the factor for a gradient of that norm, by default `(max_norm /
            norm).clamp(max=1)`. It gets tensors without dims; the norm may be 0. Automatic clipping is `lambda norm,
            max_norm: max_norm / (norm + 0.01)`.
        samples, argnums, in_dims, has_aux: as in `batch_grad`. With several argnums the norm is over all of them.
        value: also return the value of f, after the norms; with has_aux as `(value, aux)`, as in `torch.func`.

    Returns:
        A function `(params, *batch) -> (grad, norms)`: a tree like the parameters in the unit of loss / parameter, and
        the `[N]` norms of the per-sample gradients over all parameters before clipping, with `groups` a dict of those
        over each group; with has_aux `(grad, norms, aux)`, with value `(grad, norms, value)`.

    Raises:
        ArgumentError: `max_norm` is not above 0, or a dict of other groups; a parameter is in no group; `weight` does
            not return one number, or reads a tensor that requires a gradient; and as in `batch_grad`.
        ArgumentTypeError, SampleAxisError: as in `noise_scale`.
        A warning (`InvFuncWarning`), once for f, where a mean loss leaves all norms below `max_norm`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.zeros(2)
        >>> invfunc.clipped_grad(f, 4.0)(torch.tensor([1.0]), x, y)
        (tensor([6.]), tensor([2., 8.]))

        By layers, each clipped at the median of its norms so far, as it follows from step to step:

        >>> f, params = invfunc.functional(torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)))
        >>> losses = lambda params, x, y: (f(params, x)[:, 0] - y).square()
        >>> bounds = {"0": torch.tensor(1.0), "1": torch.tensor(1.0)}
        >>> for step in range(3):
        ...     clipped, norms = invfunc.clipped_grad(losses, bounds, groups="layer")(params, x, y)
        ...     below = {name: (norms[name] <= bound).float().mean() for name, bound in bounds.items()}
        ...     bounds = {name: bound * (0.2 * (0.5 - below[name])).exp() for name, bound in bounds.items()}

    Composes with: `chunked` over samples; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: one backward pass, the norms as in `batch_l2_grad`, and the weighted sum. The gradients at the outputs of all
    layers are in memory until the norms are known; the per-sample gradients never all are. With `"layer"` nothing has
    to wait: it takes little more than the gradient (1.2 times the time, and its memory, for a GPT of 4 layers and width
    256). `together` with other groups waits for all again.

    Source: Abadi et al., "Deep learning with differential privacy", CCS 2016; Lee and Kifer, "Scaling up differentially
    private deep learning with fast per-example gradient clipping", PoPETs 2021; by layers and quantiles He et al.,
    "Exploring the limits of differentially private deep learning with group-wise clipping", ICLR 2023, and Andrew et
    al., "Differentially private learning with adaptive clipping", NeurIPS 2021; automatic, Bu et al., NeurIPS 2023.
    """
    bounds = list(max_norm.values()) if isinstance(max_norm, Mapping) and groups is not None else [max_norm]
    if not all(map(_positive, bounds)):
        more = "a dict of these needs groups= to say which parameters each is for, as groups='layer'."
        raise ArgumentError(
            f"clipped_grad({describe(f)}, max_norm={max_norm!r}): max_norm has to be a number above 0, or a tensor "
            f"without dims that holds one; {more}"
        )
    names = grouped("clipped_grad", f, groups)
    if weight is not None and not callable(weight):
        raise ArgumentTypeError(
            f"clipped_grad({describe(f)}, weight={weight!r}): weight has to be a function weight(norm, max_norm)."
        )
    f, has_aux = valued(f, value, has_aux)
    reduction = ClippedSum(max_norm, weight, names)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return _Clipped("clipped_grad", f, reduction, **options)


class _Clipped(Statistic):
    """Warns of a mean loss, which clips nothing."""

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        found, aux = super().compute(args, kwargs, names)
        if not (self.members or transforming() or dispatched() or self.options.reduce or _TOLD.get(self.f)):
            given, (_, norms) = self.problem(args, kwargs, names), found
            assert isinstance(self.reduction, ClippedSum)
            if given.n > 1 and not self.reduction.clips(norms) and _is_mean(self.f, given):
                warnings.warn(
                    f"{self!r}: no norm reaches max_norm, and the loss is the mean over the samples of the batch, "
                    f"which divides each per-sample gradient by N = {given.n}. Return the [N] losses, as with "
                    "reduction='none'.",
                    InvFuncWarning,
                    stacklevel=5,
                )
            with suppress(TypeError):  # a function of a kind that has no weak references
                _TOLD.set(self.f, True)
        return found, aux


_TOLD: WeakIdMap[bool] = WeakIdMap()
"""The functions that were looked at."""


def _is_mean(f: Callable, given: BoundProblem) -> bool:
    """Tells whether the loss of the first two samples is the mean of their own, and not their sum."""

    def loss(start: int, stop: int) -> torch.Tensor:
        args = list(given.args)
        for i, dim in given.dims.items():
            if dim is not None:
                args[i] = tree.map_tensors(lambda x, d=dim: x.narrow(d, start, stop - start), args[i])
        found = f(*args, **given.kwargs)
        return doubled(found[0] if given.has_aux else found).reshape(())

    devices = {x.device.index for x in given.leaves if x.device.type == "cuda"} - {None}
    with suppress(Exception), torch.random.fork_rng(devices), torch.no_grad():  # f may not run on one sample
        both, first, second = loss(0, 2), loss(0, 1), loss(1, 2)
        eps = torch.finfo(given.leaves[0].dtype).eps ** 0.75 * (first.abs() + second.abs())
        return bool((both - (first + second) / 2).abs() <= eps) and bool((both - first - second).abs() > eps)
    return False


def _positive(max_norm: Any) -> bool:
    if isinstance(max_norm, torch.Tensor):
        real = max_norm.dtype != torch.bool and not max_norm.is_complex()
        return real and not max_norm.ndim and bool((innermost(max_norm) > 0).all())
    return isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool) and max_norm > 0


def sketched_grad(
    f: Callable,
    *,
    rows: int,
    columns: int,
    generator: torch.Generator,
    projection: Literal["signs", "sparse", "mask"] = "signs",
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    has_aux: bool = False,
) -> Statistic:
    """The per-sample gradients of a loss function, compressed by random matrices.

        G = batch_grad(f)(params, *batch)                       # of each parameter [N, *p], taken as [N, O, I]
        torch.einsum("noi,or,ic->nrc", G, P, Q).flatten(1)      # P: [O, rows], Q: [I, columns], random

    O is the first dim of a parameter, and I all others. A vector has one matrix, `[O, rows * columns]`. The average of
    `P P^T` and of `Q Q^T` is the identity, so that the inner product of two sketches is on average that of the
    per-sample gradients:

        |sketch(g) . sketch(h) - g . h| is of the size  (2 / rows + 2 / columns + 4 / (rows columns))^(1/2) |g| |h|

    at most (the standard deviation), for each parameter, and independently. A side that is no longer than its sketch is
    kept unchanged, padded with zeros, and adds no error. With stored sketches, the inner products of new samples with a
    whole data set are one matrix product: which samples influence the loss of a test sample, and which are similar.

    Args:
        f, samples, argnums, in_dims, has_aux: as in `batch_grad`. f is pure in torch.func's sense (see the
            conventions).
        rows, columns: the lengths of the two sides of a sketch.
        projection: the kind of matrices: random `"signs"` (LoGra); `"sparse"` ones with one sign in each row, of which
            the deviation above is the same; or a `"mask"`, which picks some rows and columns of the gradient (GraSS):
            right on average, too, but far off where few entries are large.
        generator: draws the matrices once, when the statistic is made: all of its calls use the same ones. Another
            statistic uses the same ones, too, if its generator has the same seed, and its rows, columns, and shapes and
            order of parameters are the same. They do not depend on the device or the dtype.

    Returns:
        A function `(params, *batch) -> sketches` with tensors `[N, rows * columns]`, in the unit of loss / parameter.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; rows or columns below 1, another projection, no generator.

    Example:
        Sides that are short enough are kept:

        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square().sum(1)
        >>> args = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 2.0]]), torch.zeros(2, 2)
        >>> g = torch.Generator().manual_seed(0)
        >>> invfunc.sketched_grad(f, rows=2, columns=2, generator=g)(*args)
        tensor([[2., 0., 0., 0.],
                [2., 4., 4., 8.]])

        Otherwise their products are near those of the per-sample gradients:

        >>> w, x, y = torch.eye(100), torch.eye(100)[:2] + 1, torch.zeros(2, 100)
        >>> sketches = invfunc.sketched_grad(f, rows=20, columns=20, generator=g)(w, x, y)
        >>> exact = invfunc.gram(f)(w, x, y)
        >>> bool(((sketches @ sketches.T - exact).abs() < 0.5 * exact).all())
        True

    Composes with: `chunked` over samples and params, `streamed` (with `out=` a data set's sketches go to a file),
    `distributed`, `together`, `certified`; `torch.func.grad`, `vmap`, `jvp` around it.

    Cost: a backward pass without the gradients of the weights, the result, and products of each operation's input, and
    of the gradient at its output, with the matrices. `[N, O, I]` is formed only for operations without a rule, for some
    samples at a time. On one CPU core 0.7 to 1.1 gradients, with 16 rows and columns.

    Source: Choe et al., "What is your data worth to GPT?" (LoGra), arXiv 2405.13954, for linear layers; Hu et al.,
    "GraSS", arXiv 2505.18976; Park et al., "TRAK", ICML 2023; Johnson and Lindenstrauss (1984).
    """
    reduction = projecting("sketched_grad", rows, columns, projection, generator)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("sketched_grad", f, reduction, **options)


def gram(
    f: Callable,
    *,
    others: tuple | list | None = None,
    per_parameter: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The inner products of the per-sample gradients; of a model function the neural tangent kernel (NTK).

        G = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *batch).values()], 1)         # [N, P]
        G @ G.T

        J = torch.cat([j.flatten(2) for j in batch_jacobian(f)(params, *inputs).values()], 2)    # [N, C, P]
        torch.einsum("ncp,mdp->ncmd", J, J)

    With `others`, the products between the samples of the call and those of another batch, as training and test data:

        H = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *others).values()], 1)        # [M, P]
        G @ H.T

    A mean loss puts 1/N^2 into every product of a loss function; a model function has no such scale.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`, or a model function
            `f(params, *inputs)`, which returns one tensor `[N, *out]` of two dimensions or more. f is pure in
            torch.func's sense (see the conventions).
        others: the other batch, with an entry for each batch argument that has a sample axis. Its tensors have the
            shapes of those of the call, but for the number of samples M. f runs once, on both batches joined, and has
            to return a loss for each sample, or outputs.
        per_parameter: a matrix for each parameter instead of their sum.
        out_dims: the sample axis of the outputs of a model function.
        samples, argnums, in_dims, has_aux: as in `batch_grad`; `samples` selects from the samples of the call, not from
            `others`.

    Returns:
        A function `(params, *batch) -> [N, N]`, in the unit of (loss / parameter)^2; for a model function
        `(params, *inputs) -> [N, *out, N, *out]`. With `others`, `[N, M]` and `[N, *out, M, *out]`. With
        `per_parameter` a tree like the parameters of these.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; with `others`, a scalar loss, as its scale in each batch is
            not known, or an f that depends on the number of samples or on their positions.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.gram(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[ 4., 16.],
                [16., 64.]])

        Which sample of the training data moves the loss of a test sample: a step down the gradient of the first lowers
        that of the second where their product is positive.

        >>> test = torch.tensor([[-1.0]]), torch.ones(1)
        >>> invfunc.gram(f, others=test)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[ 8.],
                [32.]])

        Of chosen outputs, here one logit of each sample: a function that picks them is a loss function, whose products
        take one backward pass in place of C.

        >>> logit = lambda w, x, y: (x @ w).gather(1, y[:, None])[:, 0]
        >>> invfunc.gram(logit)(torch.eye(2), torch.ones(3, 2), torch.tensor([0, 1, 0]))
        tensor([[2., 0., 2.],
                [0., 2., 0.],
                [2., 0., 2.]])

    Composes with: `chunked` over params, `reduced`, `certified`; `torch.func.grad`, `vmap`, `jvp` around it, in what
    `others` holds too. Of a data set, `streamed(gram(f))(params, loader)`, of two `(params, loader, other_loader)`; and
    `distributed`. Tiles of one batch: `chunked(lambda *args: gram(f, others=others)(*args), n)` goes over the rows, a
    loop over parts of `others` over the columns.

    Cost: one forward pass and a pullback of all outputs of a sample at once. The per-sample gradients of a layer are
    formed, some at a time, if that is cheaper than products of its inputs and of the gradients at its outputs. With
    `others`, the cost of N + M samples, without the products within either batch, and a forward pass of each batch
    alone, which checks that f does not mix them (not for an f that draws random numbers).

    Source: Jacot, Gabriel and Hongler, "Neural tangent kernel", NeurIPS 2018; Dangel, Tatzel and Hennig, "ViViT",
    TMLR 2022.
    """
    if others is not None and not isinstance(others, (tuple, list)):
        raise ArgumentTypeError(
            f"gram(f, others=...): others is of type {type(others).__name__}, but has to be a tuple of batch "
            "arguments, as in gram(f, others=(x, y)); of one argument, others=(x,)."
        )
    both = None if others is None else tuple(others)
    options = {
        "others": both,
        "argnums": argnums,
        "in_dims": in_dims,
        "has_aux": has_aux,
        "samples": samples,
        "out_dims": out_dims,
    }
    return Statistic(
        "gram",
        f,
        InnerProducts(per_parameter) if both is None else ProductsWithOthers(per_parameter, _count(both, in_dims)),
        kind=GRADIENT_OR_JACOBIAN,
        **options,
    )


def _count(others: tuple, in_dims: InDims) -> int:
    """The number of samples the first tensor of another batch has; a call checks the rest."""
    dims = [in_dims] * len(others) if in_dims is None or isinstance(in_dims, int) else in_dims
    given = zip(others, (d for d in dims if d is not None), strict=False)
    sizes = (x.shape[d] for other, d in given for x in tree.tensors(other) if -x.ndim <= d < x.ndim)
    return next(sizes, 0)
