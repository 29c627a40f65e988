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
