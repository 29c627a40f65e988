"""Another code path to what a statistic is made of: derivatives of the whole function along single entries.

`J e` is had as the derivative of `u -> J^T u`, so that every operation with a second derivative has one. There are no
rules of operations here, samples are told apart at the outputs alone, and the Hessian of the loss is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc.certificates.draws import States, rewound, states
from invfunc.errors import RandomnessError, SampleAxisError, SplitError
from invfunc.evaluation.engine import budget
from invfunc.loss.square_root import Columns
from invfunc.operations.axis import Axis
from invfunc.passes.loss import Split
from invfunc.products.curvature import Jacobian
from invfunc.products.given import Given
from invfunc.products.maps import Pull, Vectors
from invfunc.recording.problem import Problem
from invfunc.reductions.quantity import Quantity

Diagonal = Callable[[int, torch.Tensor], torch.Tensor]
"""From a leaf and places in it to `[K]` entries of a diagonal."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """On the CPU and in float64, where numbers are compared."""
    return x.detach().cpu().double()


def units(p: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Vectors with a one at each of these places of a tensor: `[K, *p]`."""
    v = torch.zeros(len(places), p.numel(), dtype=p.dtype, device=p.device)
    return v.scatter_(1, places[:, None].to(p.device), 1).reshape(len(places), *p.shape)


def _like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn numbers of the size of those of x."""
    u = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return x.abs().amax() * u.to(x)


class Run:
    """A function that was run at a point and split, with derivatives along entries of its parameters."""

    def __init__(self, given: Given, split: Split, around: torch.Generator | None = None) -> None:
        self.given, self.split, self.around = given, split, around
        self.jacobian = Jacobian.recorded(given, split)
        self._axes = [root.axis for root in split.roots] or [Axis(0)]
        """Where the outputs have their samples; the losses of the samples themselves have nothing else."""

    @property
    def at_once(self) -> int:
        """How many vectors fit the budget, with about as many numbers on the way as the batch and parameters have."""
        given = self.given
        numbers = sum(x.numel() for x in tree.tensors((given.args, given.kwargs)))
        return max(1, budget(given.leaves[0].device) // max(1, numbers))

    @cached_property
    def slopes(self) -> Vectors:
        """The gradient of the loss in the outputs, as a function of them."""
        split = self.split
        with self.given.mode.back(split.result.device):
            pull = Pull(split.scope, graph=True)
            return pull([split.result], [r.value for r in split.roots], [torch.ones_like(split.result)])

    def forth(self, leaf: int, v: torch.Tensor) -> list[torch.Tensor]:
        """`J v` for `v [K, *p]` of a leaf: `[K, *z]` for each output."""
        return self.there([v], self.jacobian.of(leaf))

    def there(self, v: Sequence[torch.Tensor], jacobian: Jacobian | None = None) -> list[torch.Tensor]:
        """`J v` for a list of leaves `[K, *p]`, or of some of them."""
        with self._back():
            found = (jacobian or self.jacobian).forth(list(v), Pull(self.split.scope, batched=True))
        pairs = zip(found, self.split.values, strict=True)
        return [z.detach().new_zeros(len(v[0]), *z.shape) if x is None else x.detach() for x, z in pairs]

    def back(self, cotangents: Vectors) -> list[torch.Tensor]:
        """`J^T c` for `c [K, *z]` of each output: a tensor `[K, *p]` for each leaf."""
        count = next(len(c) for c in cotangents if c is not None)
        with self._back():
            found = self.jacobian.back(cotangents, Pull(self.split.scope, batched=True))
        leaves = self.given.leaves
        return [p.new_zeros(count, *p.shape) if g is None else g.detach() for g, p in zip(found, leaves, strict=True)]

    def _back(self) -> Any:
        return self.given.mode.back(self.split.result.device)

    # What the loss makes of that

    @cached_property
    def gradient(self) -> list[Columns]:
        """The column of the loss; none where the values are its terms themselves."""
        return [self.split.gradient()] if self.split.roots else []

    def along(self, t: Sequence[torch.Tensor], columns: Sequence[Columns]) -> torch.Tensor:
        """The columns of each sample times `t`, an image of K vectors: `[M, K, N]`."""
        if not self.split.roots:
            return wide(t[0])[None]
        images = dict(zip((r.ordinal for r in self.split.roots), self._exposed(t), strict=True))
        found: list[torch.Tensor] = []
        for made in columns:
            left = made.block(0, made.count, slice(None)).left
            parts = [
                torch.einsum("mnx,knx->mkn", wide(s).reshape(*s.shape[:2], -1), images[i])
                for i, s in left.items()
                if i in images
            ]
            found.append(torch.stack(parts).sum(0))
        return torch.cat(found)

    def curved(self, t: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
        """`t H others` of each sample: `[K, N]`. By way of others `around` it is `t H (others + u) - u H t`, where what
        cancels or is lost in H has other rounding errors."""
        if self.around is None:
            return self._curved(t, others)
        u = [_like(x, self.around) for x in others]
        return self._curved(t, [x + y for x, y in zip(others, u, strict=True)]) - self._curved(u, t)

    def _curved(self, t: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._back():
            bent = Pull(self.split.scope, batched=True)(self.slopes, [r.value for r in self.split.roots], list(others))
        full = [torch.zeros_like(x) if y is None else y.detach() for x, y in zip(t, bent, strict=True)]
        return torch.stack([(a * b).sum(2) for a, b in zip(self._exposed(t), self._exposed(full), strict=True)]).sum(0)

    def _exposed(self, t: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`[K, N, everything else]` of each output."""
        n = self.split.n
        exposed = [axis.expose(x, n, 1) for x, axis in zip(t, self._axes, strict=True)]
        return [wide(x).reshape(len(x), n, -1) for x in exposed]

    def shares(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Sums of the shares with weights `[S, N]`, by backward passes: a tensor `[S, *p]` for each leaf."""
        split, count = self.split, len(weights)
        if not split.roots:
            (z,) = split.values
            return self.back([weights.to(z).reshape(count, *z.shape)])
        slopes, found = self.gradient[0].block(0, 1, slice(None)).left, list[torch.Tensor | None]()
        for root, value in zip(split.roots, split.values, strict=True):
            c = slopes[root.ordinal][0].detach()
            each = weights.to(c).reshape(*weights.shape, *[1] * (c.ndim - 1)) * c
            found.append(root.axis.restore(each, split.n, 1).reshape(count, *value.shape))
        return self.back(found)


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
    runs: int = 0
    """How often the function was evaluated on the whole batch."""
    _stack: ExitStack = field(default_factory=ExitStack)
    _hessians: dict[torch.Tensor, Diagonal] = field(default_factory=dict)

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
        self.runs += 1
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
        return self.outputs.split.made([q for q in self.quantities if q.drawing is not None])

    def hessian(self, weights: torch.Tensor) -> Diagonal:
        """The diagonal of the Hessian of the sum of the losses, each with its weight."""
        if weights not in self._hessians:
            self._hessians[weights] = self._hessian(weights)
        return self._hessians[weights]

    def _hessian(self, weights: torch.Tensor) -> Diagonal:
        given, losses = self._losses() if not bool((weights == 1).all()) else (self._given(), None)
        value = given.value() if losses is None else (weights.to(losses) * losses).sum()
        with given.mode.back(value.device):
            slopes = Pull(given.scope, graph=True)([value], given.params, [torch.ones_like(value)])

        def diagonal(leaf: int, places: torch.Tensor) -> torch.Tensor:
            p = given.params[leaf]
            with given.mode.back(value.device):
                (found,) = Pull(given.scope, batched=True)([slopes[leaf]], [p], [units(p.detach(), places)])
            if found is None:
                return torch.zeros(len(places), dtype=torch.float64)
            return wide(found).reshape(len(places), -1).gather(1, places[:, None])[:, 0]

        return diagonal

    def _losses(self) -> tuple[Given, torch.Tensor]:
        """The losses of the samples, which add up to that of the batch."""
        if self.problem.loss is None:
            given = self._given()
            result = given.run()
            if isinstance(result, torch.Tensor) and result.shape == (self.problem.n,):
                return given, result
        given, split = self._each_alone()
        return given, split.values[0]

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

    def parts(self, leaf: int, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The places in parts whose vectors, and about as many numbers on the way as the batch has, fit the budget."""
        p, batch = self.leaves[leaf], sum(x.numel() for x in self.problem.tensors())
        return places.split(max(1, budget(p.device) // max(1, batch)))
