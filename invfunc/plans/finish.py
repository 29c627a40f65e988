"""From a call that was written down to its plan: what is not needed is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.functorch import storage_of
from invfunc.plans.draws import draws, put_back
from invfunc.plans.facts import Operator
from invfunc.plans.key import kept, signature
from invfunc.plans.parts import Passes, Writer, made
from invfunc.plans.plan import Plan, grouped
from invfunc.plans.recorder import Recorder, same_shape
from invfunc.plans.source import Source
from invfunc.plans.tape import Item, Step, outward

_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, type(...))


def plan_of(recorder: Recorder, given: list[torch.Tensor], result: Any) -> Plan | None:
    """The plan of a call that was written down; None if there is none, for a reason that the recorder says."""
    recorder.tape.spill()
    tensors, form = tree.separate(result)
    if why := _not_returned(tensors, form) or kept(form.structure):
        recorder.refuse(why)
    recorder.drawn.finish()
    results = [] if recorder.why else [recorder.input(x) for x in tensors]
    memory, closed = {*map(storage_of, given)}, _alive(recorder.closed)
    if any(storage_of(x) in memory for _, x in closed):
        recorder.refuse("an argument shares memory with what is closed over")
    if recorder.drawn.why:
        recorder.refuse(recorder.drawn.why)
    if recorder.why:
        return None
    groups = grouped(recorder.guards)
    read = [outward(guard.item(recorder.written)) for group in groups for guard in group]
    stands = _Stands(_known(recorder, {*map(storage_of, tensors)}), recorder.constant, recorder.turns)
    tape = recorder.tape

    def write(by: Callable[[], fx.Graph | Source]) -> fx.GraphModule | Callable[..., Any]:
        graph, writer = by(), Writer(tape, stands, acts, by)
        found = iter(writer.written([*results, *read], graph))
        nodes = [next(found) for _ in results]
        graph.output((nodes, [_joined(graph, [next(found) for _ in group]) for group in groups]))
        return made(graph, acts, writer.inlined)

    call = write(partial(Source, acts))
    stands.settle()
    expected = [repr([v for guard in group for v in guard.value.reshape(-1).tolist()]) for group in groups]
    closed_over = [(held, signature(x)) for held, x in closed]
    inference = any(x.is_inference() for x in tensors)
    what = form, recorder.sources, closed_over, recorder.guards, expected, recorder.drawn.drew, inference
    return Plan(call, partial(write, fx.Graph), *what)


def _alive(closed: list[ref[torch.Tensor]]) -> list[tuple[ref[torch.Tensor], torch.Tensor]]:
    return [(held, x) for held in closed if (x := held()) is not None]


def _not_returned(tensors: list[torch.Tensor], form: tree.Form) -> str:
    """Why a result cannot be made again; empty if it can."""
    if other := next((type(x) for x in tensors if type(x) not in (torch.Tensor, torch.nn.Parameter)), None):
        return f"the result has a {other.__name__} in it"
    if any(x.requires_grad for x in tensors):
        return "the result is differentiable; call it on detached parameters, or under torch.no_grad()"
    odd = [x for i, x in enumerate(form.others) if i not in form.places and not isinstance(x, _PLAIN)]
    return f"the result has an object of type {type(odd[0]).__name__} in it" if odd else ""


def _joined(graph: fx.Graph | Source, nodes: Iterable[Any]) -> Any:
    flat: list[Any] = [graph.call_function(_ATEN.reshape.default, (node, [-1])) for node in nodes]
    return graph.call_function(_ATEN.cat.default, (flat,)) if len(flat) > 1 else flat[0]


def _known(recorder: Recorder, returned: set[int]) -> dict[Item, torch.Tensor]:
    """What depends on no argument, where nobody writes it or gets it."""
    return {item: x for item, x in recorder.values.items() if not recorder.written(x) and storage_of(x) not in returned}


class _Stands:
    """What an item may be taken for: what is known is a constant, and some operations give what they are given."""

    def __init__(self, known: dict[Item, torch.Tensor], constant: Callable[[torch.Tensor], Item], turns: bool) -> None:
        self.known: dict[Item, torch.Tensor | Item | None] = {**known}
        self.constant, self.turns = constant, turns

    def __call__(self, x: Item) -> Item:
        while isinstance(x, Step) and x.target in _SAME and not self.turns and x not in self.known:
            x = x.args[0]
        found = self.known.get(x)
        if isinstance(found, torch.Tensor):
            found = self.known[x] = self.constant(found.detach())
        return found or x

    def settle(self) -> None:
        """Keep no more than what was needed."""
        self.known = {x: found if isinstance(found, Item) else None for x, found in self.known.items()}
        del self.constant


def acts(node: fx.Node | Step) -> bool:
    """Whether an operation does something beside giving a result."""
    target: Any = node.target
    if isinstance(target, Passes):
        return target.part.acts
    if isinstance(node, fx.Node) and node.op != "call_function" or target in (put_back, same_shape):
        return True
    if not isinstance(target, Operator):
        return False
    return target._schema.is_mutable or not target._schema.returns or draws(target, node.args, node.kwargs)
