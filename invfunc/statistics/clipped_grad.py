"""The sum of the shares, each clipped by its norm."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc._torch.functorch import dispatched, innermost, transforming
from invfunc._torch.precision import doubled
from invfunc._torch.weak import WeakIdMap
from invfunc.arguments.problem import BoundProblem, Indices, InDims
from invfunc.callables import describe, grouped, valued
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncWarning
from invfunc.reductions.gradients import ClippedSum
from invfunc.statistic import Statistic


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
