"""Layers that scale and shift, channel by channel, or look rows up."""

from __future__ import annotations

from collections.abc import Callable

import torch

from invfunc import tree
from invfunc.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Part, Recipe, Site, grouped, rule


def _scale(site: Site, output: str, factor: Callable[[Part], torch.Tensor], reads: tuple[torch.Tensor, ...]) -> Recipe:
    """`G[output] = sum cotangent * factor` over all other dimensions."""
    labels = LETTERS[: site.call.out.ndim]

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        return [("VN" + labels, cotangent), ("N" + labels, factor(part))]

    return Recipe(output, build, reads=reads, work=site.call.out.numel() // site.call.n)


def _shift(site: Site, output: str) -> Recipe:
    labels = LETTERS[: site.call.out.ndim]
    return Recipe(output, lambda cotangent, part: [("VN" + labels, cotangent)])


@rule("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")
def norm(site: Site, param: torch.Tensor) -> Recipe | None:
    """`y = normalised(x) * weight + bias`: of the trailing dimensions, or channel by channel."""
    call = site.call
    x, name = call.arg(0, "input"), call.name
    axis = call.place(x)
    if name in ("layer_norm", "rms_norm"):
        labels = LETTERS[x.ndim - param.ndim : x.ndim]
        weight, bias = call.arg(2, "weight"), call.arg(3, "bias") if name == "layer_norm" else None
    else:
        functional = getattr(call.func, "__module__", None) == "torch.nn.functional"
        first = 2 if name == "group_norm" else 3 if functional else 1  # torch.nn has the running statistics first
        weight, bias = call.arg(first, "weight"), call.arg(first + 1, "bias")
        labels = LETTERS[1]
    if param is bias and param is not weight:
        return _shift(site, labels)
    if param is not weight or param is bias or not isinstance(axis, Axis) or param is x:
        return None
    affine = {id(weight), id(bias)}
    if name == "instance_norm" and call.arg(5, "use_input_stats"):  # it reads no running statistics, but writes them
        mean = 1 if functional else 3
        affine |= {id(call.arg(mean, "running_mean")), id(call.arg(mean + 1, "running_var"))}
    args, kwargs = tree.map_leaves(lambda a: None if id(a) in affine else a, (call.args, call.kwargs))

    # that of torch.nn refuses one value for each group of a single sample, which has a share like any other
    function = torch.group_norm if name == "group_norm" else call.func

    def normalised(part: Part) -> torch.Tensor:
        value = _wide(site.exposed(x, axis, part))
        flat = value.flatten(0, 1) if len(labels) == 1 and name not in ("layer_norm", "rms_norm") else value
        given, named = tree.map_tensors(lambda a: flat if a is x else _wide(site.value(a)), (args, kwargs))
        return function(*given, **named).reshape(value.shape)

    return _scale(site, labels, normalised, (x,))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@rule("prelu")
def prelu(site: Site, param: torch.Tensor) -> Recipe | None:
    """`y = x` above 0, `weight * x` below."""
    x, weight = site.call.arg(0, "input"), site.call.arg(1, "weight")
    axis = site.call.place(x)
    if param is not weight or param is x or not isinstance(axis, Axis):
        return None
    labels = LETTERS[1] if param.numel() > 1 else ""
    return _scale(site, labels, lambda part: site.exposed(x, axis, part).clamp(max=0), (x,))


@rule("embedding")
def embedding(site: Site, param: torch.Tensor) -> Recipe | None:
    """A table of which rows are looked up: the cotangents at equal tokens of a sample are added up first, so that each
    row occurs only once in it."""
    weight, indices = site.call.arg(0, "weight"), site.call.arg(1, "indices")
    padding = site.call.arg(2, "padding_idx", -1)
    axis, count = site.call.place(indices), len(weight)
    if param is not weight or not isinstance(axis, Axis):
        return None

    def entries(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """The entry of its sample that each position adds to, and the row of each entry: `[b, u]`."""
        entry, found = grouped(site.exposed(indices, axis, part, fill=count).flatten(1).long(), count)
        return entry, found.masked_fill(found == padding, count)

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        entry, found = entries(part)
        cotangent = cotangent.reshape(*cotangent.shape[:2], -1, cotangent.shape[-1])
        share = torch.zeros_like(cotangent).scatter_add(2, entry[None, :, :, None].expand(cotangent.shape), cotangent)
        return [("VNud", share * (found < count)[:, :, None])]

    def picked(part: Part) -> torch.Tensor:
        tokens = site.exposed(indices, axis, part, fill=count).flatten(1).long()
        return tokens.masked_fill(tokens == padding, count)

    def at_positions(cotangent: torch.Tensor, part: Part) -> list[Term]:
        cotangent = cotangent.reshape(*cotangent.shape[:2], -1, cotangent.shape[-1])
        return [("VNtd", cotangent * (picked(part) < count)[:, :, None])]

    factored = Recipe("d", at_positions, reads=(indices,), selects=picked)
    work = 2 * site.call.out.numel() // site.call.n
    return Recipe(
        "ud", build, reads=(indices,), work=work, joins=False, rows=lambda part: entries(part)[1], factored=factored
    )


@rule("cat", "concat", "concatenate", "stack")
def placed(site: Site, param: torch.Tensor) -> Recipe | None:
    """A parameter that is a part of the output, as in `cat` and `stack`: its share is that part of the cotangent."""
    call, labels = site.call, LETTERS[: site.call.out.ndim]
    tensors, dim = call.arg(0, "tensors"), call.kwargs.get("axis", call.arg(1, "dim", 0)) % call.out.ndim
    at = [i for i, x in enumerate(tensors) if x is param]
    if len(at) != 1 or dim == site.axis.dim:
        return None
    if call.name == "stack":
        labels = labels[:dim] + labels[dim + 1 :]
        return Recipe(labels, lambda cotangent, part: [("VN" + labels, cotangent.select(2 + dim, at[0]))])
    if any(x.ndim != call.out.ndim for x in tensors):  # torch passes over empty ones
        return None
    start = sum(x.shape[dim] for x in tensors[: at[0]])
    return Recipe(labels, lambda cotangent, part: [("VN" + labels, cotangent.narrow(2 + dim, start, param.shape[dim]))])
