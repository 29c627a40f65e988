"""Fast rules: the share of a parameter at an operation that is linear in it, as an einsum of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from invfunc.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.equations import LETTERS, equation
from invfunc.operations.factors.recomputed import Recomputed
from invfunc.operations.operation import known

Part = slice | torch.Tensor
"""Some samples of a run: a range, or their indices."""
Build = Callable[[torch.Tensor, Part], list[Term]]


@dataclass
class Recipe:
    """`G[v, n, *output] = einsum(build(cotangent, part))`, with V and N as the labels of columns and samples.

    `cotangent [V, b, *one]` is the cotangent at the operation's output for the samples `part`, each exposed as a batch
    of one; `finish` brings what the output labels enumerate (`[*lead, *output]`) into the parameter's shape.
    """

    output: str
    build: Build
    finish: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    reads: tuple[torch.Tensor, ...] = ()
    work: int = 0
    """How many numbers `build` makes for one sample, beyond what the run kept anyway."""
    joins: bool = True
    """Whether several such shares of one parameter may be stacked and contracted together."""
    sent: Callable[[torch.Tensor], Term] | None = None
    """The first term that `build` makes, where the others are dear and may be known already."""
    gram: Callable[[Part], torch.Tensor | None] | None = None
    """The sum over samples and positions of the products of what is read, where that is cheaper than to read it."""
    factored: Recipe | None = None
    """The recipe of the same share as cotangents times what the operation reads, summed over positions as in a linear
    layer; None if this one has that form already."""
    selects: Callable[[Part], torch.Tensor] | None = None
    """The row of the parameter that each position picks, `[b, t]` as in `rows`, where the operation looks rows up."""
    linear: bool = True
    """Whether the operation is known to be linear in the parameter."""
    generic: bool = False
    """Whether it is had without a rule: the operation again with a copy of the parameter for each sample."""
    cells: str = ""
    """A label whose entries are squared one by one, as columns are: it enumerates `many` parts of a cotangent."""
    many: int = 1
    recomputed: Sequence[Recomputed] = ()
    """The operands that are not kept, but computed again when they are read."""
    own: Axis | None = None
    """Where the parameter has an entry for each sample, if the output is over that of the sample itself."""
    rows: Callable[[Part], torch.Tensor] | None = None
    """Where the first label of the output counts entries of each sample: `[b, u]`, the rows of the parameter that they
    are added to, no row twice in a sample; one behind the last drops an entry."""


@dataclass
class Site:
    """One operation at which a parameter meets samples: the call, where they are in its output, how to read values."""

    call: Call
    axis: Axis
    value: Callable[[torch.Tensor], torch.Tensor]

    def exposed(self, x: torch.Tensor, axis: Axis, part: Part, fill: float | None = 0) -> torch.Tensor:
        return axis.expose(self.value(x), self.call.n, fill=fill)[part]


def grouped(tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry of its sample that each of the tokens `[b, t]` adds to, and the token of each entry `[b, u]`.

    There are as many entries as tokens; those left over have the token `count`.
    """
    ordered, order = tokens.sort(1)
    first = ordered[:, :1] != ordered[:, :1]
    entry = torch.cat([first, ordered[:, 1:] != ordered[:, :-1]], 1).cumsum(1)
    found = torch.full_like(tokens, count).scatter(1, entry, ordered)
    return torch.zeros_like(tokens).scatter(1, order, entry), found


FactorRule = Callable[[Site, torch.Tensor], Recipe | None]


def find(call: Call) -> FactorRule | None:
    """The fast rule of a function, by its name; one's own operations bring theirs."""
    own = getattr(call.func, "recipe", None)
    entry = known(call.name)
    return own or entry.factor or (product if entry.equation else None)


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
    wide = {*parsed.output, *(c for inputs, x in others for c, n in zip(inputs, x.shape, strict=True) if n != 1)}
    output = "".join(c for c in labels if sizes[c] != 1 or c not in wide)  # no label that only others count

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        terms: list[Term] = [("VN" + parsed.output, cotangent)]
        for (inputs, x), axis in zip(others, axes, strict=True):
            terms.append((inputs, site.value(x)) if axis is None else ("N" + inputs, site.exposed(x, axis, part)))
        terms += [] if scale == 1 else [("", cotangent.new_tensor(scale))]
        seen = {c for inputs, x in terms for c, size in zip(inputs, x.shape, strict=True) if size != 1}
        terms += [(c, cotangent.new_ones(sizes[c])) for c in output if c not in seen]  # summed in the parameter alone
        return terms

    return Recipe(output, build, reads=tuple(x for _, x in others))


def axis_of(site: Site, x: torch.Tensor, labels: str, sample: str | None) -> Axis | None:
    """Where an operand has its samples; a constant may also have an entry for each of them."""
    axis = site.call.place(x)
    if axis is None and sample is not None and sample in labels and x.shape[labels.index(sample)] != 1:
        return site.axis.at(labels.index(sample))
    return axis if isinstance(axis, Axis) else None


def aligned(axis: Axis, param: torch.Tensor, n: int) -> Recipe:
    """A parameter with an entry for each sample: the share of sample n is in entry n only."""

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        eye = torch.eye(n, dtype=cotangent.dtype, device=cotangent.device)[part]
        return [("VN" + LETTERS[: cotangent.ndim - 2], cotangent), ("Nz", eye)]

    def finish(share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, n, *one]` into the layout of the parameter."""
        one = [axis.width(n) if d == axis.dim else size for d, size in enumerate(param.shape)]
        return axis.restore(share.reshape((*share.shape[:lead], n, *one)), n, lead)

    labels = LETTERS[: len(axis.expose(param, n).shape) - 1]
    own = Recipe(labels, lambda cotangent, part: [("VN" + labels, cotangent)], own=axis)
    return Recipe("z" + LETTERS[: param.ndim], build, finish, joins=False, factored=own)
