"""Peaks of memory: on CUDA as the allocator tells them, elsewhere of the tensors that are alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage

_COPIES = ("conv", "slow_conv", "mkldnn", "linalg")
"""Beginnings of the names of operations whose kernels work on copies of what they read and write."""


class Alive(TorchDispatchMode):
    """A count of the bytes of tensors that were made meanwhile, and of the most of them that were alive at once.

    It only `counts`, and `watches` where other modes are switched off: calls run under it as they do without it.
    """

    counts = watches = True

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree.tensors((args, kwargs or {}))
        self._see(given, new=False)
        result = func(*args, **(kwargs or {}))
        made = tree.tensors((result,))
        self._see(made, new=True)
        copies = func.overloadpacket.__name__.lstrip("_").startswith(_COPIES)
        self.most = max(self.most, self.now + copies * sum(x.nbytes for x in (*given, *made)))
        return result

    def _see(self, tensors: Iterable[torch.Tensor], new: bool) -> None:
        for x in tensors:
            memory = storage(x)
            key = id(memory)  # one object as long as there is the memory
            if key not in self._known:
                size = memory.nbytes() if new else 0
                self.now += size
                self._known[key] = weakref.ref(memory, lambda _, key=key, size=size: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.now -= size


def peak_of(call: Callable[[], Any], device: torch.device) -> int:
    """The bytes that a call takes over what is in use before it, its result included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with Alive() as alive:
        result = call()
        del result
    return alive.most


def settings() -> tuple:
    """State of torch on which a call depends: gradient modes, autocast, kernels."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    return *modes, *autocast, torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
