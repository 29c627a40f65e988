"""Fast rules: the share of a parameter at an operation that is linear in it, as an einsum of small tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from invfunc.linear_algebra.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.equations import LETTERS
from invfunc.operations.operation import known

Part = slice | torch.Tensor
"""Some samples of a run: a range, or their indices."""


def one_by_one(part: Part) -> list[Part]:
    """Its samples."""
    return [slice(i, i + 1) for i in range(part.start, part.stop)] if isinstance(part, slice) else [*part.split(1)]


def _unchanged(cotangent: torch.Tensor, part: Part) -> torch.Tensor:
    return cotangent


def _nothing(part: Part) -> list[Term]:
    return []


@dataclass(eq=False)
class Recipe:
    """`G[v, n, *output] = einsum(terms(cotangent, part))`, with V and N as the labels of columns and samples.

    `cotangent [V, b, *one]` is the cotangent at the operation's output for the samples `part`, each exposed as a batch
    of one; the output labels enumerate the entries of the parameter in their order. It has one of three forms:

    * a product `sum_r s[k, r] a[i, r]` of what is sent back, labelled with `labels`, and what is read: labels of the
      output that both have are of blocks of the parameter, and labels that it has not are positions;
    * the same with a table of which each position t picks a row: what is sent back to equal rows u is added up;
    * what `build` makes, where nothing more is known.
    """

    output: str
    labels: str | None = None
    """The labels of one sample of what is sent back; None in the third form."""
    sent: Callable[[torch.Tensor, Part], torch.Tensor] = _unchanged
    """Lays the cotangent out as labelled, `[V, b, *labels]`: its entries once each, or a part of them."""
    read: Callable[[Part], list[Term]] = _nothing
    """What the operation has read, in factors."""
    projected: Callable[[Part, torch.Tensor], list[Term]] | None = None
    """That times a matrix `[i, C]` over the last label i of the output, where it is large as it was read."""
    picks: Callable[[Part], torch.Tensor] | None = None
    """The row of the parameter that each position t picks, `[b, t]`; one behind the last drops what is sent there."""
    own: Axis | None = None
    """Where the parameter has an entry z for each sample, of which what is read tells which it is."""
    build: Callable[[torch.Tensor, Part], list[Term]] | None = None
    """Other terms of the same share, which are cheaper than those of its form or the only ones."""
    gram: Callable[[Part], torch.Tensor | None] | None = None
    """The sum over samples and positions of the products of what is read, where that is cheaper than to read it."""
    total: Callable[[torch.Tensor, Part], torch.Tensor | None] | None = None
    """The sum over samples of the shares of one cotangent `[b, *one]`, by the operation's own backward pass; None where
    the factors are the better way."""
    reads: tuple[torch.Tensor, ...] = ()
    work: int = 0
    """How many numbers the terms have for one sample, beyond what the run kept anyway."""
    cells: int = 0
    """How many parts S of a cotangent are squared one by one, as columns are; 0 if it is squared as a whole."""
    generic: bool = False
    """Whether it is had without a rule: the operation again with a copy of the parameter for each sample."""

    @property
    def linear(self) -> bool:
        """Whether the operation is known to be linear in the parameter."""
        return self.labels is not None

    @property
    def joins(self) -> bool:
        """Whether several such shares of one parameter may be stacked and contracted together."""
        return not self.generic and self.picks is None

    def sends(self, cotangent: torch.Tensor, part: Part) -> Term:
        """The first term of a recipe with a form."""
        assert self.labels is not None
        return "VN" + self.labels, self.sent(cotangent, part)

    def terms(self, cotangent: torch.Tensor, part: Part, matrix: torch.Tensor | None = None) -> list[Term]:
        """The factors of the shares; with a matrix, of `projected` ones."""
        made = None if self.build is None else self.build(cotangent, part)
        if not made:
            read = self.read(part) if matrix is None or self.projected is None else self.projected(part, matrix)
            made = [self.sends(cotangent, part), *read]
        first, *others = made
        return [first if self.picks is None else _added_up(first, self.picks(part)), *others]

    def weighted(self, cotangent: torch.Tensor, part: Part, weights: torch.Tensor | None) -> torch.Tensor | None:
        """`sum_n weights[n] G[n]` of one cotangent `[b, *one]`, if the operation's own backward pass is better."""
        if self.total is None:
            return None
        if weights is not None:
            cotangent = cotangent * weights.to(cotangent.dtype).reshape(-1, *[1] * (cotangent.ndim - 1))
        return self.total(cotangent, part)

    def rows(self, part: Part, count: int) -> torch.Tensor:
        """The row of a table with `count` rows for each entry u, `[b, u]`: none twice in a sample, but those behind."""
        assert self.picks is not None
        return grouped(self.picks(part), count)[1]


def _added_up(term: Term, picked: torch.Tensor) -> Term:
    """What is sent back to equal rows, in one entry of its sample."""
    labels, x = term
    at, entry = labels.index("t"), grouped(picked)[0]
    index = entry.reshape(1, len(picked), *[-1 if d == at else 1 for d in range(2, x.ndim)]).expand(x.shape)
    return labels.replace("t", "u"), torch.zeros_like(x).scatter_add(at, index, x)


def grouped(tokens: torch.Tensor, count: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The entry of its sample that each of the tokens `[b, t]` adds to, and the token of each entry `[b, u]`.

    There are as many entries as tokens; those left over have the token `count`.
    """
    ordered, order = tokens.sort(1)
    first = ordered[:, :1] != ordered[:, :1]
    entry = torch.cat([first, ordered[:, 1:] != ordered[:, :-1]], 1).cumsum(1)
    found = torch.full_like(tokens, count).scatter(1, entry, ordered)
    return torch.zeros_like(tokens).scatter(1, order, entry), found


@dataclass
class Site:
    """One operation at which a parameter meets samples: the call, where they are in its output, how to read values."""

    call: Call
    axis: Axis
    value: Callable[[torch.Tensor], torch.Tensor]

    def exposed(self, x: torch.Tensor, axis: Axis, part: Part, fill: float | None = 0) -> torch.Tensor:
        return axis.expose(self.value(x), self.call.n, fill=fill)[part]


FactorRule = Callable[[Site, torch.Tensor], Recipe | None]


def find(call: Call) -> FactorRule | None:
    """The fast rule of a function, by its name; one's own operations bring theirs."""
    own = getattr(call.func, "recipe", None)
    entry = known(call.name)
    return own or entry.factor or (product if entry.equation else None)


def product(site: Site, param: torch.Tensor) -> Recipe | None:
    """Any product or sum that can be written as an einsum: swap the parameter for the cotangent."""
    call = site.call
    parsed = call.equation
    met = None if parsed is None else parsed.meets(param)
    if parsed is None or met is None:
        return None
    labels, scale, others = met
    sample = None if site.axis.dim is None else parsed.output[site.axis.dim]
    axes = [axis_of(site, x, inputs, sample) for inputs, x in others]
    output, alone = _entries(labels, param.shape, parsed.output, tuple([(inputs, x.shape) for inputs, x in others]))
    like = {"dtype": param.dtype, "device": param.device}

    def read(part: Part) -> list[Term]:
        terms = [
            (inputs, site.value(x)) if axis is None else ("N" + inputs, site.exposed(x, axis, part))
            for (inputs, x), axis in zip(others, axes, strict=True)
        ]
        terms += [] if scale == 1 else [("", torch.tensor(scale, **like))]
        return terms + [(c, torch.ones(size, **like)) for c, size in alone]

    return Recipe(output, parsed.output, read=read, reads=tuple(x for _, x in others))


@lru_cache(maxsize=4096)
def _entries(
    labels: str, shape: torch.Size, output: str, others: tuple[tuple[str, torch.Size], ...]
) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The labels of the entries of a parameter, and those among them, with their sizes, that are summed in it alone."""
    sizes = dict(zip(labels, shape, strict=True))
    wide = {*output, *(c for inputs, x in others for c, n in zip(inputs, x, strict=True) if n != 1)}
    kept = [c for c in labels if sizes[c] != 1 or c not in wide]  # no label that only others count
    return "".join(kept), tuple((c, sizes[c]) for c in kept if c not in wide)


def axis_of(site: Site, x: torch.Tensor, labels: str, sample: str | None) -> Axis | None:
    """Where an operand has its samples; a constant may also have an entry for each of them."""
    axis = site.call.place(x)
    if axis is None and sample is not None and sample in labels and x.shape[labels.index(sample)] != 1:
        return site.axis.at(labels.index(sample))
    return axis if isinstance(axis, Axis) else None


def alike(param: torch.Tensor) -> Recipe:
    """A parameter that all samples have as it is: the share of a sample is its cotangent."""
    labels = LETTERS[: param.ndim]
    return Recipe(labels, labels)


def aligned(axis: Axis, param: torch.Tensor, n: int) -> Recipe:
    """A parameter with an entry for each sample: the share of sample n is in entry n only."""
    labels, like = LETTERS[: len(axis.expose(param, n).shape) - 1], {"dtype": param.dtype, "device": param.device}
    return Recipe("z" + labels, labels, read=lambda part: [("Nz", torch.eye(n, **like)[part])], own=axis)
