"""A plan as one CUDA graph: its kernels are launched at once, on memory that is always the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from invfunc import tree
from invfunc._torch.generators import same_state, set_states, state_of
from invfunc.plans.draws import default_generators
from invfunc.plans.facts import Operator
from invfunc.plans.parts import Passes
from invfunc.plans.recorder import same_shape

KIND = "cuda"
_COPIES = {"_to_copy", "copy_", "copy", "_copy_from"}
_CAPTURING = threading.RLock()  # what a thread does on the stream of captures would be part of another one's


@dataclass
class Capture:
    """What is launched, and the memory that it reads and writes."""

    replay: Callable[[], None]
    places: list[torch.Tensor | None]
    """Where the inputs are copied to; None of one that is always the same, or not read."""
    constant: list[torch.Tensor]
    found: Any
    """Its results, which the next launch overwrites."""
    order: Callable[[], Any]
    """Has the stream that is current wait for the call before; what it returns is called at the end."""

    def __call__(self, given: Iterable[Any]) -> Any:
        done = self.order()
        for place, x in zip(self.places, given, strict=True):
            if place is not None:
                each_once(place).copy_(each_once(x))
        self.replay()
        found = tree.map_tensors(copied, self.found)
        done()
        return found


@dataclass
class Graphed:
    """A graph that is captured in its first call, or where that cannot be, the graph as it is."""

    module: fx.GraphModule
    say: Callable[[str], None] | None
    captured: Capture | None = None
    lock: Any = field(default_factory=threading.RLock)

    def __call__(self, *given: Any) -> Any:
        if self.captured is None and self.say is None:
            return self.module.forward(*given)
        with self.lock, device_of(given):
            if within_capture():
                return self.module.forward(*given)
            if self.captured is None and self.say is not None:
                say, self.say = self.say, None  # which holds the plan: with it, memory would wait for the collector
                with _CAPTURING:
                    why = self._begin(given)
                if why:
                    say(f"it runs by `replay`: {why}.")
            return self.module.forward(*given) if self.captured is None else self.captured(given)

    def _begin(self, given: tuple) -> str:
        """Capture the graph; returns why it cannot be."""
        if why := unfit(self.module, given):
            return why
        before = [(g, state_of(g)) for g in default_generators()]
        try:
            constant, read = constants(self.module), [bool(n.users) for n in inputs(self.module)]
            moved = [used and not own for own, used in zip(constant, read, strict=True)]
            with aside_of(given):
                places = [copied(x) if moves else None for moves, x in zip(moved, given, strict=True)]
            fixed = [x if place is None else place for place, x in zip(places, given, strict=True)]
            if why := warmed(self.module, fixed):
                return why
            if not all(same_state(state_of(g), state) for g, state in before):
                return "a CUDA graph draws no random numbers"
            replay, found, order = capture(self.module.forward, fixed)
            own = [x for x, is_constant in zip(given, constant, strict=True) if is_constant]
            self.captured = Capture(replay, places, own, found, order)
        except Exception as error:
            return f"it cannot be captured as a CUDA graph ({first_line(error)})"
        finally:
            set_states(before)
        return ""


def first_line(error: Exception) -> str:
    """What an error says first."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def inputs(module: fx.GraphModule) -> list[fx.Node]:
    """Those of a graph."""
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def constants(module: fx.GraphModule) -> list[bool]:
    """Which inputs of a graph are always the same tensor, as the recorder has named them."""
    return [str(n.target).startswith("constant") for n in inputs(module)]


def unfit(module: fx.GraphModule, given: Iterable[Any]) -> str:
    """Why no CUDA graph can be made for such inputs; empty if one can."""
    if any(node.target is same_shape for node in module.graph.nodes):
        return "a CUDA graph takes no shapes that depend on numbers"
    given = list(given)
    if not all(isinstance(x, torch.Tensor) for x in given):
        return "a CUDA graph draws no random numbers"
    changing = [x for own, x in zip(constants(module), given, strict=True) if not own]
    devices = {x.device for x in changing}
    if len(devices) != 1 or next(iter(devices)).type != KIND:
        return f"a CUDA graph takes tensors of one CUDA device, not of {', '.join(sorted(map(str, devices))) or 'none'}"
    if any(x.is_conj() or x.is_neg() for x in changing):
        return "a CUDA graph takes no conjugated or negated views"
    return ""


def hands_over(target: Any, given: Iterable[torch.device], made: Iterable[torch.device]) -> bool:
    """Whether an operation copies from a device to the CPU, whose numbers a launch would not change."""
    copies = isinstance(target, Operator) and target.overloadpacket.__name__ in _COPIES
    return copies and any(d.type != "cpu" for d in given) and any(d.type == "cpu" for d in made)


class _Look(fx.Interpreter):
    """Runs a graph, and looks for what a launch could not do again."""

    why = ""

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, Passes):
            own = _Look(n.target.part.module)
            result = n.target.by(own.run, *self.fetch_args_kwargs_from_env(n)[0])
            self.why = self.why or own.why
            return result
        given = [x.device for x in tree.tensors((self.fetch_args_kwargs_from_env(n),))] if n.op != "output" else []
        result = super().run_node(n)
        if n.op == "call_function" and hands_over(n.target, given, [x.device for x in tree.tensors((result,))]):
            self.why = "a CUDA graph copies no numbers to the CPU"
        return result


def warmed(module: fx.GraphModule, fixed: list[Any]) -> str:
    """Run a graph before it is captured, on the stream of captures, where libraries get what they need; returns why it
    cannot be captured."""
    look = _Look(module)
    with aside_of(fixed):
        look.run(*fixed)
        if not look.why:
            module.forward(*fixed)
    return look.why


def capture(run: Callable[..., Any], fixed: list[Any]) -> tuple[Callable[[], None], Any, Callable[[], Any]]:
    """A CUDA graph of a function of tensors: how it is launched, its results, and the order of its calls."""
    device, before = next(x.device for x in fixed if x.device.type == KIND), torch.cuda.current_stream()
    graph, done, stream = torch.cuda.CUDAGraph(), torch.cuda.Event(), _stream(device)
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = run(*fixed)
    except Exception:
        torch.cuda.set_stream(before)  # which torch leaves as it was where a capture cannot end
        raise

    def order() -> Callable[[], None]:
        torch.cuda.current_stream().wait_event(done)
        return finish

    def finish() -> None:
        done.record()
        with _CAPTURING:
            stream.wait_event(done)  # whose memory all of it is, given back while the last launch may still run

    return graph.replay, found, order


class aside_of:
    """On the stream of captures, between what was there before and what comes then."""

    def __init__(self, given: Iterable[Any]) -> None:
        device = next((x.device for x in given if isinstance(x, torch.Tensor) and x.device.type == "cuda"), None)
        self.stream = None if device is None else _stream(device)
        self.on: Any = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        self.on.__enter__()

    def __exit__(self, *error: object) -> None:
        self.on.__exit__(*error)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """That of all captures on a device: for each stream torch keeps memory for cuBLAS."""
    return torch.cuda.Stream(device)


def device_of(given: Iterable[Any]) -> Any:
    """Where the device of some inputs is current."""
    found = next((x.device for x in given if isinstance(x, torch.Tensor) and x.device.type == "cuda"), None)
    return nullcontext() if found is None else torch.cuda.device(found)


def within_capture() -> bool:
    """Whether somebody captures what we do."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def each_once(x: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that has each place in its memory once: without what is expanded, or where windows overlap,
    all from the first place to the last."""
    if x.numel() == 0:
        return x
    steps, span = sorted((s, n) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1 and s), 1
    overlap = False
    for step, n in steps:
        overlap = overlap or step < span
        span += (n - 1) * step
    return x.as_strided([span], [1]) if overlap else x.as_strided([n for _, n in steps], [s for s, _ in steps])


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, also where entries share a place in memory."""
    own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    each_once(own).copy_(each_once(x))
    return own
