"""From a call that was written down to its plan: what is not needed is left out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.functorch import storage, storage_of
from invfunc.plans.draws import draws, put_back
from invfunc.plans.key import kept, signature
from invfunc.plans.parts import Repeated, Step, every
from invfunc.plans.plan import Plan, grouped
from invfunc.plans.recorder import Operator, Recorder, same_shape

_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...))


def plan_of(recorder: Recorder, given: list[torch.Tensor], result: Any) -> Plan | None:
    """The plan of a call that was written down; None if there is none, for a reason that the recorder says."""
    recorder.parts.spill()
    tensors, form = tree.separate(result)
    if why := _not_returned(tensors, form) or kept(form.structure):
        recorder.refuse(why)
    recorder.drawn.finish()
    nodes = [] if recorder.why else [recorder.input(x) for x in tensors]
    memory, closed = {*map(storage_of, given)}, _alive(recorder.closed)
    if any(storage_of(x) in memory for _, x in closed):
        recorder.refuse("an argument shares memory with what is closed over")
    if recorder.drawn.why:
        recorder.refuse(recorder.drawn.why)
    if recorder.why:
        return None
    expected = _read(recorder, nodes)
    _fold(recorder, {*map(storage_of, tensors)})
    turns = any(torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in every(recorder.graph))
    recorder.parts.finish(partial(_tidy, aliases=turns), recorder.constant)
    known = [(held, signature(x)) for held, x in closed]
    module, inference = fx.GraphModule(torch.nn.Module(), recorder.graph), any(x.is_inference() for x in tensors)
    return Plan(module, form, recorder.sources, known, recorder.guards, expected, recorder.drawn.drew, inference)


def _alive(closed: list[ref[torch.Tensor]]) -> list[tuple[ref[torch.Tensor], torch.Tensor]]:
    return [(held, x) for held in closed if (x := held()) is not None]


def _read(recorder: Recorder, results: list[fx.Node]) -> list[str]:
    """Have the graph give its results and the numbers of its guards; returns what those have been."""
    for guard in recorder.guards:
        if guard.of is not None and not recorder.written.get(storage(guard.of)):  # the copy was not needed
            original: Any = guard.node.args[0]
            guard.node.replace_all_uses_with(original)
            guard.node = original
        guard.of = None
    groups = grouped(recorder.guards)
    recorder.graph.output((results, [_joined(recorder.graph, [guard.node for guard in group]) for group in groups]))
    return [repr([v for guard in group for v in guard.value.reshape(-1).tolist()]) for group in groups]


def _not_returned(tensors: list[torch.Tensor], form: tree.Form) -> str:
    """Why a result cannot be made again; empty if it can."""
    if other := next((type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)), None):
        return f"the result has a {other.__name__} in it"
    if any(x.requires_grad for x in tensors):
        return "the result is differentiable; call it on detached parameters, or under torch.no_grad()"
    odd = [x for i, x in enumerate(form.others) if i not in form.places and not isinstance(x, _PLAIN)]
    return f"the result has an object of type {type(odd[0]).__name__} in it" if odd else ""


def _joined(graph: fx.Graph, nodes: Iterable[fx.Node]) -> fx.Node:
    flat = [graph.call_function(_ATEN.reshape.default, (node, [-1])) for node in nodes]
    return graph.call_function(_ATEN.cat.default, (flat,)) if len(flat) > 1 else flat[0]


def _fold(recorder: Recorder, returned: set[int]) -> None:
    """Keep what depends on no argument, where nobody writes it or gets it."""
    known = dict[fx.Node, torch.Tensor]()
    for at, x in recorder.values.items():
        if recorder.written.get(storage(x)) or storage_of(x) in returned:
            continue
        if isinstance(at, Step):
            at.part.values[at.place] = x
        node = at.node if isinstance(at, Step) else at
        if node is not None:
            known[node] = x
    for node, x in known.items():
        if any(user not in known for user in node.users):
            node.replace_all_uses_with(recorder.constant(x.detach()))


def _tidy(graph: fx.Graph, aliases: bool) -> None:
    """Leave out what is not needed; operations that give what they are given, too, except for results and where
    `aliases` matter, as something is turned in place."""
    for node in [] if aliases else graph.nodes:
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
    graph.eliminate_dead_code(acts)


def acts(node: fx.Node) -> bool:
    """Whether an operation does something beside giving a result."""
    target: Any = node.target
    if isinstance(target, Repeated):
        return any(acts(own) for own in target.nodes)
    if isinstance(node, fx.Node) and node.op != "call_function" or target in (put_back, same_shape):
        return True
    if not isinstance(target, Operator):
        return False
    return target._schema.is_mutable or not target._schema.returns or draws(target, node.args, node.kwargs)
