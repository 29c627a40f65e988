"""Narrow layers of a run: tensors that every path from the outputs to what lies below has to cross."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc.operations.axis import Axis
from invfunc.passes.run import Run
from invfunc.recording.graph import node_of
from invfunc.recording.tags import ParameterUse


@dataclass
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


@dataclass
class Paths:
    """The graph between the outputs of a run and its sites."""

    above: list[list[int]]
    """The sites through which a path from the outputs to each site may lead."""
    bottlenecks: list[Bottleneck]
    """From the outputs downwards."""


def _reads(use: ParameterUse) -> list[tuple[int, torch.Tensor]]:
    """What the operation of a parameter use reads of the samples, and its places there."""
    call = use.call
    if call is None or use.recomputed:
        return []
    found = {id(x): (k, x) for k, x in enumerate(call.read) if x.requires_grad and isinstance(call.place(x), Axis)}
    return list(found.values())


def paths(run: Run) -> Paths:
    """The paths in the graph that autograd recorded, so that nothing is assumed about the function."""
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
    return Paths(above, _bottlenecks(run, parents, order, lower))


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
