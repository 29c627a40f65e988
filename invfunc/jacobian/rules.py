"""Fast rules: the share of a parameter at an operation that is linear in it, as an einsum of small tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc.jacobian.axis import Axis
from invfunc.jacobian.contract import Term
from invfunc.jacobian.equations import LETTERS, PARSERS, equation
from invfunc.jacobian.follow import Call
from invfunc.jacobian.patches import patches, same_padding, spread

Build = Callable[[torch.Tensor, slice], list[Term]]


@dataclass
class Recipe:
    """`G[v, n, *output] = einsum(build(delta, part))`, with V and N as the labels of columns and samples.

    `delta [V, b, *one]` is the cotangent at the operation's output for the samples `part`, each exposed as a batch of
    one; `finish` brings what the output labels enumerate (`[*lead, *output]`) into the parameter's shape.
    """

    output: str
    build: Build
    finish: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    reads: tuple[torch.Tensor, ...] = ()
    work: int = 0
    """How many numbers `build` makes for one sample, beyond what the run kept anyway."""


@dataclass
class Site:
    """One operation at which a parameter meets samples: the call, where they are in its output, how to read values."""

    call: Call
    axis: Axis
    value: Callable[[torch.Tensor], torch.Tensor]

    def exposed(self, x: torch.Tensor, axis: Axis, part: slice) -> torch.Tensor:
        return axis.expose(self.value(x), self.call.n)[part]


FactorRule = Callable[[Site, torch.Tensor], Recipe | None]
RULES: dict[str, FactorRule] = {}


def find(name: str) -> FactorRule | None:
    """The fast rule of a function, by its name."""
    return RULES.get(name, product if name in PARSERS else None)


def product(site: Site, param: torch.Tensor) -> Recipe | None:
    """Any product or sum that can be written as an einsum: swap the parameter for the cotangent."""
    call = site.call
    parsed = equation(call.name, call.args, call.kwargs)
    if parsed is None:
        return None
    added = [factor for x, factor in parsed.added if x is param]
    at = [i for i, x in enumerate(parsed.operands) if x is param]
    if len(at) + len(added) != 1:
        return None
    if added:
        labels, scale, others = parsed.output[len(parsed.output) - param.ndim :], added[0], []
    else:
        labels, scale = parsed.inputs[at[0]], parsed.scale
        others = [(parsed.inputs[i], x) for i, x in enumerate(parsed.operands) if i != at[0]]
    if isinstance(scale, torch.Tensor):
        return None
    sample = None if site.axis.dim is None else parsed.output[site.axis.dim]
    axes = [axis_of(site, x, inputs, sample) for inputs, x in others]
    sizes = dict(zip(labels, param.shape, strict=True))
    output = "".join(c for c in labels if sizes[c] != 1)

    def build(delta: torch.Tensor, part: slice) -> list[Term]:
        terms: list[Term] = [("VN" + parsed.output, delta if scale == 1 else delta * scale)]
        for (inputs, x), axis in zip(others, axes, strict=True):
            terms.append((inputs, site.value(x)) if axis is None else ("N" + inputs, site.exposed(x, axis, part)))
        seen = {c for inputs, x in terms for c, size in zip(inputs, x.shape, strict=True) if size != 1}
        terms += [(c, delta.new_ones(sizes[c])) for c in output if c not in seen]  # summed in the parameter alone
        return terms

    return Recipe(output, build, reads=tuple(x for _, x in others))


def axis_of(site: Site, x: torch.Tensor, labels: str, sample: str | None) -> Axis | None:
    """Where an operand has its samples; a constant may have an entry for each of them too."""
    axis = site.call.place(x)
    if axis is None and sample is not None and sample in labels and x.shape[labels.index(sample)] != 1:
        return site.axis.at(labels.index(sample))
    return axis if isinstance(axis, Axis) else None


def aligned(axis: Axis, param: torch.Tensor, n: int) -> Recipe:
    """A parameter with an entry for each sample: the share of sample n is in entry n only."""

    def build(delta: torch.Tensor, part: slice) -> list[Term]:
        eye = torch.eye(n, dtype=delta.dtype, device=delta.device)[part]
        return [("VN" + LETTERS[: delta.ndim - 2], delta), ("Nz", eye)]

    def finish(share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, n, *one]` into the layout of the parameter."""
        one = [axis.width if d == axis.dim else size for d, size in enumerate(param.shape)]
        return axis.restore(share.reshape((*share.shape[:lead], n, *one)), n, lead)

    return Recipe("z" + LETTERS[: param.ndim], build, finish)


def _rule(*names: str) -> Callable[[FactorRule], FactorRule]:
    def register(fn: FactorRule) -> FactorRule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


def _channels(site: Site, x: torch.Tensor, axis: Axis, part: slice, d: int) -> torch.Tensor:
    """`[b, batch, channels, *spatial]`, also where the input has no batch dimension."""
    x = site.exposed(x, axis, part)
    return x if x.ndim == d + 3 else x.unsqueeze(1)


def _bias(d: int) -> Recipe:
    def build(delta: torch.Tensor, part: slice) -> list[Term]:
        delta = delta if delta.ndim == d + 4 else delta.unsqueeze(2)
        return [("VNbo" + "pqr"[:d], delta)]

    return Recipe("o", build)


def _options(call: Call, names: str) -> list[Any]:
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
    return [call.arg(i + 2, name, defaults[name]) for i, name in enumerate(names.split())]


@_rule("conv1d", "conv2d", "conv3d")
def convolution(site: Site, param: torch.Tensor) -> Recipe | None:
    """`G[o, i] = sum_p delta[o, p] * patches(x)[i, p]` for each group."""
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

    def build(delta: torch.Tensor, part: slice) -> list[Term]:
        delta = delta if delta.ndim == d + 4 else delta.unsqueeze(2)
        inputs = _channels(site, x, axis, part, d)
        read = patches(inputs.flatten(0, 1), kernel, stride, pads, dilation)
        return [
            ("VNbgop", delta.reshape(*delta.shape[:3], groups, -1, math.prod(delta.shape[4:]))),
            ("Nbgip", read.reshape(*inputs.shape[:2], groups, -1, read.shape[-1])),
        ]

    work = math.prod(weight.shape[1:]) * groups * math.prod(call.out.shape[-d:])
    return Recipe("goi", build, reads=(x,), work=work)


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(site: Site, param: torch.Tensor) -> Recipe | None:
    """The adjoint of a convolution: input and cotangent change roles, `G[c, i] = sum_p x[c, p] * patches(delta)[i, p]`.

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

    def of_delta(delta: torch.Tensor, part: slice) -> list[Term]:
        delta = delta if delta.ndim == d + 4 else delta.unsqueeze(2)
        inputs = _channels(site, x, axis, part, d)
        pads = [(p, p - e) for p, e in zip(padding, extra, strict=True)]
        read = patches(delta.flatten(0, 2), kernel, stride, pads, dilation)
        return [
            ("VNbgip", read.reshape(*delta.shape[:3], groups, -1, read.shape[-1])),
            ("Nbgcp", inputs.reshape(*inputs.shape[:2], groups, -1, math.prod(inputs.shape[3:]))),
        ]

    def of_input(delta: torch.Tensor, part: slice) -> list[Term]:
        delta = delta if delta.ndim == d + 4 else delta.unsqueeze(2)
        inputs = _channels(site, x, axis, part, d)
        edges = [a * (k - 1) - p for a, k, p in zip(dilation, kernel, padding, strict=True)]
        pads = [(e, e + o) for e, o in zip(edges, extra, strict=True)]
        read = patches(inputs.flatten(0, 1), kernel, stride, pads, dilation)
        return [
            ("VNbgop", delta.reshape(*delta.shape[:3], groups, width, math.prod(delta.shape[4:]))),
            ("Nbgip", read.reshape(*inputs.shape[:2], groups, -1, read.shape[-1])),
        ]

    def mirror(share: torch.Tensor, lead: int) -> torch.Tensor:
        share = share.reshape(*share.shape[:lead], groups, weight.shape[0] // groups, *kernel, width)
        return share.movedim(-1, lead + 2).flip(list(range(lead + 3, lead + 3 + d))).flatten(lead, lead + 1)

    if all(s == 1 for s in stride):
        work = weight.shape[0] * math.prod(kernel) * math.prod(call.out.shape[-d:])
        return Recipe("gio", of_input, mirror, reads=(x,), work=work)
    return Recipe("gci", of_delta, reads=(x,))
