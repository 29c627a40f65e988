"""The last resort: a function on each sample alone, with a copy of the parameters for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from invfunc import tree
from invfunc._torch.functorch import version
from invfunc._torch.values import anywhere, decides, same_values
from invfunc.errors import InvFuncError, RandomnessError
from invfunc.linear_algebra.contract import Term, summed
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors import Part, Recipe
from invfunc.operations.heard import Function
from invfunc.passes.certified import some_cotangent
from invfunc.passes.run import Run
from invfunc.recording import Trace
from invfunc.recording.graph import functions_below, leaves_below
from invfunc.recording.hidden import reentrant
from invfunc.recording.problem import Problem, with_aux
from invfunc.recording.provenance import UntracedTensors
from invfunc.recording.random import Draws
from invfunc.recording.scope import Scope
from invfunc.recording.tags import Derived, Sampled

FOREIGN = (RuntimeError, ValueError, TypeError, IndexError)
"""What a function raises that does not run on some of its samples."""


class NotAlone(Exception):
    """Raised where a function cannot be evaluated on each sample alone; says why, unless it does not return samples."""


class Alone:
    """A function that returns `[N]` entries, or outputs `[N, ...]`, evaluated on each of its samples.

    Nothing has to be known of what it does: but what it gives for a sample alone, and the derivatives of that, have to
    be those in the batch, and both are compared.
    """

    def __init__(self, problem: Problem, scope: Scope) -> None:
        self.problem, self.scope = problem, scope
        decides(problem.leaves[0], "whether f can be evaluated sample by sample")
        batch = {i: problem.args[i] for i in problem.inputs if i not in problem.argnums}
        flat, self._form = tree.flatten(batch)
        dims = [problem.dims[i] for i in batch for _ in tree.leaves(batch[i])]
        self._batch = [
            (x, Axis(d % x.ndim) if isinstance(x, torch.Tensor) and d is not None else None)
            for x, d in zip(flat, dims, strict=True)
        ]
        params = Trace(scope, problem.n).parameters(problem.leaves)
        seen = _Seen(problem.tensors(), params)
        with seen:
            result, self.aux = self._called(params, self._samples(slice(None)))
        values, self.structure = _outputs(result)
        self.axes = [self._axis(z) for z in values]
        self._check(seen)
        if any(CheckpointFunction in functions_below(z) for z in values):
            raise reentrant()
        self._values = values if scope.create_graph else [z.detach() for z in values]
        self._way, self._ran = self._verified(values, params)

    def without_uses(self, part: slice | torch.Tensor, n: int) -> Run:
        """The outputs of some samples as they are in the batch, without parameter uses."""
        trace = Trace(self.scope, n)
        outputs = [a.restore(z, n) for a, z in zip(self.axes, self._exposed(self._values, part), strict=True)]
        return self._returned(trace, trace.parameters(self.problem.leaves), part, outputs)

    def with_uses(self, part: slice, n: int) -> Run:
        """Some samples alone, each using its copy of the parameters."""
        if n == self.problem.n and self._ran is not None:
            ran, self._ran = self._ran, None
            return ran
        return self._run(self._way, part, n)[0]

    # The function

    def _called(self, params: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[Any, Any]:
        problem = self.problem
        trees, rest = tree.unflatten(list(params), problem.structure), tree.unflatten(list(values), self._form)
        given = [trees[problem.argnums.index(i)] if i in problem.argnums else rest[i] for i in problem.inputs]
        with self.scope.evaluating():
            result = problem.f(*given, **problem.kwargs)
        return with_aux(result) if problem.has_aux else (result, None)

    def _samples(self, part: slice) -> list[Any]:
        """The arguments that are not parameters, of some samples."""
        return [
            x if a is None else self.scope.alias(x[(slice(None),) * (a.dim or 0) + (part,)]) for x, a in self._batch
        ]

    def _exposed(self, outputs: Sequence[torch.Tensor], part: slice | torch.Tensor) -> list[torch.Tensor]:
        return [a.expose(z, self.problem.n)[part] for z, a in zip(outputs, self.axes, strict=True)]

    def _axis(self, z: Any) -> Axis:
        n, dim = self.problem.n, self.problem.out_dims
        if not isinstance(z, torch.Tensor) or not z.ndim:
            raise NotAlone  # it is a scalar, of which nothing is known
        dim = dim % z.ndim if z.ndim > 1 and -z.ndim <= dim < z.ndim else 0
        if z.shape[dim] != n:
            raise NotAlone(f"it returns shape {tuple(z.shape)} for N = {n}")
        return Axis(dim)

    def _check(self, seen: _Seen) -> None:
        if seen.draws.drew:
            raise RandomnessError("it draws random numbers, and cannot be evaluated one sample at a time.")
        if seen.wrote():
            raise NotAlone("it writes into an argument, or a tensor from outside, in place; let it work on a copy")
        for x in leaves_below(seen.outside.values()):
            if id(x) in seen.outside or not seen.knows(x):
                self.scope.closes_over(x)

    def _returned(self, trace: Trace, params: list[torch.Tensor], part: Any, outputs: list[torch.Tensor]) -> Run:
        for z, axis in zip(outputs, self.axes, strict=True):
            trace.set(z, Sampled(Axis(None) if trace.n == 1 else axis, around="f"))
        start = self.problem.first + (part.start or 0 if isinstance(part, slice) else 0)
        return Run(trace, params, part, {}, start, tree.unflatten(outputs, self.structure), self.aux)

    # Sample by sample

    def _verified(self, values: list[torch.Tensor], params: list[torch.Tensor]) -> tuple[Way, Run | None]:
        """The way of evaluating samples alone that gives the same as in the batch, with its run on all of them."""
        one = [some_cotangent(z) for z in values]
        wanted, why = self.scope.grad(values, params, one, batched=False), ""
        if self.scope.twice:
            self._check_twice(values, params, one)
        for way in (self._vmapped, self._looped):
            try:
                ran, outputs, copies = self._run(way, slice(None), self.problem.n)
                found = self.scope.grad(outputs, copies, one, batched=False)
            except FOREIGN as error:
                if isinstance(error, InvFuncError):
                    raise
                why = f"it does not run on one sample ({type(error).__name__}: {error})"
                continue
            if not all(same_values(a, z) for a, z in zip(outputs, values, strict=True)):
                why = "a sample alone gives something else than in the batch"
            elif not _same_slopes(found, wanted):
                why = "the derivative of a sample alone is not that in the batch"
            else:
                return way, ran
        raise NotAlone(why)

    def _check_twice(self, values: list[torch.Tensor], params: list[torch.Tensor], one: list[torch.Tensor]) -> None:
        """Check the derivative of the backward pass of custom Functions: as this is linear in the cotangent, the
        derivative has to give it back."""
        functions = dict.fromkeys(kind.__name__ for z in values for kind in functions_below(z))
        if not functions:
            return
        sent = [self.scope.enter(self.scope.leave(c)) for c in one]  # a level of torch.func takes no tensor of its own
        found = self.scope.grad(values, params, sent, batched=False, create_graph=True)
        slopes = [g for g in found if g is not None]
        again = self.scope.grad(slopes, sent, [g.detach() for g in slopes], batched=False)
        size = summed(g.detach().square().sum() for g in slopes) if slopes else one[0].new_zeros(())
        back = sum(((r * c).sum() for r, c in zip(again, one, strict=True) if r is not None), torch.zeros_like(size))
        if not same_values(back, size):
            raise NotAlone(
                f"the backward of {', '.join(f'`{name}`' for name in functions)} is not differentiable itself, as it "
                "has to be here"
            )

    def _run(self, way: Way, part: slice, n: int) -> tuple[Run, list[torch.Tensor], list[torch.Tensor]]:
        """A run on some samples, its outputs, and the copies `[n, *p]` of the parameters that it has used."""
        trace = Trace(self.scope, n)
        params = trace.parameters(self.problem.leaves)
        copies = [p.expand(n, *p.shape) for p in params]
        outputs = way(copies, part, n)
        for i, (leaf, copy) in enumerate(zip(params, copies, strict=True)):
            call = Call("f", self.problem.f, (leaf,), {}, copy, {}, n, True, [leaf])
            trace.use(leaf, Derived(frozenset({i}), True), of_copies(leaf), copy, Axis(0), call)
        return self._returned(trace, params, part, outputs), outputs, copies

    def _vmapped(self, copies: list[torch.Tensor], part: slice, n: int) -> list[torch.Tensor]:
        count, values = len(copies), self._samples(part)
        exposed = [x if a is None else a.expose(x, n) for x, (_, a) in zip(values, self._batch, strict=True)]
        dims = (0,) * count + tuple(None if a is None else 0 for _, a in self._batch)

        def one(*given: Any) -> list[torch.Tensor]:
            return self._leaves(self._called(given[:count], given[count:])[0])

        found = torch.vmap(one, in_dims=dims)(*copies, *exposed)
        return [a.restore(z, n) for a, z in zip(self.axes, found, strict=True)]

    def _looped(self, copies: list[torch.Tensor], part: slice, n: int) -> list[torch.Tensor]:
        start, found = part.indices(self.problem.n)[0], list[list[torch.Tensor]]()
        for k, params in enumerate(zip(*(c.unbind() for c in copies), strict=True)):
            values = self._samples(slice(start + k, start + k + 1))
            found.append(self._leaves(self._called(params, values)[0]))
        return [torch.cat(each, a.dim or 0) for a, each in zip(self.axes, zip(*found, strict=True), strict=True)]

    def _leaves(self, result: Any) -> list[torch.Tensor]:
        leaves, structure = _outputs(result)
        if structure != self.structure:
            raise NotAlone("it returns something of another structure for one sample")
        return leaves


def _outputs(result: Any) -> tuple[list[torch.Tensor], Any]:
    named, structure = tree.outputs(result)
    return [z for _, z in named], structure


Way = Callable[[list[torch.Tensor], slice, int], list[torch.Tensor]]


def of_copies(leaf: torch.Tensor) -> Recipe:
    """The recipe for parameters of which each sample has a copy: its share is the cotangent of that copy."""
    labels = LETTERS[: leaf.ndim]

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        return [("VN" + labels, cotangent.squeeze(2))]

    return Recipe(labels, build=build, generic=True)


def _same_slopes(each: Sequence[torch.Tensor | None], whole: Sequence[torch.Tensor | None]) -> bool:
    """Whether the derivatives of the samples add up to those of the batch, parameter by parameter."""
    sizes = [None if g is None else g.abs().sum(0).nan_to_num(0, 0, 0).amax() for g in each]
    largest = reduce(lambda a, b: torch.maximum(a.to(b), b), [s for s in sizes if s is not None], torch.zeros(()))
    return all(_same_slope(*one, largest) for one in zip(each, whole, sizes, strict=True))


def _same_slope(
    each: torch.Tensor | None, whole: torch.Tensor | None, size: torch.Tensor | None, largest: torch.Tensor
) -> bool:
    if each is None or whole is None or size is None:
        given = each if each is not None else whole
        return given is None or not anywhere(given != 0)
    apart, eps = (each.sum(0) - whole).abs(), torch.finfo(whole.dtype).eps
    # what cancels, as of a key's bias, is rounding alone
    near = apart <= torch.maximum(eps**0.5 * size, eps**0.75 * largest.to(size))
    return not anywhere(~(near | ~apart.isfinite() & ~whole.isfinite()))


class _Seen(UntracedTensors):
    """Sees what a function took from outside, whether it wrote there, and whether it drew."""

    def __init__(self, given: list[torch.Tensor], params: list[torch.Tensor]) -> None:
        super().__init__()
        self.draws, self.outside = Draws(stop=False), dict[int, torch.Tensor]()
        self._versions: dict[int, int] = {}
        for x in (*given, *params):
            self.know(x)
        for x in given:
            self.met(x)

    def met(self, x: torch.Tensor, ordinal: int = 0, name: str = "") -> None:
        self.outside[id(x)], self._versions[id(x)] = x, version(x)

    def run(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.draws.before(function, args, kwargs)
        return super().run(function, args, kwargs)

    def wrote(self) -> bool:
        return any(version(x) != self._versions[i] for i, x in self.outside.items())
