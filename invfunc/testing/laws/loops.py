"""The results for a problem, by plain loops and double backward passes of torch.autograd alone."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.testing.laws.compare import zipped
from invfunc.testing.laws.problem import BOTH, LOSSES, MODEL, SCALAR, LawProblem
from invfunc.testing.oracles import Loop, Tensors, loop_batch_grad, loop_of


def no_shares(problem: LawProblem) -> str:
    """The reason why there is no loop for the shares, if there is none."""
    if problem.kind == MODEL:
        return "f is no loss function; give loss="
    if problem.kind == SCALAR and not problem.fold:
        return "f is neither the sum nor the mean of its values for single samples; return [N], or give model and loss="
    return ""


def shares(problem: LawProblem, params: Any = None) -> Any:
    """`G[n]`, one by one; differentiable in `params` and the batch where these require grad."""
    params = problem.params if params is None else params
    if problem.kind == SCALAR:
        scale = problem.n if problem.fold == "mean" else 1
        alone = [problem.part([n]) for n in range(problem.n)]
        each = [loop_batch_grad(lambda *a: problem.f(*a).reshape(1) / scale)(params, *one.batch) for one in alone]
        return zipped(torch.cat, each)
    f = problem.steady(problem.losses)
    if problem.kind == LOSSES or f(params, *problem.batch).ndim:
        return loop_batch_grad(f)(params, *problem.batch)
    loop, form = of_outputs(problem, params)
    rows = [loop.share(n) for n in range(problem.n)]
    return form.join([torch.stack(g) for g in zip(*rows, strict=True)])


def of_outputs(problem: LawProblem, params: Any = None, at: list[torch.Tensor] | None = None) -> tuple[Loop, Any]:
    """Derivatives of the model function and of its loss, and the structure of the parameters."""
    functions = problem.steady(problem.f), problem.loss and problem.steady(problem.loss)
    return loop_of(*functions, problem.params if params is None else params, problem.batch, at=at)[:2]


def of_loss(problem: LawProblem, at: list[torch.Tensor] | None = None) -> tuple[Loop, Any]:
    """Derivatives of the loss as one number."""
    losses = problem.steady(problem.losses)
    return loop_of(lambda *args: losses(*args).sum().reshape(1), None, problem.params, problem.batch, at=at)[:2]


def of_model(problem: LawProblem) -> tuple[Loop, Any]:
    """Derivatives of the model function alone."""
    return loop_of(problem.steady(problem.f), None, problem.params, problem.inputs)[:2]


def loss_slope(problem: LawProblem, z: Tensors) -> Tensors:
    """The gradient of the loss, summed, in the outputs."""
    assert problem.loss is not None
    with torch.no_grad():
        form = tree.separate(problem.steady(problem.f)(problem.params, *problem.inputs))[1]
    loss = problem.steady(problem.loss)
    loop = loop_of(lambda z: loss(form.join(z), problem.batch[-1]).sum().reshape(1), None, z, ())[0]
    return loop.back(loop.slope)


def gradient(problem: LawProblem) -> Any:
    """The gradient of the loss, by torch.autograd."""
    loop, form = of_loss(problem)
    return form.join(loop.back(loop.slope))


def no_outputs(problem: LawProblem) -> str:
    """The reason why there is no loop for the GGN, if there is none."""
    return "" if problem.kind == BOTH else "its loop needs the outputs; give a model with loss="


def ggn_entries(problem: LawProblem) -> Any:
    """The diagonals `J[n]^T H[n] J[n]` at the entries of the problem: a tree of `[N, entries]`."""
    loop, form = of_outputs(problem, at=problem.entries)
    return form.join(loop.each(loop.ggn()))


def hessian_entries(problem: LawProblem) -> Any:
    """The diagonal of the Hessian of the loss at the entries of the problem."""
    loop, form = of_loss(problem, at=problem.entries)
    return form.join(loop.each(loop.hessian()[0]))


def at_entries(problem: LawProblem, result: Any) -> Any:
    """A result with leaves `[*lead, *p]`, at the entries of the problem."""
    found, form = tree.separate(result)
    rows = []
    for x, p, places in zip(found, tree.tensors(problem.params), problem.entries, strict=True):
        lead = x.shape[: x.ndim - p.ndim]
        rows.append(x.reshape(*lead, p.numel())[..., places.to(x.device)])
    return form.join(rows)
