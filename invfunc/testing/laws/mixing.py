"""The law of f and its loss themselves: what a sample has depends on no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import SampleAxisError
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import zipped
from invfunc.testing.laws.law import Claim, Inapplicable, law
from invfunc.testing.laws.problem import BOTH, SCALAR, Problem, generators
from invfunc.testing.laws.statistics import one


def _without_draws(problem: Problem) -> str:
    if problem.draws:
        return "f draws"
    return "" if problem.n > 1 else "there is one sample"


@law("samples do not mix", when=_without_draws, of_f=True)
def apart(problem: Problem) -> Iterator[Claim]:
    """f(params, *batch)[n], and loss(z, y)[n], stay what they are when the other samples become copies of sample n; a
    scalar loss is a sum: its gradient in z[n] is of the same direction then, and the same for other z[m]"""
    if problem.kind == SCALAR:
        yield Claim("f", lambda: _mixes(problem), lambda: "")
        return
    yield Claim("f", lambda: _values(problem), lambda: _alone(problem))
    if problem.kind == BOTH:
        if _loss(problem).ndim:
            yield Claim("loss", lambda: _loss(problem), lambda: _losses_alone(problem))
        else:
            yield Claim("loss", lambda: _slopes(problem), lambda: _slopes_beside_others(problem))
            yield Claim("loss, direction", lambda: _directions(problem), lambda: _directions_alone(problem))


def _mixes(problem: Problem) -> str:
    """What mixes the samples of a scalar loss, which is not the sum or mean of its values for each of them."""
    try:
        one(problem, "batch_grad").itself()
    except SampleAxisError as error:
        if problem.fold:
            raise
        return str(error)
    return ""


def _values(problem: Problem) -> Any:
    with torch.no_grad():
        return tree.map_tensors(lambda z: z.detach().clone(), problem.f(problem.params, *problem.inputs))


def _copies(problem: Problem) -> list[Problem]:
    """For each sample a batch that is made of it alone."""
    return [problem.part([n] * problem.n) for n in range(problem.n)]


def _own(trees: list[Any]) -> Any:
    """Of the n-th tree the n-th rows."""
    return zipped(torch.stack, [tree.map_tensors(lambda z, n=n: z[n], z) for n, z in enumerate(trees)])


def _alone(problem: Problem) -> Any:
    return _own([_values(part) for part in _copies(problem)])


def _loss(problem: Problem) -> torch.Tensor:
    """The loss of the outputs, which draws nothing."""
    assert problem.loss is not None
    with torch.no_grad():
        z, before = problem.f(problem.params, *problem.inputs), generators()
        value = problem.loss(z, problem.batch[-1]).clone()
    if any(not torch.equal(a, b) for a, b in zip(before, generators(), strict=True)):
        raise Inapplicable("loss draws")
    return value


def _losses_alone(problem: Problem) -> torch.Tensor:
    return torch.stack([_loss(part)[n] for n, part in enumerate(_copies(problem))])


def _slopes(problem: Problem) -> Any:
    """The gradient of the loss in the outputs."""
    _loss(problem)
    return _slopes_at(problem, tree.tensors(_values(problem)))


def _slopes_at(problem: Problem, z: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        return loops.loss_slope(problem, z)


def _slopes_beside_others(problem: Problem) -> Any:
    """Each row of it where all other outputs are those of this sample, and the targets what they are."""
    z = tree.tensors(_values(problem))
    return _own([_slopes_at(problem, [x[n].expand_as(x) for x in z]) for n in range(problem.n)])


def _directions(problem: Problem) -> Any:
    return [_directed(x) for x in _slopes(problem)]


def _directions_alone(problem: Problem) -> Any:
    return _own([_directions(part) for part in _copies(problem)])


def _directed(slope: torch.Tensor) -> torch.Tensor:
    """Rows of length one, as weights of targets scale them; zeros where a sample has no slope."""
    rows = slope.reshape(len(slope), -1)
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny).reshape(slope.shape)
