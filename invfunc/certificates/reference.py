"""Another code path to what a statistic is made of: a function that is run anew for each way to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc.arguments.problem import Problem
from invfunc.certificates.draws import States, rewound, states
from invfunc.certificates.run import Entries, Run, bent, in_parts, wide
from invfunc.errors import RandomnessError, SampleAxisError, SplitError
from invfunc.loss.square_root import Columns
from invfunc.products.given import Given
from invfunc.products.maps import Pull
from invfunc.products.split import Split
from invfunc.reductions.quantity import Quantity


@dataclass
class _Reordered:
    """The function of a problem with the trees of its parameters in the first argument."""

    problem: Problem
    rest: list[int]

    def __call__(self, trees: list[Any], *others: Any, **kwargs: Any) -> Any:
        p = self.problem
        found = dict(zip(self.rest, others, strict=True)) | dict(zip(p.argnums, trees, strict=True))
        return p.f(*(found[i] for i in p.inputs), **kwargs)


@dataclass
class Reference:
    """A function at some arguments, run anew for each way to look at it, with the random numbers of the first run."""

    problem: Problem
    names: Sequence[str]
    quantities: Sequence[Quantity]
    before: States
    """Of the generators, before the result was computed."""
    around: torch.Generator | None = None
    """What draws the others, where vectors are multiplied by way of others (`Run.curved`)."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def leaves(self) -> list[torch.Tensor]:
        return self.problem.leaves

    def _given(self) -> Given:
        """The function with all parameters in its first argument, before it is run."""
        p, f = self.problem, self.problem.f
        rest = [i for i in range(len(p.args)) if i not in p.argnums]
        trees = tree.unflatten(p.leaves, p.structure)
        if p.several or p.argnums != (0,):
            f = _Reordered(p, [i for i in rest if i in p.inputs])
        args = (trees if isinstance(f, _Reordered) else trees[0], *(p.args[i] for i in rest))
        names = ["params", *(self.names[i] for i in rest)]
        dims = tuple(p.dims[i] for i in rest)
        given = Given(f, p.loss, args, p.kwargs, names, dims, p.out_dims, p.has_aux)
        self._stack.enter_context(given.scope)
        rewound(self.before)
        return given

    @cached_property
    def loss(self) -> Run:
        """The losses of the samples, or the loss of outputs that are known."""
        given = self._given()
        try:
            split = given.found_split(losses=True) if given.loss is None else given.given_split(each=True)
        except (SampleAxisError, SplitError):
            given, split = self._each_alone()
        return Run(given, split, self.around)

    @cached_property
    def outputs(self) -> Run:
        """The loss of the outputs of a model."""
        given = self._given()
        split = given.found_split() if given.loss is None else given.given_split(each=True)
        return Run(given, split, self.around)

    @cached_property
    def model(self) -> Run:
        """The outputs of a model function themselves."""
        given = self._given()
        values, _ = given.outputs()
        return Run(given, Split(given.scope, 1, values[0], [], values=values))

    @cached_property
    def drawn(self) -> dict[Any, list[Columns]]:
        """The columns that were drawn for the result."""
        split = self.outputs.split
        drawn = {q.columns: q.drawing for q in self.quantities if q.drawing is not None}
        return {key: split.drawn(drawing, "diag_ggn") for key, drawing in drawn.items()}

    @cached_property
    def hessian(self) -> Entries:
        """The diagonal of the Hessian of the whole function: `[K]`."""
        given = self._given()
        value = given.value()
        with given.mode.back(value.device):
            slopes = Pull(given.scope, graph=True)([value], given.params, [torch.ones_like(value)])
        return lambda leaf, places: wide(bent(given, slopes[leaf], leaf, places))

    @cached_property
    def parts(self) -> Run:
        """The losses of the samples as functions of all that is before them."""
        given = self._given()
        if given.loss is None:
            result = given.run()
            if isinstance(result, torch.Tensor) and result.shape == (self.problem.n,):
                return Run(given, Split(given.scope, self.problem.n, result, []))
        try:
            return self.outputs
        except (SampleAxisError, SplitError):
            pass
        return Run(*self._each_alone())

    def _each_alone(self) -> tuple[Given, Split]:
        """The losses of a function of single samples, of which that of the batch is the sum or the mean."""
        given, p = self._given(), self.problem
        before, whole = states(), given.value()
        if any(not torch.equal(then, now) for (_, then), (_, now) in zip(before, states(), strict=True)):
            raise RandomnessError(
                "f draws random numbers, and would draw others for single samples. Return the [N] losses, or give the "
                "model and the loss apart."
            )
        if not bool(whole.isfinite()):
            raise SplitError(f"the loss is {float(whole)}, which has no parts. Return the [N] losses.")
        each = torch.stack([given.value_of(self._sample(n)) for n in range(p.n)]) if p.n > 1 else whole[None]
        folds = {"sum": each, "mean": each / len(each)}
        apart = {name: float((parts.sum() - whole).detach().abs()) for name, parts in folds.items()}
        best = min(apart, key=apart.__getitem__)
        if not apart[best] <= torch.finfo(whole.dtype).eps ** 0.5 * float(folds[best].detach().abs().sum()):
            raise SplitError(
                "the loss is neither the sum nor the mean of its values for single samples, and the outputs of the "
                "model are not known. Return the [N] losses, mark the outputs (`outputs(z)`), or give the model and "
                "the loss apart."
            )
        return given, Split(given.scope, p.n, folds[best], [], values=[folds[best]])

    def _sample(self, n: int) -> list[Any]:
        """The batch arguments of one sample."""
        dims = self.problem.dims
        rest = [(x, dims[i]) for i, x in enumerate(self.problem.args) if i in dims]
        return [x if d is None else tree.map_tensors(lambda t, d=d: t.narrow(d, n, 1), x) for x, d in rest]

    def in_parts(self, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The places in parts that fit the budget."""
        return in_parts(places, self.problem.args, self.problem.kwargs)
