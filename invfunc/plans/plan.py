"""A plan: the graph of a call, what it holds, and what has to be as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import ref

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.functorch import FakeTensorMode, storage_of
from invfunc._torch.generators import set_states, state_of
from invfunc.budget.peak import Alive
from invfunc.budget.size import told
from invfunc.plans.key import signature
from invfunc.plans.parts import Repeated, every, repeats
from invfunc.plans.recorder import Guard, Missed, same_shape


@dataclass
class Plan:
    """The operations of a call, which run again with other numbers."""

    call: Callable[..., Any]
    """What runs them."""
    write: Callable[[], Any]
    """Makes the graph of them."""
    form: tree.Form
    """That of the result."""
    sources: list[Callable[[], Any]]
    closed: list[tuple[ref[torch.Tensor], Any]]
    """What it reads that is closed over, with what was known of it."""
    guards: list[Guard]
    expected: list[str]
    """The numbers that were read, by their dtypes."""
    drew: list[torch.Generator]
    inference: bool
    """Whether its results are tensors of inference mode."""

    @cached_property
    def module(self) -> fx.GraphModule:
        """The graph, which is made where it is asked for."""
        return self.write()

    def told(self, tensors: list[torch.Tensor]) -> str:
        """What it is, in words."""
        sites = ", ".join(dict.fromkeys(guard.site for guard in self.guards))
        shapes = sum(node.target is same_shape for node in self.module.graph.nodes)
        said = f"a plan of {self.operations} operations"
        for part, count in self.repeats.items():
            said += f", of which one part of {len(part.nodes)} is called {count} times"
        said += f" that compares {len(self.guards)} numbers, read at {sites}" if self.guards else ""
        said += f"; {shapes} shapes depend on numbers" if shapes else ""
        return f"{said}; {told(self.peak(tensors))} at once"

    @property
    def code(self) -> str:
        """The operations, as Python."""
        parts = [part.module.code.strip().replace("forward", part.__name__, 1) for part in self.repeats]
        return "\n\n".join([*parts, self.module.code.strip()])

    @property
    def operations(self) -> int:
        """How many there are."""
        return sum(node.op == "call_function" for node in every(self.module.graph))

    @property
    def repeats(self) -> Counter[Repeated]:
        """What is called for each of some parts, and how often."""
        return repeats(self.module.graph)

    def peak(self, tensors: list[torch.Tensor]) -> int:
        """How many bytes are in use at once, beside the arguments and what is kept."""
        given = (*tensors, *(source() for source in self.sources))
        before, fake = [(g, state_of(g)) for g in self.drew], FakeTensorMode(allow_non_fake_inputs=True)
        with computed(self.inference), fake, Alive() as alive:
            self.module.forward(*tree.map_tensors(fake.from_tensor, given))
        set_states(before)
        return alive.most

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result for other arguments of the same key."""
        return self.form.join(self.checked(tensors, self.call))

    def checked(self, tensors: list[torch.Tensor], call: Callable[..., Any]) -> list[torch.Tensor]:
        """What a call of the inputs computes beside the numbers of the guards; an error, as `Missed` if something is
        not as it was, leaves the generators as they were."""
        before = [(g, state_of(g)) for g in self.drew]
        try:
            return self._checked(tensors, call)
        except Exception:
            set_states(before)
            raise

    def _checked(self, tensors: list[torch.Tensor], call: Callable[..., Any]) -> list[torch.Tensor]:
        given = [*tensors, *(source() for source in self.sources)]
        if self.closed:
            self.check_closed(tensors)
        with computed(self.inference):
            results, read = call(*given)
            for numbers, expected, guards in zip(read, self.expected, grouped(self.guards), strict=True):
                if repr(numbers.tolist()) != expected:
                    raise Missed(f"numbers that are read (at {', '.join(dict.fromkeys(g.site for g in guards))})")
        return results

    def check_closed(self, tensors: list[torch.Tensor]) -> None:
        """An error if what it closes over is not as it was, or in the memory of arguments."""
        memory = {*map(storage_of, tensors)}
        for held, known in self.closed:
            x = held()
            if x is None or signature(x) != known or storage_of(x) in memory:
                raise Missed("a tensor that it closes over")


class computed(ExitStack):
    """Where operations run as they were written down: below autograd and autocast."""

    def __init__(self, inference: bool) -> None:
        super().__init__()
        self.inference = inference

    def __enter__(self) -> computed:
        super().__enter__()
        if torch.is_inference_mode_enabled() != self.inference:
            self.enter_context(torch.inference_mode(self.inference))
        self.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.enter_context(torch.autocast(kind, enabled=False))
        return self


def grouped(guards: list[Guard]) -> list[list[Guard]]:
    """Guards whose numbers are read at once."""
    found: dict[Any, list[Guard]] = {}
    for guard in guards:
        found.setdefault((guard.value.dtype, guard.value.device), []).append(guard)
    return list(found.values())
