"""Convolutions: patches of what they read times the cotangent."""

from __future__ import annotations

import math
from typing import Any

import torch

from invfunc.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.factors.autocorrelation import patches_gram
from invfunc.operations.factors.patches import patches, same_padding, spread
from invfunc.operations.factors.recipe import Part, Recipe, Site, rule


def _channels(site: Site, x: torch.Tensor, axis: Axis, part: Part, d: int) -> torch.Tensor:
    """The exposed samples as `[b, batch, channels, *spatial]`; the batch is 1 if the input has no batch dimension."""
    x = site.exposed(x, axis, part)
    return x if x.ndim == d + 3 else x.unsqueeze(1)


def _bias(d: int) -> Recipe:
    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        cotangent = cotangent if cotangent.ndim == d + 4 else cotangent.unsqueeze(2)
        return [("VNbo" + "pqr"[:d], cotangent)]

    return Recipe("o", build)


def _options(call: Call, names: str) -> list[Any]:
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
    return [call.arg(i + 2, name, defaults[name]) for i, name in enumerate(names.split())]


@rule("conv1d", "conv2d", "conv3d")
def convolution(site: Site, param: torch.Tensor) -> Recipe | None:
    """`G[o, i] = sum_p cotangent[o, p] * patches(x)[i, p]` for each group."""
    call, d = site.call, int(site.call.name[4])
    x, weight = call.arg(0, "input"), call.arg(1, "weight")
    bias, stride, padding, dilation, groups = _options(call, "bias stride padding dilation groups")
    if param is bias and param is not weight:
        return _bias(d)
    axis = call.place(x)
    if param is not weight or not isinstance(axis, Axis):
        return None
    kernel = tuple(weight.shape[2:])
    stride, dilation = spread(stride, d), spread(dilation, d)
    pads = same_padding(padding, kernel, dilation)

    def sent(cotangent: torch.Tensor) -> Term:
        cotangent = cotangent if cotangent.ndim == d + 4 else cotangent.unsqueeze(2)
        return "VNbgop", cotangent.reshape(*cotangent.shape[:3], groups, -1, math.prod(cotangent.shape[4:]))

    def gram(part: Part) -> torch.Tensor | None:
        if groups != 1 or any(s != 1 for s in stride):
            return None
        return patches_gram(_channels(site, x, axis, part, d).flatten(0, 1), kernel, pads, dilation)

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        inputs = _channels(site, x, axis, part, d)
        read = patches(inputs.flatten(0, 1), kernel, stride, pads, dilation)
        return [sent(cotangent), ("Nbgip", read.reshape(*inputs.shape[:2], groups, -1, read.shape[-1]))]

    work = math.prod(weight.shape[1:]) * groups * math.prod(call.out.shape[-d:])
    return Recipe("goi", build, reads=(x,), work=work, sent=sent, gram=gram)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(site: Site, param: torch.Tensor) -> Recipe | None:
    """The adjoint of a convolution: input and cotangent change roles, `G[c, i] = sum_p x[c, p] * patches(cotangent)[i,
    p]`.

    With stride 1 it is a convolution with the mirrored kernel too, and patches of x serve all columns.
    """
    call, d = site.call, int(site.call.name[14])
    x, weight = call.arg(0, "input"), call.arg(1, "weight")
    names = "bias stride padding output_padding groups dilation"
    bias, stride, padding, extra, groups, dilation = _options(call, names)
    if param is bias and param is not weight:
        return _bias(d)
    axis = call.place(x)
    if param is not weight or not isinstance(axis, Axis):
        return None
    kernel, width = tuple(weight.shape[2:]), weight.shape[1]
    stride, dilation, padding, extra = (spread(s, d) for s in (stride, dilation, padding, extra))

    def of_cotangent(cotangent: torch.Tensor, part: Part) -> list[Term]:
        cotangent = cotangent if cotangent.ndim == d + 4 else cotangent.unsqueeze(2)
        inputs = _channels(site, x, axis, part, d)
        pads = [(p, p - e) for p, e in zip(padding, extra, strict=True)]
        read = patches(cotangent.flatten(0, 2), kernel, stride, pads, dilation)
        return [
            ("VNbgip", read.reshape(*cotangent.shape[:3], groups, -1, read.shape[-1])),
            ("Nbgcp", inputs.reshape(*inputs.shape[:2], groups, -1, math.prod(inputs.shape[3:]))),
        ]

    def sent(cotangent: torch.Tensor) -> Term:
        cotangent = cotangent if cotangent.ndim == d + 4 else cotangent.unsqueeze(2)
        return "VNbgop", cotangent.reshape(*cotangent.shape[:3], groups, width, math.prod(cotangent.shape[4:]))

    def of_input(cotangent: torch.Tensor, part: Part) -> list[Term]:
        inputs = _stuffed(_channels(site, x, axis, part, d), stride)
        edges = [a * (k - 1) - p for a, k, p in zip(dilation, kernel, padding, strict=True)]
        pads = [(e, e + o) for e, o in zip(edges, extra, strict=True)]
        read = patches(inputs.flatten(0, 1), kernel, (1,) * d, pads, dilation)
        return [
            sent(cotangent),
            ("Nbgip", read.reshape(*inputs.shape[:2], groups, -1, read.shape[-1])),
        ]

    def mirror(share: torch.Tensor, lead: int) -> torch.Tensor:
        share = share.reshape(*share.shape[:lead], groups, weight.shape[0] // groups, *kernel, width)
        return share.movedim(-1, lead + 2).flip(list(range(lead + 3, lead + 3 + d))).flatten(lead, lead + 1)

    work = weight.shape[0] * math.prod(kernel) * math.prod(call.out.shape[-d:])
    of_patches = Recipe("gio", of_input, mirror, reads=(x,), work=work, sent=sent)
    if all(s == 1 for s in stride):
        return of_patches
    return Recipe("gci", of_cotangent, reads=(x,), factored=of_patches)


def _stuffed(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """x with zeros put between its entries, so that a transposed convolution reads it with stride 1."""
    for dim, s in enumerate(stride, x.ndim - len(stride)):
        if s > 1:
            apart = torch.nn.functional.pad(x.unsqueeze(dim + 1).movedim(dim + 1, -1), (0, s - 1)).movedim(-1, dim + 1)
            x = apart.flatten(dim, dim + 1).narrow(dim, 0, (x.shape[dim] - 1) * s + 1)
    return x
