"""The graph of what was written down; of parts that do the same, as chunks do, a loop over the graph of one."""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from invfunc.plans.source import Source
from invfunc.plans.tape import Given, Item, Known, Loop, Out, Step, Tape, mapped

NUMBER = "number"
"""What inputs of a part are called that are no tensors."""


class Repeated:
    """The graph of a part, which is called with what differs from part to part."""

    def __init__(self, number: int, made: fx.GraphModule | Callable[..., Any], acts: bool) -> None:
        self.__name__, self.made, self.acts = f"part_{number}", made, acts
        self.call: Callable[..., Any] = made.forward if isinstance(made, fx.GraphModule) else made

    @property
    def module(self) -> fx.GraphModule:
        """As a graph of torch.fx, in such a one."""
        assert isinstance(self.made, fx.GraphModule)
        return self.made

    @property
    def nodes(self) -> list[fx.Node]:
        """Its operations."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


class Passes:
    """Calls a part for one row of columns after the other; what all rows have in common is no list."""

    def __init__(self, part: Repeated, count: int, carried: list[tuple[int, int]], outs: list[tuple[int, int]]) -> None:
        """`carried` is which input of a pass is which result of the one before; `outs` of which passes which results
        are given."""
        self.__name__, self.part, self.count, self.carried = f"passes_of_{part.__name__}", part, count, carried
        self.found = defaultdict[int, list[tuple[int, int]]](list)
        for k, (row, place) in enumerate(outs):
            self.found[row].append((k, place))
        self.room = len(outs)

    def __call__(self, *columns: Any) -> list[Any]:
        return self.by(self.part.call, *columns)

    def by(self, call: Callable[..., Any], *columns: Any) -> list[Any]:
        """The results where something else runs the part."""
        given, differ = [*columns], [i for i, column in enumerate(columns) if isinstance(column, list)]
        found: list[Any] = [None] * self.room
        for row in range(self.count):
            for i in differ:
                given[i] = columns[i][row]
            results = call(*given)
            for i, place in self.carried:
                given[i] = results[place]
            for k, place in self.found.get(row, ()):
                found[k] = results[place]
        return found


@dataclass(eq=False)
class Body:
    """The operations of a call, or of a part, of which those are written that are needed."""

    steps: list[Step]
    wanted: dict[Any, None] = field(default_factory=dict)
    """The places in a part of what is needed outside of it."""
    needed: set[Item] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)
    """What is needed of what a part is given."""
    numbers: dict[int, Any] = field(default_factory=dict)
    """What of that is the same number in each."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Which input of its graph the rest is."""
    kinds: dict[int, bool] = field(default_factory=dict)
    """Whether that is a number."""
    calls: list[tuple[Body, Step]] = field(default_factory=list)
    """The loops over it."""
    made: Repeated | None = None

    def at(self, place: Any) -> Item:
        """What has a place in it."""
        return self.steps[place[0]].out(place[1]) if isinstance(place, tuple) else self.steps[place]

    @property
    def total(self) -> int:
        return sum(step.target.count for _, step in self.calls)


Found = Callable[[Any], Any]
"""From what was written down to what it is in a graph."""


class Writer:
    """Writes what is needed of a tape, as a graph of torch.fx or as a function in Python.

    `stands` tells what an item may be taken for, and `acts` which operations are needed for more than their results.
    """

    def __init__(
        self, tape: Tape, stands: Callable[[Any], Any], acts: Callable[[Any], bool], by: Callable[[], fx.Graph | Source]
    ) -> None:
        self.tape, self.stands, self.acts, self.by = tape, stands, acts, by
        self.root = Body(tape.root.steps)
        self.parts = {known: Body(known.steps) for known in reversed(tape.known.values())}
        self.bodies = [self.root, *self.parts.values()]  # outer ones first
        self.inlined, self.active = False, dict[Known, bool]()

    def written(self, results: list[Item], graph: fx.Graph | Source) -> list[Any]:
        """Write all that some results need; what they are there."""
        self.root.needed.update(results)
        before = -1
        while before != (now := sum(len(body.wanted) + len(body.taken) for body in self.bodies)):
            before = now
            for body in self.bodies:
                self._need(body)
        for body in self.bodies:
            if body is not self.root and not body.calls:
                continue
            self._place(body)
            for step in body.steps:
                if step in body.needed and isinstance(step.target, Loop):
                    self.parts[step.target.known].calls.append((body, step))
        inputs: dict[Any, Any] = {}
        for step in self.tape.inputs:
            inputs[step] = graph.placeholder(step.args)
        found = self._write(graph, self.root, {}, inputs)
        return [*map(found, results)]

    def _active(self, known: Known) -> bool:
        """Whether a part does something beside giving results."""
        if known not in self.active:
            loops = [step.target for step in known.steps if isinstance(step.target, Loop)]
            own = any(self.acts(step) for step in known.steps if not isinstance(step.target, Loop))
            self.active[known] = own or any(self._active(loop.known) for loop in loops)
        return self.active[known]

    def _need(self, body: Body) -> None:
        """Mark what is needed."""

        def mark(x: Any) -> Any:
            if isinstance(x, Item):
                x = self.stands(x)
                body.taken.add(x.number) if isinstance(x, Given) else body.needed.add(x)
            return x

        body.needed.update(map(body.at, body.wanted))
        for step in reversed(body.steps):
            if isinstance(step.target, Loop):
                loop, part = step.target, self.parts[step.target.known]
                outs = [out for out in (step.outs or {}).values() if out in body.needed]
                if not outs and not self._active(loop.known):
                    continue
                part.wanted.update(dict.fromkeys(out.at[1] for out in outs))
                part.wanted.update(dict.fromkeys(place for i, place in loop.carried.items() if i in part.taken))
                mapped(mark, [step.args[i] for i in part.taken])
            elif step in body.needed or self.acts(step):
                mapped(mark, [step.args, step.kwargs])
            else:
                continue
            body.needed.add(step)

    def _place(self, body: Body) -> None:
        """Find out which of what a part is given are the same, in all loops over it."""
        known = dict[Any, int]()

        def identity(of: Body, x: Any) -> Any:
            x = of.numbers.get(x.number, x) if isinstance(x, Given) else x
            return self.stands(x) if isinstance(x, Item) else repr(x)

        for i in sorted(body.taken):
            columns = [(of, step.args[i], step.target.carried.get(i)) for of, step in body.calls]
            each = [
                (tuple(identity(of, x) for x in column) if type(column) is list else identity(of, column), carried)
                for of, column, carried in columns
            ]
            of, first, _ = columns[0]
            first = first[0] if type(first) is list else first
            first = of.numbers.get(first.number, first) if isinstance(first, Given) else first
            body.kinds[i] = of.kinds[first.number] if isinstance(first, Given) else not isinstance(first, Item)
            if body.kinds[i] and len({*each}) == 1 and type(each[0][0]) is str:
                body.numbers[i] = first
            else:
                body.inputs[i] = known.setdefault(tuple(each), len(known))

    def _write(self, graph: fx.Graph | Source, body: Body, given: dict[int, Any], own: dict[Any, Any]) -> Found:
        """Write the operations of a body, with what it is given."""
        rows = dict[Step, list[Found]]()

        def found(x: Any) -> Any:
            if isinstance(x, Given):
                return body.numbers[x.number] if x.number in body.numbers else given[x.number]
            if x not in own:
                row, place = x.at
                own[x] = rows[x.call][row](self.parts[x.call.target.known].at(place))
            return own[x]

        def leaf(x: Any) -> Any:
            return found(self.stands(x)) if isinstance(x, Item) else x

        for step in body.steps:
            if step not in body.needed:
                continue
            if not isinstance(step.target, Loop):
                own[step] = graph.call_function(step.target, mapped(leaf, step.args), mapped(leaf, step.kwargs))
                continue
            part = self.parts[step.target.known]
            if part.total < self.tape.fewest:
                rows[step] = self._each(graph, step, part, leaf)
                continue
            outs = [out for out in (step.outs or {}).values() if out in body.needed]
            loop = self._loop(graph, step, part, leaf, outs)
            for k, out in enumerate(outs):  # at once, so that each is given free by itself
                own[out] = graph.call_function(operator.getitem, (loop, k))
        return found

    def _each(self, graph: fx.Graph | Source, step: Step, part: Body, leaf: Found) -> list[Found]:
        """Write the passes of a loop one after the other."""
        loop, found, self.inlined = step.target, list[Found](), True
        for row in range(loop.count):
            given = dict[int, Any]()
            for i in part.taken - part.numbers.keys():
                column = step.args[i]
                if row and i in loop.carried:
                    given[i] = found[-1](part.at(loop.carried[i]))
                else:
                    given[i] = leaf(column[row] if type(column) is list else column)
            found.append(self._write(graph, part, given, {}))
        return found

    def _loop(self, graph: fx.Graph | Source, step: Step, part: Body, leaf: Found, outs: list[Out]) -> Any:
        """Write a loop."""
        loop, places = step.target, [*part.wanted]
        if part.made is None:
            part.made = Repeated(loop.known.number, self._made(part), self._active(loop.known))
        one = {k: i for i, k in part.inputs.items()}
        columns = tuple(mapped(leaf, step.args[one[k]]) for k in range(len(one)))
        carried = [(k, places.index(loop.carried[i])) for k, i in one.items() if i in loop.carried and loop.count > 1]
        found = [(out.at[0], places.index(out.at[1])) for out in outs]
        return graph.call_function(Passes(part.made, loop.count, carried, found), columns)

    def _made(self, part: Body) -> fx.GraphModule | Callable[..., Any]:
        """The operations of a part."""
        graph, nodes = self.by(), dict[int, Any]()
        for i, k in part.inputs.items():
            if k not in nodes:
                nodes[k] = graph.placeholder(f"{NUMBER if part.kinds[i] else 'given'}_{k}")
        found = self._write(graph, part, {i: nodes[k] for i, k in part.inputs.items()}, {})
        graph.output([found(part.at(place)) for place in part.wanted])
        return made(graph, self.acts, self.inlined)


def made(graph: fx.Graph | Source, acts: Callable[[Any], bool], spare: bool) -> fx.GraphModule | Callable[..., Any]:
    """What runs a graph, which may have operations to `spare`."""
    if isinstance(graph, Source):
        return graph.function()
    if spare:
        graph.eliminate_dead_code(acts)
    return fx.GraphModule(torch.nn.Module(), graph)


def every(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, and those of the parts that it calls."""
    yield from graph.nodes
    for part in repeats(graph):
        yield from part.module.graph.nodes


def repeats(graph: fx.Graph) -> Counter[Repeated]:
    """The parts that a graph calls, and those that these call, and how often."""
    found = Counter[Repeated]()
    for node in graph.nodes:
        if isinstance(node.target, Passes):
            found[node.target.part] += node.target.count
    for part, count in list(found.items()):
        for inner, times in repeats(part.module.graph).items():
            found[inner] += count * times
    return found
