"""A look at samples alone, which a model function has to keep apart for some products."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.recording.joined import check_fewer, moved
from invfunc.recording.problem import with_aux


def check_apart(given: Any) -> bool:
    """Check that f gives samples alone what they have beside others, unless it draws; says if that told anything."""
    whole, tensors = tree.tensors(given.result), tree.tensors((given.args, given.kwargs))

    def alone(part: slice, *, elsewhere: bool = False) -> Any:
        start, n, inputs = part.start, part.stop - part.start, []
        for i, x in enumerate(given.args[1 : len(given.args) - (given.loss is not None)], 1):
            dim = given.dims[i]
            inputs.append(x if dim is None else tree.map_tensors(lambda t, d=dim: t.narrow(d, start, n), x))
        devices = [x.device.index for x in given.leaves if x.device.type == "cuda"]
        with torch.no_grad(), torch.random.fork_rng([i for i in set(devices) if i is not None]):
            params = tree.unflatten(moved(given.leaves), given.structure) if elsewhere else given.args[0]
            result = given.f(params, *inputs, **given.kwargs)
        return with_aux(result)[0] if given.has_aux else result

    return check_fewer(whole, given.out_dims, given.n, tensors, alone, traced=False)
