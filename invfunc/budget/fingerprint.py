"""What a function does at its arguments, without its numbers: where that is the same, so is what a call takes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import count
from typing import Any
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage
from invfunc._torch.values import differentiable
from invfunc.budget.footprint import without_numbers


class _Followed(TorchDispatchMode):
    """Numbers what runs: each operation, of which tensors with which sizes, with which options."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0
        self._places: dict[int, tuple[ref[Any], int]] = {}
        self._next = count()

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [self.seen(x) for x in tree.leaves((args, kwargs or {}))]
        result = func(*args, **(kwargs or {}))
        made = [self.seen(x) for x in tree.leaves((result,))]
        self.found = hash((self.found, func, torch.is_grad_enabled(), *given, *made))
        return result

    def seen(self, x: Any) -> Hashable:
        """What the memory of a call depends on in one of its arguments."""
        if not isinstance(x, torch.Tensor):
            return x if isinstance(x, (int, float, bool, str, torch.dtype, torch.device, torch.layout)) else type(x)
        memory = storage(x)
        known = self._places.get(id(memory))
        if known is None or known[0]() is not memory:
            known = self._places[id(memory)] = ref(memory), next(self._next)
        steps = x.stride() if x.layout is torch.strided else ()
        return known[1], x.dtype, x.device, x.layout, tuple(x.shape), steps, x.requires_grad


def fingerprint(f: Callable[..., Any], args: tuple, kwargs: dict[str, Any], drawn: Iterable[Any]) -> Hashable | None:
    """What f and its gradient do at these arguments, operation by operation; None where that cannot be seen.

    So other closures, modes of modules and settings of torch count as far as they change what is done.
    """
    followed = _Followed()
    around = [followed.seen(x) for x in tree.tensors((args, kwargs))]
    try:
        with without_numbers((args, kwargs), drawn) as given, torch.enable_grad():
            given, named = tree.map_tensors(_wanting, given)
            with followed:
                results = [x for x in tree.tensors((f(*given, **named),)) if x.requires_grad]
                wanted = [x for x in tree.tensors((given, named)) if x.requires_grad]
                if results and wanted:
                    ones = [torch.ones_like(x) for x in results]
                    torch.autograd.grad(results, wanted, ones, allow_unused=True)
    except Exception:  # what is wrong is told by the call itself
        return None
    return followed.found, *around, *settings()


def _wanting(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if differentiable(x) else x.detach()


def settings() -> tuple:
    """What else a call depends on: whether its result is differentiated, and which kernels it takes."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return *modes, *autocast, torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
