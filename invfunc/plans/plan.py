"""A plan: the graph of a call, what it holds, what has to be as it was, and what runs it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.generators import set_states, state_of
from invfunc.plans.recorder import Missed, same_shape

BACKENDS = ("replay", "inductor", "cudagraphs")


def signature(x: torch.Tensor) -> Hashable:
    """All that operations know of a tensor without its numbers."""
    own = type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad
    return *own, x.is_inference(), x.is_conj(), x.is_neg()


@dataclass
class RecordedPlan:
    """The operations of a call, which run again with other numbers."""

    module: fx.GraphModule
    form: tree.Form
    """The form of the result."""
    sources: list[Callable[[], Any]]
    """The sources of its inputs behind the arguments."""
    closed: list[tuple[ref[torch.Tensor], Hashable]]
    """The tensors that it reads beside the arguments, with what was known of them."""
    guards: list[tuple[torch.Tensor, str]]
    """The numbers that were read, and where."""
    modules: list[torch.nn.Module]
    """The modules that run, whose modes are compared."""
    drew: list[torch.Generator]
    """The generators from which it draws, beside those that are given."""
    draws: bool
    inference: bool
    """True if its results are tensors of inference mode."""
    call: Callable[..., Any] = field(init=False)
    """The function that runs the graph."""

    def __post_init__(self) -> None:
        self.call, self.training = direct(self.module), [m.training for m in self.modules]
        self.groups: dict[torch.dtype, list[int]] = defaultdict(list)
        for i, (x, _) in enumerate(self.guards):
            self.groups[x.dtype].append(i)
        self.expected = self._numbers([x for x, _ in self.guards])

    def run(self, tensors: list[torch.Tensor], generators: list[torch.Generator]) -> Any:
        """The result for other arguments of the same key. An error, as `Missed` if something is not as it was, leaves
        the generators as they were."""
        before = [(g, state_of(g)) for g in (*self.drew, *generators)]
        try:
            given = [*tensors, *generators, *[source() for source in self.sources]]
            for known, own in self.closed:
                if (x := known()) is None or signature(x) != own:
                    raise Missed("a tensor that it closes over")
            if [m.training for m in self.modules] != self.training:
                raise Missed("the mode of a module")
            with computed(self.inference):
                results, read = self.call(*given)
                if read and self._numbers(read) != self.expected:
                    raise Missed(f"numbers that are read (at {', '.join(dict.fromkeys(at for _, at in self.guards))})")
        except Exception:
            set_states(before)
            raise
        return self.form.join(results)

    def _numbers(self, read: list[torch.Tensor]) -> list[str]:
        """Numbers that were read, as text, in which NaN is equal to itself, and -0 is not 0."""
        groups = [[read[i].reshape(-1) for i in places] for places in self.groups.values()]
        return [repr((torch.cat(xs) if len(xs) > 1 else xs[0]).tolist()) for xs in groups]

    @property
    def operations(self) -> int:
        """The number of its operations."""
        return sum(node.op == "call_function" for node in self.module.graph.nodes) - self.sized

    @property
    def sized(self) -> int:
        """The number of shapes in it that depend on numbers."""
        return len(self.module.graph.find_nodes(op="call_function", target=same_shape))

    def told(self) -> str:
        """A description in words."""
        sites = ", ".join(dict.fromkeys(at for _, at in self.guards))
        said = f"a plan of {self.operations} operations"
        said += f" that compares {len(self.guards)} numbers, read at {sites}" if self.guards else ""
        return said + (f"; {self.sized} shapes depend on numbers" if self.sized else "")

    def run_by(self, backend: str, say: Callable[[str], None]) -> None:
        """Have a backend run it from now on, or say why it does not."""
        if self.draws:
            say(f"it runs by `replay`: random numbers of `{backend}` are others than those of torch.")
        elif self.sized:
            say(f"it runs by `replay`: `{backend}` takes no shapes that depend on numbers.")
        else:
            self.call = ByCompiler(self.module, backend, say)


def direct(module: fx.GraphModule) -> Callable[..., Any]:
    """The function of a graph, which calls operations as C has them: less than what they do in Python, in half the
    time."""
    code = module.graph.python_code("self")
    world = dict(code.globals)

    def known(found: re.Match) -> str:
        name = found[1].replace(".", "_")
        world[name] = attrgetter(found[1])(torch.ops)._op
        return f"{name}("

    exec(re.sub(r"torch\.ops\.([\w.]+)\(", known, code.src), world)
    return partial(world["forward"], module)


def computed(inference: bool) -> AbstractContextManager:
    """A context in which operations run as they were written down: below autograd and autocast."""
    casts = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not casts and torch.is_inference_mode_enabled() == inference:
        return torch.no_grad()
    stack = ExitStack()
    for mode in (torch.inference_mode(inference), torch.no_grad(), *(torch.autocast(k, enabled=False) for k in casts)):
        stack.enter_context(mode)
    return stack


class ByCompiler:
    """A graph as torch.compile runs it, or where that fails, as it is."""

    def __init__(self, module: fx.GraphModule, backend: str, say: Callable[[str], None]) -> None:
        self.plainly, self.backend, self.say, self.works = module.forward, backend, say, False
        self.call: Callable[..., Any] = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)

    def __call__(self, *given: Any) -> Any:
        try:
            found = self.call(*given)
            self.works = True
        except Exception as error:
            if self.works:
                raise
            self.call = self.plainly
            self.say(f"it runs by `replay`: `{self.backend}` fails ({str(error).strip().splitlines()[0]}).")
            found = self.plainly(*given)
        return (
            tree.map_tensors(torch.clone, found) if self.backend == "cudagraphs" else found
        )  # overwritten by the next
