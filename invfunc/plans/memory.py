"""Which memory the operations of a graph read and write, and graphs of some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from invfunc.plans.facts import Operator, writes
from invfunc.plans.finish import acts
from invfunc.plans.parts import Passes


def part_of(given: Iterable[fx.Node], nodes: Iterable[fx.Node], results: Any) -> fx.GraphModule:
    """A graph of some nodes."""
    graph, own = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in given:
        own[node] = graph.placeholder(node.name)
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
    graph.output(fx.map_arg(results, own.__getitem__))
    graph.eliminate_dead_code(acts)
    return fx.GraphModule(torch.nn.Module(), graph)


def memory_of(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each node one that stands for all in the same memory."""
    found: dict[fx.Node, fx.Node] = {}

    def of(node: fx.Node) -> fx.Node:
        while found[node] is not node:
            found[node] = node = found[found[node]]
        return node

    for node in nodes:
        found[node] = node
        for x in _aliased(node):
            found[of(x)] = node
    return {node: of(node) for node in nodes}


def _aliased(node: fx.Node) -> list[fx.Node]:
    """The inputs in whose memory a result may be."""
    target: Any = node.target
    if not isinstance(target, Operator):
        return node.all_input_nodes
    if "unsafe" in target._schema.name:  # which says that it shares no memory
        return node.all_input_nodes
    return _at(node, [(i, a.name) for i, a in enumerate(target._schema.arguments) if a.alias_info is not None])


def written(node: fx.Node) -> list[fx.Node]:
    """The inputs that an operation writes."""
    if isinstance(node.target, Passes) and any(written(own) for own in node.target.part.nodes):
        return node.all_input_nodes
    return _at(node, writes(node.target)) if isinstance(node.target, Operator) else []


def _at(node: fx.Node, places: Iterable[tuple[int, str]]) -> list[fx.Node]:
    """The inputs that are arguments of these numbers and names."""
    found = list[fx.Node]()
    given = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in places]
    fx.map_arg(given, lambda x: found.append(x) or x)
    return found
