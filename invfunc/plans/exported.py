"""Calls within `torch.export`: the operations of a plan become those of the program, its guards become assertions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.functorch import undispatched
from invfunc.errors import ArgumentError
from invfunc.plans.calls import Calls
from invfunc.plans.key import Described, described, matches
from invfunc.plans.parts import every
from invfunc.plans.plan import Plan, grouped
from invfunc.plans.recorder import Missed, same_shape

_ATEN = torch.ops.aten
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BY_STRIDES = {_ATEN.as_strided.default, _ATEN.as_strided_.default, _ATEN.as_strided_scatter.default}


class Program(torch.nn.Module):
    """The operations of a plan, with what it closes over and the numbers of its guards as buffers."""

    def __init__(self, plan: Plan, count: int, called: str) -> None:
        """Of so many arguments."""
        super().__init__()
        self.form, root, graph = plan.form, torch.nn.Module(), fx.Graph()
        own, sources = dict[fx.Node, fx.Node](), iter(plan.sources)

        def held(x: torch.Tensor) -> fx.Node:
            name, order = f"held_{len(root._buffers)}", sorted(range(x.dim()), key=lambda axis: -x.stride(axis))
            root.register_buffer(name, x.detach().permute(order).clone(memory_format=torch.contiguous_format))
            node, back = graph.get_attr(name), [order.index(axis) for axis in range(x.dim())]
            return node if order == sorted(order) else graph.call_function(_ATEN.permute.default, (node, back))

        *nodes, output = plan.module.graph.nodes
        inputs = [node for node in nodes if node.op == "placeholder"]
        for node in inputs[:count]:
            own[node] = graph.placeholder(node.name)
        for node in inputs[:count]:  # a derivative would not be that of the statistic
            own[node] = graph.call_function(_ATEN.detach.default, (own[node],))
        for node in inputs[count:]:
            own[node] = held(next(sources)())
        for node in nodes[len(inputs) :]:
            own[node] = graph.node_copy(node, own.__getitem__)
        results, read = fx.map_arg(output.args[0], own.__getitem__)
        for numbers, guards in zip(read, grouped(plan.guards), strict=True):
            known = torch.cat([guard.value.reshape(-1) for guard in guards])
            sites = ", ".join(dict.fromkeys(guard.site for guard in guards))
            said = f"{called}: numbers that it reads (at {sites}) are others than in the call that was exported"
            same = graph.call_function(_ATEN.eq.Tensor, (_bits(graph, numbers, known), held(_bits_of(known))))
            graph.call_function(_ATEN._assert_async.msg, (graph.call_function(_ATEN.all.default, (same,)), said))
        graph.output(results)
        self.operations = fx.GraphModule(root, graph)

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.form.join(self.operations(*tensors))


@torch.compiler.assume_constant_result
def _program(calls: Calls, given: Described) -> str:
    """Have the operations of such a call kept; as which attribute, where the compiler finds a module."""
    with undispatched():
        plan, why = _plan(calls, given)
        if plan is None:
            raise ArgumentError(f"{calls.called} within torch.export: {why}.")
        name = f"program_{id(plan)}"
        setattr(calls, name, Program(plan, len(given[1]), calls.called))
    return name


def exported(calls: Calls, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a call gives, as operations of the program that is written."""
    program = getattr(calls, _program(calls, described(args, kwargs)))
    return program(*tree.tensors((args, kwargs)))


def _plan(calls: Calls, given: Described) -> tuple[Plan | None, str]:
    """The newest plan of such calls; or why there is none for a program."""
    entry = next((e for key, e in reversed(calls.entries.items()) if matches(key, given)), None)
    if entry is None:
        return None, (
            "there is no plan of arguments of these shapes and strides. Call it once with such arguments before, of "
            "which none shares memory with another; the program has the operations of that call"
        )
    plan, watch = entry.plan, entry.watch
    if plan is None or watch is None:
        return None, f"such calls run eagerly: {entry.why or 'what it reads has changed'}"
    if plan.drew:
        return None, "it draws random numbers, and a program has no generator"
    targets = {node.target for node in every(plan.module.graph)}
    if same_shape in targets:
        return None, "shapes in it depend on numbers"
    if targets & _BY_STRIDES:
        return None, "it reads memory by strides (`as_strided`), which a program does not know of its arguments"
    what = watch.changed(exporting=True)
    try:
        plan.check_closed([])
    except Missed as miss:
        what = what or str(miss)
    what = what.strip(".")
    return (None, f"{what} is another one since the last such call. Call it once more") if what else (plan, "")


def _bits_of(x: torch.Tensor) -> torch.Tensor:
    """Numbers that are equal only where they are the same ones, as -0 and 0, or NaN and NaN."""
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.view(_BITS[x.element_size()]) if x.is_floating_point() else x


def _bits(graph: fx.Graph, node: fx.Node, like: torch.Tensor) -> fx.Node:
    """The same of a node."""
    node = graph.call_function(_ATEN.view_as_real.default, (node,)) if like.is_complex() else node
    bits = _bits_of(like).dtype
    return node if bits is like.dtype else graph.call_function(_ATEN.view.dtype, (node, bits))
