"""What runs a plan, and whether that is faster than the call itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, cast

import torch
from torch import fx

from invfunc import thresholds
from invfunc.plans.cudagraphs import Graphed
from invfunc.plans.memory import memory_of, part_of, written
from invfunc.plans.parts import NUMBER, repeats
from invfunc.plans.plan import Plan
from invfunc.plans.recorder import same_shape

BACKENDS = ("replay", "inductor", "cudagraphs", "auto")


@dataclass(frozen=True)
class Backend:
    """One by its name."""

    name: str

    def refuses(self, plan: Plan) -> str:
        """Why it does not run a plan; empty if it does."""
        if self.name == "inductor" and plan.drew:
            return "random numbers of `inductor` are others than those of torch"
        if self.name == "inductor" and any(node.target is same_shape for node in plan.module.graph.nodes):
            return "`inductor` takes no shapes that depend on numbers"
        return ""

    def of(self, plan: Plan) -> Backend:
        """What runs graphs of a plan: itself, or `replay` where it refuses them."""
        return Backend(BACKENDS[0]) if self.refuses(plan) else self

    def prepare(self, plan: Plan, say: Callable[[str], None]) -> None:
        """Have it run a plan from now on."""
        if self.name in ("inductor", "cudagraphs"):
            plan.call = self.runs(plan.module, say)

    def runs(self, module: fx.GraphModule, say: Callable[[str], None]) -> Callable[..., Any]:
        """What runs a graph."""
        if self.name == "cudagraphs":
            return Graphed(module, say)
        if self.name != "inductor":
            return module.forward
        parts = repeats(module.graph)
        for part in parts:
            part.call = without_numbers(part.module, lambda own: self.runs(own, say))
        return module.forward if parts else Inductor(module.forward, _by_compiler(module), say)


def _by_compiler(module: fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True, dynamic=False)


def without_numbers(module: fx.GraphModule, runs: Callable[[fx.GraphModule], Callable]) -> Callable[..., Any]:
    """What calls a part by what runs a graph, which is made for certain numbers: operations that take some come before
    it, one by one; all of them, if what they give is written in place."""
    *nodes, output = module.graph.nodes
    given = [node for node in nodes if node.op == "placeholder"]
    tensors = [i for i, node in enumerate(given) if not _number(node)]
    before = _before(nodes)
    memory = memory_of(nodes)
    if {memory[x] for node in nodes for x in written(node)} & {memory[x] for x in before}:
        return module.forward
    called, results = [node for node in nodes if node not in before and node not in given], cast(Any, output.args[0])
    kept = [*dict.fromkeys(x for node in (*called, output) for x in node.all_input_nodes if x in before)]
    first = part_of(given, [node for node in nodes if node in before], kept)
    then = runs(part_of([*(given[i] for i in tensors), *kept], called, results))

    def call(*args: Any) -> Any:
        return then(*(args[i] for i in tensors), *first.forward(*args))

    return call


def _number(node: fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith(NUMBER)


def _before(nodes: list[fx.Node]) -> set[fx.Node]:
    """The operations that take numbers, and those on whose results they depend."""
    found = set[fx.Node]()
    for node in reversed(nodes):
        if node.op != "placeholder" and (found & {*node.users} or any(map(_number, node.all_input_nodes))):
            found.add(node)
    return found


@dataclass
class Inductor:
    """A compiled graph, or where the compiler fails, the graph."""

    plainly: Callable[..., Any]
    compiled: Callable[..., Any]
    say: Callable[[str], None]
    works: bool | None = None

    def __call__(self, *given: Any) -> Any:
        if self.works is False:
            return self.plainly(*given)
        try:
            found = self.compiled(*given)
        except Exception as error:
            if self.works:
                raise
            self.works = False
            self.say(f"it runs by `replay`: `inductor` fails ({str(error).strip().splitlines()[0]}).")
            return self.plainly(*given)
        self.works = True
        return found


_FINE = time.get_clock_info("thread_time").resolution <= time.get_clock_info("perf_counter").resolution
_CLOCK = time.thread_time if _FINE else time.perf_counter
"""That of a CPU: without what other programs do meanwhile, where it is no coarser."""


@dataclass
class Choice:
    """Whether plans are faster than calls themselves: the first ones of both kinds are timed in turn."""

    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    """Of the calls themselves, and of those by the plan."""

    @property
    def by_plan(self) -> bool:
        """Whether the next call is by the plan."""
        eager, planned = self.times
        if min(len(eager), len(planned)) < thresholds.TIMED:
            return len(planned) <= len(eager)
        return median(planned) <= median(eager)

    def timed(self, call: Callable[[], Any], given: list[torch.Tensor]) -> Any:
        """The result of a call of the kind that is next."""
        times = self.times[self.by_plan]
        if len(times) >= thresholds.TIMED:
            return call()
        devices = {x.device for x in given if x.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)
        clock = time.perf_counter if devices else _CLOCK
        start = clock()
        result = call()
        for device in devices:
            torch.cuda.synchronize(device)
        times.append(clock() - start)
        return result
