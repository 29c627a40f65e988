"""Ways around torch.compile: one graph break, and what runs there is not looked into; or one operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from invfunc._torch.doors import door, entry, holder
from invfunc._torch.functorch import transforming
from invfunc.errors import InvFuncWarning

_core = door("torch._C")


def _call(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return fn(args, kwargs)


eagerly: Callable[..., Any] = torch.compiler.disable(_call)

BLOCK = (
    "an invertible block within torch.compile saves no memory: the compiler decides what is kept, and keeps the "
    "activations of all blocks. To save memory, put the blocks into a `chain` or `repeated`, which is one operation of "
    "the graph, whose backward pass inverts. Or exclude a block by "
    "torch.compiler.disable(invertible_checkpoint(f, f_inv)): a graph break, behind which the block runs uncompiled, "
    "and what is around it stays compiled."
)
CHAIN = (
    "a chain of invertible blocks {} saves no memory within torch.compile, which keeps the activations of all blocks. "
    "To save memory, exclude it by torch.compiler.disable(chain(...)): a graph break, behind which it runs uncompiled."
)
BROKEN = (
    "a chain of invertible blocks runs uncompiled, behind a graph break: torch.compile cannot look into its blocks, as "
    "they have effects in Python (a count, an append, a print) or break the graph themselves (TORCH_LOGS=graph_breaks "
    "tells where). It saves memory. torch.compiler.disable(chain(...)) says that this is meant."
)
FOUND = (
    "within torch.compile, a block of a chain whose inverse is found keeps its input, as its inverse is looked for by "
    "calls outside. To save that memory, give its f_inv, or take a coupling (`additive_coupling`)."
)


@cache
def _said(text: str) -> None:
    warnings.warn(text, InvFuncWarning, stacklevel=2)


def say_now(text: str) -> None:
    """Warns once."""
    _said(text)


say: Callable[[str], None] = torch.compiler.assume_constant_result(say_now)
"""Warns once, while a graph is made."""

transformed: Callable[[], bool] = torch.compiler.assume_constant_result(transforming)
"""True if a graph is made inside of torch.func, there where this is called."""

nonstrict: Callable[[Callable], Callable] = entry("torch._dynamo", "nonstrict_trace")
"""Of a function of trees, which is not looked into either: its operations are seen as it is called without numbers."""

constant: Callable[..., None] = entry("torch._library.opaque_object", "register_opaque_type")
"""Has graphs hold objects of a type (`typ="value"`) as constants."""

higher_order: Any = door("torch._higher_order_ops.wrap")
"""Its `wrap` calls a function, which torch.compile looks into: a graph of its own in the graph, with what it closes
over. Its `dynamo_bypassing_wrapper` calls `wrapper(fn)`: fn is looked into likewise, and the wrapper gets its graph."""


@cache
def _plain_keys() -> tuple[Any, ...]:
    """The keys of a new thread, where nothing is left out."""
    with ThreadPoolExecutor(1) as fresh:
        sets = _core._dispatch_tls_local_include_set, _core._dispatch_tls_local_exclude_set
        return tuple([fresh.submit(one).result() for one in sets])


def as_called() -> Any:
    """A context in which autograd sees what is done, also within an operation of a graph, that runs below it."""
    return _core._ForceDispatchKeyGuard(*_plain_keys())


@contextmanager
def not_compiling() -> Iterator[None]:
    """A context in which functions run as outside of torch.compile, which has them run to see what they give."""
    compiler = holder("torch.compiler", "_is_compiling_flag")
    before, compiler._is_compiling_flag = compiler._is_compiling_flag, False
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
