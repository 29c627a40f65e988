"""The operations that others are composed of, also where a block or a checkpoint is evaluated again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from invfunc._torch.functorch import checkpointing, saving_hooks
from invfunc._torch.opened import opened
from invfunc.core.marks import Node, Unsupported, named, replaced, tensors
from invfunc.core.tables import LIKE, POINTWISE, RULES
from invfunc.operations.operation import OPERATIONS
from invfunc.operations.second_derivatives import TwiceDifferentiable


class Unreplayed(Unsupported):
    """Raised where a checkpoint has to be evaluated again as it was followed."""


def composed(func: Any) -> Callable | None:
    """The operations that a function is composed of, if it is known in which, or written in Python."""
    entry = OPERATIONS.get(named(func).removeprefix("_VF.")) if not isinstance(func, type) else None
    if entry is not None and entry.composed is not None:
        return entry.composed
    func = getattr(func, "__wrapped__", func)
    return opened(func) if getattr(func, "__module__", "").startswith("torch.") else None


class Composed(TorchFunctionMode):
    """Runs operations in those in which a run follows them, for a block that is evaluated once more."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        inner = composed(func) if RULES.get(func) is None or func is torch.nn.functional.embedding_bag else None
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        read = [*tensors((args, kwargs))]
        params = [x for x in read if type(getattr(x, "_known", None)) is Node]
        if params and len(params) < len(read) and func in POINTWISE and func not in LIKE:
            shape = torch.broadcast_shapes(*[x.shape for x in read])
            wide = {id(x): x.expand(shape) for x in params}
            return func(*replaced(args, wide), **{k: replaced(x, wide) for k, x in kwargs.items()})
        out = func(*args, **kwargs)
        for x in tensors(out) if params and len(params) == len(read) else ():
            vars(x)["_known"] = vars(params[0])["_known"]
        return out


class Replays(TorchFunctionMode):
    """Lets torch.utils.checkpoint evaluate again in the operations in which a run follows f."""

    def __init__(self, twice: bool) -> None:
        """`twice` says that these are in a form that can be differentiated twice."""
        super().__init__()
        self.twice = twice

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        hooks = saving_hooks() if checkpointing() else None
        if hooks is None:
            return func(*args, **(kwargs or {}))
        pack, unpack = hooks

        def again(held: Any) -> Tensor:
            with TwiceDifferentiable() if self.twice else nullcontext(), Composed():
                return unpack(held)

        with torch.autograd.graph.saved_tensors_hooks(pack, again):
            return func(*args, **(kwargs or {}))
