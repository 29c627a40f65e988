"""The result of a block, by hooks or of a node, whose further arguments are also the tensors that f closes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from invfunc._torch.functorch import dual, under
from invfunc._torch.opened import raised_in
from invfunc.errors import ClosedOverError, InvFuncError
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.function import noded
from invfunc.recomputation.hooks import hooked
from invfunc.recomputation.watch import Watch

_CLOSES_OVER = "closes over tensors that need a gradient"
_DROPPING = "Call the module that holds the block by `functional(module)`, which drops what is written. "


Found = tuple[Any, Tensors, Call, Tensors]
"""The result and its tensors, the call that gave it and its further arguments."""


def hooking(call: Call, made: Callable[..., Call], xs: Tensors, rest: Tensors) -> Found | None:
    """What hooks give, or a node if f uses torch.func, which refuses them."""
    try:
        return *hooked(call, xs, rest), call, rest
    except RuntimeError as error:
        if not raised_in(disable_saved_tensors_hooks, error):  # a transform of torch.func did
            raise
        call.take_back("uses torch.func")
        found = closing_over(made(), made, xs, rest)
        call.report.known.needs_a_node = True
        return found


def closing_over(call: Call, made: Callable[..., Call], xs: Tensors, rest: Tensors) -> Found | None:
    """What a node gives; None if f has to be taken as it is.

    Args:
        call: the call, if f closes over nothing that needs a gradient.
        made: makes another one.
        xs: the tensors of x.
        rest: the further arguments.
    """
    known, torch_refused = call.report.known, None
    if not known.closes_over:
        try:
            return *noded(call, xs, rest), call, rest
        except ClosedOverError:
            call.take_back(_CLOSES_OVER, _DROPPING)
        except RuntimeError as error:  # may be torch's, of a transform that f gives a tensor of one around us
            if isinstance(error, InvFuncError) or call.watch is None or call.watch.wrote():
                raise
            call.take_back(_CLOSES_OVER)
            torch_refused = error
    closure = made().closure(xs, rest)
    if closure.wrapped is not None:
        call.report.as_it_is(closure.wrapped)
        return None
    if torch_refused is not None:
        raise torch_refused
    known.closes_over = bool(closure.tensors or closure.constants)
    call, rest = made(closure=closure), [*rest, *closure.arguments()]
    return *noded(call, xs, rest), call, rest


def keeps_a_graph(kinds: set[str], tensors: Tensors) -> bool:
    """Whether there is memory to save: somebody may go backwards, and nobody goes forwards."""
    if not torch.is_grad_enabled() or kinds - {"grad", "vmap"} or dual(*tensors):
        return False
    if under(Watch, lambda watch: watch.closed):  # a node, which we are in, has a graph, and none of our own
        return False
    if not kinds:
        return not torch.is_inference_mode_enabled()  # in which enable_grad makes no graph
    return "grad" in kinds or any(t.requires_grad for t in tensors)
