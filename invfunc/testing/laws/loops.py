"""The results for a problem, by plain loops and double backward passes of torch.autograd alone."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.certificates.loop import Loop, Tensors
from invfunc.testing.laws.compare import zipped
from invfunc.testing.laws.problem import BOTH, LOSSES, MODEL, SCALAR, LawProblem
from invfunc.testing.oracles import loop_batch_grad


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
    return _by_outputs(problem, params)


def _by_outputs(problem: LawProblem, params: Any) -> Any:
    """Of a scalar loss of outputs: the pullback of its slope in those of sample n alone."""
    deep = any(x.requires_grad for x in tree.tensors((params, problem.batch)))
    leaves, form = fresh(params)
    with torch.enable_grad():
        z = tree.tensors(problem.steady(problem.f)(form.join(leaves), *problem.inputs))
        slope = loss_slope(problem, z, deep)
    rows = []
    for n in range(problem.n):
        only = [torch.where(_is(n, c), c, torch.zeros_like(c)) for c in slope]
        options = {"retain_graph": True, "create_graph": deep, "materialize_grads": True}
        rows.append(torch.autograd.grad(z, leaves, only, **options))
    return form.join([torch.stack(g) for g in zip(*rows, strict=True)])


def _is(n: int, c: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(c), device=c.device).reshape(-1, *[1] * (c.ndim - 1)) == n


def fresh(params: Any) -> tuple[Tensors, Any]:
    """Leaves to differentiate in, and their structure; views where they require grad already."""
    leaves, form = tree.separate(params)
    return [p.view_as(p) if p.requires_grad else p.detach().requires_grad_() for p in leaves], form


def loss_of_outputs(problem: LawProblem, z: Tensors) -> torch.Tensor:
    """The loss, summed, of leaves of the outputs."""
    assert problem.loss is not None
    with torch.no_grad():
        form = tree.separate(problem.steady(problem.f)(problem.params, *problem.inputs))[1]
    return problem.steady(problem.loss)(form.join(z), problem.batch[-1]).sum()


def loss_slope(problem: LawProblem, z: Tensors, deep: bool = False) -> Tensors:
    """The gradient of the loss in the outputs."""
    at = z if deep else [x.detach().requires_grad_() for x in z]
    value = loss_of_outputs(problem, at)
    return list(torch.autograd.grad(value, at, create_graph=deep, materialize_grads=True))


def gradient(problem: LawProblem) -> Any:
    """The gradient of the loss, by torch.autograd."""
    leaves, form = fresh(problem.params)
    with torch.enable_grad():
        value = problem.losses(form.join(leaves), *problem.batch).sum()
    return form.join(list(torch.autograd.grad(value, leaves, materialize_grads=True)))


def of_model(problem: LawProblem) -> tuple[Loop, Any]:
    """Derivatives of the model function alone, and the structure of the parameters."""
    leaves, form = fresh(problem.params)
    with torch.enable_grad():
        z = tree.tensors(problem.steady(problem.f)(form.join(leaves), *problem.inputs))
        return Loop(leaves, z, None, problem.n), form


def of_outputs(problem: LawProblem) -> tuple[Loop, Any]:
    """Derivatives of the model function and of its loss."""
    leaves, form = fresh(problem.params)
    assert problem.loss is not None
    with torch.enable_grad():
        outputs = problem.steady(problem.f)(form.join(leaves), *problem.inputs)
        loss = problem.steady(problem.loss)(outputs, problem.batch[-1]).sum()
        return Loop(leaves, tree.tensors(outputs), loss, problem.n), form


def of_loss(problem: LawProblem) -> tuple[Loop, Any]:
    """Derivatives of the loss as one number."""
    leaves, form = fresh(problem.params)
    with torch.enable_grad():
        value = problem.steady(problem.losses)(form.join(leaves), *problem.batch).sum()
        return Loop(leaves, [value.reshape(1)], None, 1), form


def no_outputs(problem: LawProblem) -> str:
    """The reason why there is no loop for the GGN, if there is none."""
    return "" if problem.kind == BOTH else "its loop needs the outputs; give a model with loss="


def ggn_entries(problem: LawProblem) -> Any:
    """The diagonals `J[n]^T H[n] J[n]` at the entries of the problem: a tree of `[N, entries]`."""
    loop, form = of_outputs(problem)
    rows = [[loop.ggn(loop.unit(i, int(k))) for k in places] for i, places in enumerate(problem.entries)]
    return form.join([torch.stack(row, 1) if row else torch.zeros(problem.n, 0) for row in rows])


def hessian_entries(problem: LawProblem) -> Any:
    """The diagonal of the Hessian of the loss at the entries of the problem."""
    loop, form = of_loss(problem)
    rows = [[loop.hessian(i, int(k)) for k in places] for i, places in enumerate(problem.entries)]
    return form.join([torch.cat(row) if row else torch.zeros(0) for row in rows])


def at_entries(problem: LawProblem, result: Any) -> Any:
    """A result with leaves `[*lead, *p]`, at the entries of the problem."""
    found, form = tree.separate(result)
    rows = []
    for x, p, places in zip(found, tree.tensors(problem.params), problem.entries, strict=True):
        lead = x.shape[: x.ndim - p.ndim]
        rows.append(x.reshape(*lead, p.numel())[..., places.to(x.device)])
    return form.join(rows)
