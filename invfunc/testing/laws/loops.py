"""The results for a problem, by plain loops and double backward passes of torch.autograd alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import functional

from invfunc import tree
from invfunc.testing.laws.compare import zipped
from invfunc.testing.laws.problem import BOTH, LOSSES, MODEL, SCALAR, LawProblem
from invfunc.testing.oracles import loop_batch_grad

Tensors = list[torch.Tensor]


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


def loss_of_outputs(problem: LawProblem, z: Tensors, *given: torch.Tensor) -> torch.Tensor:
    """The loss, summed, of leaves of the outputs; `given` in place of z."""
    assert problem.loss is not None
    with torch.no_grad():
        form = tree.separate(problem.steady(problem.f)(problem.params, *problem.inputs))[1]
    return problem.steady(problem.loss)(form.join(given or z), problem.batch[-1]).sum()


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


class LoopProducts:
    """Products of a vector with the Jacobian, the Hessian and the GGN of a problem at its parameters."""

    def __init__(self, problem: LawProblem) -> None:
        self.problem = problem
        leaves, self.form = tree.separate(problem.params)
        self.leaves = tuple(p.detach() for p in leaves)

    def outputs(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of f, as a function of the leaves."""
        f = self.problem.steady(self.problem.f)
        return tuple(tree.tensors(f(self.form.join(list(leaves)), *self.problem.inputs)))

    def jacobian(self, v: Tensors) -> Tensors:
        """`J v`, by a double backward pass, one tensor for each of the outputs."""
        return list(functional.jvp(self.outputs, self.leaves, tuple(v))[1])

    def transposed(self, cotangent: Tensors) -> Any:
        """`J^T c`, a tree like the parameters."""
        found = functional.vjp(self.outputs, self.leaves, tuple(cotangent))[1]
        return self.form.join(list(found))

    def of_loss(self, at: Tensors, v: Tensors) -> Tensors:
        """The Hessian of the loss in the outputs times v."""
        return list(functional.hvp(lambda *z: loss_of_outputs(self.problem, at, *z), tuple(at), tuple(v))[1])

    def ggn(self, v: Tensors) -> tuple[Tensors, Tensors]:
        """`J v` and `H J v`."""
        with torch.no_grad():
            z = list(self.outputs(*self.leaves))
        there = self.jacobian(v)
        return there, self.of_loss(z, there)

    def hessian(self, v: Tensors) -> Tensors:
        """The Hessian of the loss in the parameters times v."""
        losses = self.problem.steady(self.problem.losses)

        def value(*leaves: torch.Tensor) -> torch.Tensor:
            return losses(self.form.join(list(leaves)), *self.problem.batch).sum()

        return list(functional.hvp(value, self.leaves, tuple(v))[1])

    def unit(self, leaf: int, place: int) -> Tensors:
        """The vector with a one at an entry of a leaf."""
        v = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in self.leaves]
        v[leaf].view(-1)[place] = 1
        return v


def no_outputs(problem: LawProblem) -> str:
    """The reason why there is no loop for the GGN, if there is none."""
    return "" if problem.kind == BOTH else "its loop needs the outputs; give a model with loss="


def ggn_entries(problem: LawProblem) -> Any:
    """The diagonals `J[n]^T H[n] J[n]` at the entries of the problem: a tree of `[N, entries]`."""
    products = LoopProducts(problem)

    def each(leaf: int, place: int) -> torch.Tensor:
        there, curved = products.ggn(products.unit(leaf, place))
        return sum(((a * b).reshape(problem.n, -1).sum(1) for a, b in zip(there, curved, strict=True)), torch.tensor(0))

    rows = [
        torch.stack([each(i, int(k)) for k in places], 1) if len(places) else p.new_zeros(problem.n, 0)
        for i, (p, places) in enumerate(zip(products.leaves, problem.entries, strict=True))
    ]
    return products.form.join(rows)


def hessian_entries(problem: LawProblem) -> Any:
    """The diagonal of the Hessian of the loss at the entries of the problem."""
    products = LoopProducts(problem)
    rows = [
        torch.stack([products.hessian(products.unit(i, int(k)))[i].reshape(-1)[k] for k in places])
        if len(places)
        else p.new_zeros(0)
        for i, (p, places) in enumerate(zip(products.leaves, problem.entries, strict=True))
    ]
    return products.form.join(rows)


def at_entries(problem: LawProblem, result: Any) -> Any:
    """A result with leaves `[*lead, *p]`, at the entries of the problem."""
    found, form = tree.separate(result)
    rows = []
    for x, p, places in zip(found, tree.tensors(problem.params), problem.entries, strict=True):
        lead = x.shape[: x.ndim - p.ndim]
        rows.append(x.reshape(*lead, p.numel())[..., places.to(x.device)])
    return form.join(rows)
