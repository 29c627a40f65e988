"""The gradient, and how much of it is noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from invfunc.arguments.problem import Indices, InDims
from invfunc.callables import grouped, valued
from invfunc.reductions.noise import SumAndNoise
from invfunc.statistic import Statistic


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

    Both parts are unbiased estimates, for the gradient G of a sample that is drawn at random. The scale is the number
    of samples of which the mean gradient has as much noise as signal: larger batches than that take hardly fewer steps.

    The squared norm is a difference, and of batches that are small beside the scale it is often negative: such a batch
    does not tell the gradient from its noise. It is returned unchanged: clamped, its average over steps would be
    biased. And it is the parts that are averaged, as in the example below, never their ratio.

    A mean loss puts 1/N into every per-sample gradient and 1/N^2 into both parts; the scale is the same for a mean, a
    sum and `[N]` losses. Return the `[N]` losses where the parts matter, as in averages over batches of several sizes.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`. f is pure in torch.func's sense (see
            the conventions).
        groups: the name of the group for the key path of each parameter, as it is written behind the tree
            (`"['weight']"`), or None for one that does not count; or a dict of these by the names of those that count
            (`{"0.weight": "first"}`). Without it all count together; `groups=lambda path: path` is of each parameter,
            `groups="layer"` of those whose names differ in the last part alone (`"0.weight"` and `"0.bias"` in `"0"`).
        samples, argnums, in_dims, has_aux: as in `batch_grad`; the gradient is that of these samples.
        value: as in `clipped_grad`: what f returns comes behind the noise.

    Returns:
        A function `(params, *batch) -> (grad, noise)`: a tree like the parameters, and a `NoiseScale(squared_norm,
        trace)` of two tensors without dimensions in the unit of (loss / parameter)^2, whose `.scale` is their ratio, a
        number of samples. With `groups` noise is a dict of these by the names. With has_aux `(grad, noise, aux)`, with
        value `(grad, noise, value)`.

    Raises:
        ArgumentError: there is one sample only, or `groups` names no parameter; and as in `batch_grad`.
        ArgumentTypeError: `groups` is no function, or gives something else than names and None.
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

    Cost: one gradient and the norms of `batch_l2_grad`, where the per-sample gradients that are formed for them are
    summed for the gradient, too. Parameters that do not count have no norms. For norm layers alone that is hardly more
    than the gradient; what is left is the Python of a call, which `compiled` takes away.

    Parts are differences of sums in float64 of per-sample gradients, which are rounded: in float32, about 1e-7 of the
    squared norm is an error of the trace, so that scales below 1e-5 have few digits; `grad_and_variance` centres first.
    Where the squared norm of the gradient overflows the trace is NaN.

    Source: McCandlish et al., "An empirical model of large-batch training", 2018, appendix A; Gray et al.,
    "Normalization layer per-example gradients are sufficient to predict gradient noise scale in transformers", NeurIPS
    2024.
    """
    names = grouped("noise_scale", f, groups)
    f, has_aux = valued(f, value, has_aux)
    options = {"argnums": argnums, "in_dims": in_dims, "has_aux": has_aux, "samples": samples}
    return Statistic("noise_scale", f, SumAndNoise(names), **options)
