"""Bottlenecks of a run: tensors that every path from the outputs to what lies below has to cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc._torch.generators import uniform
from invfunc.loss.square_root import OutputCotangents
from invfunc.operations.axis import Axis
from invfunc.passes.run import Run
from invfunc.plan import even
from invfunc.recording.graph import node_of, pulled_back
from invfunc.recording.tags import ParameterUse

Entries = dict[int, "torch.Tensor | slice"]
"""Some entries of each output of a sample, which is flat."""


@dataclass(frozen=True)
class Bottleneck:
    """A tensor that an operation with parameters reads and that all paths to the sites `below` cross."""

    use: int
    """The place among the parameter uses of one that reads it."""
    site: int
    read: int
    """The place of the tensor among those that the operation reads."""
    width: int
    """How many entries the tensor has for one sample."""
    below: frozenset[int]

    def of(self, run: Run) -> tuple[torch.Tensor, Axis]:
        """The tensor of a run, and where its samples are."""
        call = run.trace.uses[self.use].call
        assert call is not None
        x, axis = call.read[self.read], call.place(call.read[self.read])
        assert isinstance(axis, Axis)
        return x, axis

    def forward(self, run: Run, directions: torch.Tensor, budget: int, at: Entries) -> OutputCotangents:
        """Jacobian vector products of `[d, 1, *one]` for each sample, up to entries of a run's outputs:
        `[d, n, entries]`.

        They are the derivative of a pullback in its cotangent, so that no other run is needed.
        """
        (x, axis), n = self.of(run), run.trace.n
        given = axis.restore(directions.expand(-1, n, *directions.shape[2:]), n, 1)
        weights = {i: torch.zeros_like(z).requires_grad_() for i, (z, _) in run.outputs.items() if z.requires_grad}
        zs = [run.outputs[i][0] for i in weights]
        (slope,) = torch.autograd.grad(zs, [x], list(weights.values()), create_graph=True)
        found: OutputCotangents = {}
        for a, b in even(len(directions), max(1, budget // (n * output_size(run)))):
            options = {"is_grads_batched": True, "retain_graph": True}
            moved = pulled_back([slope], list(weights.values()), [given[a:b]], **options)
            for (i, w), u in zip(weights.items(), moved, strict=True):
                u = w.new_zeros(b - a, *w.shape) if u is None else u.detach()
                u = run.outputs[i][1].expose(u, n, 1).flatten(2)[:, :, at.get(i, slice(0, 0))]
                if i not in found:
                    wide = torch.promote_types(u.dtype, torch.float32)
                    found[i] = u.new_empty(len(directions), *u.shape[1:], dtype=wide)
                found[i][a:b] = u
        return found


class Transposed:
    """Whether what is moved forwards is right for every sample, checked against one pullback of random numbers.

    torch differentiates some backward passes wrongly, and f may treat the places of a batch differently.
    """

    def __init__(self, bottleneck: Bottleneck, run: Run, places: torch.Tensor, at: Sequence[Entries]) -> None:
        """`at` are the entries to which is going to be moved, step by step; to the others no numbers are given."""
        (x, axis), n = bottleneck.of(run), run.trace.n
        self.eps = torch.finfo(x.dtype).eps
        zs, self.numbers = [], OutputCotangents()
        for i, (z, own) in run.outputs.items():
            if z.requires_grad:
                flat = own.expose(uniform(z.numel(), i).reshape(z.shape).to(z), n).flatten(1)
                met = torch.zeros_like(flat[:1])
                for some in at:
                    met[:, some.get(i, slice(0, 0))] = 1
                zs.append((i, z, own))
                self.numbers[i] = flat * met
        given = [own.restore(self.numbers[i].reshape(own.expose(z, n).shape), n) for i, z, own in zs]
        (back,) = torch.autograd.grad([z for _, z, _ in zs], [x], given, retain_graph=True)
        wide = torch.promote_types(back.dtype, torch.float32)
        theirs = torch.nn.functional.pad(axis.expose(back, n).flatten(1).to(wide), (0, 1))
        self.theirs = theirs[:, places].sum(1)  # [n, m]
        self.ours, self.bound = torch.zeros_like(self.theirs), torch.zeros_like(self.theirs)

    def add(self, moved: OutputCotangents, at: Entries) -> None:
        """Take in what was moved to some entries."""
        for i, u in moved.items():
            w = self.numbers[i][:, at.get(i, slice(0, 0))].to(u.dtype)
            product = w @ u[:, 0].T if u.shape[1] == 1 else torch.einsum("dnk,nk->nd", u, w)
            self.ours = self.ours + product
            self.bound = self.bound + w.norm(dim=1)[:, None] * u.norm(dim=2).T

    @property
    def right(self) -> bool:
        return bool(((self.ours - self.theirs).abs() <= 1000 * self.eps * self.bound).all())


def output_size(run: Run) -> int:
    """How many entries the outputs of a sample have."""
    return sum(z.numel() for z, _ in run.outputs.values()) // run.trace.n


def _reads(use: ParameterUse) -> list[tuple[int, torch.Tensor]]:
    """What the operation of a parameter use reads of the samples, and its places there."""
    call = use.call
    if call is None or use.recomputed:
        return []
    found = {id(x): (k, x) for k, x in enumerate(call.read) if x.requires_grad and isinstance(call.place(x), Axis)}
    return list(found.values())


def paths(run: Run) -> tuple[list[list[int]], list[Bottleneck]]:
    """The sites through which a path from the outputs to each site may lead, and the bottlenecks, the upper ones first.

    They are those of the graph that autograd recorded, so that nothing is assumed about the function.
    """
    sites: dict[Any, list[int]] = {}
    for s, edge in enumerate(run.trace.edges):
        sites.setdefault(edge.node, []).append(s)
    parents, order = _sorted([z for z, _ in run.outputs.values() if z.requires_grad])
    lower: dict[Any, frozenset[int]] = {}  # the sites at a node or below it
    for node in reversed(order):
        lower[node] = frozenset(sites.get(node, ())).union(*(lower[p] for p, _ in parents[node]))
    above: list[list[int]] = [[] for _ in run.trace.edges]
    for node, own in sites.items():
        for low in lower.get(node, ()):
            above[low] += [s for s in own if s != low]
    return above, _bottlenecks(run, parents, order, lower)


def _sorted(outputs: list[torch.Tensor]) -> tuple[dict[Any, list[tuple[Any, int]]], list[Any]]:
    """The nodes of the graph, each before those that it leads to."""
    parents: dict[Any, list[tuple[Any, int]]] = {}
    order: list[Any] = []
    waiting = [(node_of(z), False) for z in outputs]
    while waiting:
        node, left = waiting.pop()
        if left:
            order.append(node)
        elif node not in parents:
            parents[node] = [(p, nr) for p, nr in node.next_functions if p is not None]
            waiting.append((node, True))
            waiting += [(p, False) for p, _ in parents[node] if p not in parents]
    return parents, order[::-1]


def _bottlenecks(run: Run, parents: dict, order: list, lower: dict[Any, frozenset[int]]) -> list[Bottleneck]:
    """The bottlenecks of the graph. Walk down with all edges that are reached but not passed: a single one is one."""
    candidates: dict[Any, tuple[int, int, torch.Tensor]] = {}
    for i, use in enumerate(run.trace.uses):
        for k, x in _reads(use):
            candidates.setdefault(node_of(x), (i, k, x))
    reached = {(node_of(z), z.output_nr) for z, _ in run.outputs.values() if z.requires_grad}
    readers: dict[Any, int] = {}
    for node in order:
        for p, _ in parents[node]:
            readers[p] = readers.get(p, 0) + 1
    open_edges = {edge for edge in reached if lower[edge[0]]}
    found = []
    for node in order:
        if not lower[node]:
            continue
        own = {edge for edge in open_edges if edge[0] == node}
        if own == open_edges and len(own) == 1 and node in candidates and readers.get(node) == 1:
            use, read, x = candidates[node]
            if x.output_nr == next(iter(own))[1]:
                found.append(Bottleneck(use, run.trace.uses[use].site, read, x.numel() // run.trace.n, lower[node]))
        open_edges -= own
        open_edges |= {edge for edge in parents[node] if lower[edge[0]]}
    return found
