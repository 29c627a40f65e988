"""Laws of what statistics leave as it was, and of whom their results belong to."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc.errors import InvFuncError
from invfunc.testing.laws.law import Claim, law
from invfunc.testing.laws.problem import Problem, generators
from invfunc.testing.laws.statistics import every


def storages(tensors: list[torch.Tensor]) -> list[int]:
    """Where the memory of tensors with entries is."""
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


def state(args: Any) -> list[tuple]:
    """What of arguments must not change."""
    found = tree.tensors(args)
    return [(x.detach().clone(), version(x), x.requires_grad, x.grad is None) for x in found]


def written(call: Callable, args: Any) -> Any:
    """The state of arguments after a call."""
    call()
    return state(args)


@law("no argument is written")
def arguments(problem: Problem) -> Iterator[Claim]:
    """t(params, *batch) leaves values, versions, requires_grad and .grad of params and batch as they were"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: written(of, problem.args), lambda: state(problem.args))


def shared(result: Any, args: Any) -> list[str]:
    """The leaves of a result that share memory with each other, or with arguments."""
    theirs, own = set(storages(tree.tensors(args))), Counter(storages(tree.tensors(result)))
    found = []
    for path, x in tree.named_leaves(result):
        if isinstance(x, torch.Tensor) and x.numel():
            at = x.untyped_storage().data_ptr()
            overlaps = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
            found += [path] if at in theirs or own[at] > 1 or overlaps else []
    return found


@law("results have memory of their own")
def memory(problem: Problem) -> Iterator[Claim]:
    """no two tensors of t(params, *batch) share memory, with each other or with params and batch"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: shared(of(), problem.args), list)


def alive(call: Callable, tensors: Any) -> list[str]:
    """The tensors, given to a call, that are alive when all the caller's references are gone."""
    own = tree.map_tensors(lambda x: x.detach().clone(), tensors)
    names = [(path, weakref.ref(x)) for path, x in tree.named_leaves(own) if isinstance(x, torch.Tensor)]
    result = call(own)
    leaves = [weakref.ref(x) for x in tree.tensors(result)]
    del own, result
    for _ in range(_TRIES):  # a thread of autograd for a device lets go of what it has computed a little later
        gc.collect()
        left = [x for reference in (*leaves, *(x for _, x in names)) if (x := reference()) is not None]
        if all(x.device.type == "cpu" for x in left):
            break
        del left
        time.sleep(0.01)
    return [path for path, x in names if x() is not None] + [
        f"result {i}" for i, x in enumerate(leaves) if x() is not None
    ]


_TRIES = 20


@law("nothing stays alive")
def life(problem: Problem) -> Iterator[Claim]:
    """when params, batch and result are deleted, their tensors are gone"""

    def all_of_them(given: tuple) -> list[Any]:
        params, *batch = given
        own, results = replace(problem, params=params, batch=tuple(batch)), []
        for of in every(own):
            try:
                results.append(of())
            except InvFuncError:  # told elsewhere
                continue
        return results

    yield Claim("all statistics", lambda: alive(all_of_them, problem.args), list)


@law("the generators end where f leaves them")
def random_numbers(problem: Problem) -> Iterator[Claim]:
    """torch's generators are after t(params, *batch) where they are after f(params, *batch)"""

    def after(call: Callable) -> list[torch.Tensor]:
        call()
        return generators()

    def of_f() -> list[torch.Tensor]:
        with torch.no_grad():
            return after(lambda: problem.f(problem.params, *problem.inputs))

    for of in every(problem):
        yield Claim(of.called, lambda of=of: after(of), of_f)
