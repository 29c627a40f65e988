"""A product with its vector as a statistic, whose parts are added up over batches and processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc.arguments.problem import BoundProblem
from invfunc.evaluation.engine import JointFold, check_joined
from invfunc.evaluation.kinds import LossPart
from invfunc.plan import Options
from invfunc.products.given import ProductArguments
from invfunc.products.product import Product
from invfunc.reductions import Reduction, State
from invfunc.reductions.quantity import GRADIENT, Drawing, Quantity

T = TypeVar("T")


class Summed(Reduction):
    """A reduction that keeps the sum of the products of a parameter with something in the power `degree` of a loss."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def scaled(self, state: State, by: float) -> State:
        return (state[0] * by**self.degree,)


class BatchOfProduct:
    """The evaluation of a product of a batch, as a statistic has it."""

    def __init__(self, t: WithVector, problem: BoundProblem, given: ProductArguments | None = None) -> None:
        self.t, self.problem, self.given = t, problem, given
        self.fold = JointFold(problem, Options(), [Quantity(Summed(t.product.degree), GRADIENT)])
        self.scalar = False
        self.loss_part: LossPart | None = None

    def kept(self) -> Any:
        """Have the fold keep the product; aux."""
        given = self.given
        assert given is not None
        found, aux = self.t.product.directly(given, self.t.vectors, self.t.lead)
        self.scalar = not given.losses.ndim
        if self.scalar and given.loss is not None:
            self.loss_part = LossPart.of(self.problem, given.result)
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in found]
        self.fold.accumulators[0].states = {i: (x,) for i, x in enumerate(wide)}
        return aux

    def check_joined(self) -> bool:
        """Check that f gives some samples alone what it gives them in the batch, if there are several."""
        return check_joined(self.problem, self.scalar)


@dataclass(frozen=True, eq=False)
class WithVector:
    """A product with a vector, or several, as a statistic of a batch."""

    product: Product
    vectors: list[torch.Tensor]
    lead: int
    members = ()
    others = None
    sweeps = 1

    @property
    def f(self) -> Callable:
        return self.product.f

    @property
    def drawing(self) -> Drawing | None:
        return self.product.drawing

    @property
    def drawings(self) -> list[Drawing]:
        return [] if self.drawing is None else [self.drawing]

    @property
    def has_aux(self) -> bool:
        return self.product.has_aux

    @property
    def loss(self) -> Callable | None:
        return self.product.loss

    def names(self, count: int) -> Any:
        return self.product.names_of_f(count)

    def keyed(self, keys: dict[Drawing, int], first: int) -> WithVector:
        """The same of a batch behind so many samples, each of which draws from a generator of its own."""
        return self.drawn_by(lambda d: replace(d, key=keys[d], first=first))

    def drawn_by(self, drawn: Callable[[Drawing], Drawing]) -> WithVector:
        """The same with another drawing in place of its own."""
        p = self.product
        return self if p.drawing is None else replace(self, product=replace(p, drawing=drawn(p.drawing)))

    def engine(self, args: tuple, kwargs: dict[str, Any], names: Any) -> BatchOfProduct:
        """The evaluation at these arguments."""
        given, _ = self.product.given(args, kwargs, names)
        return BatchOfProduct(self, given.problem, given)

    def evaluating(self, args: tuple, kwargs: dict[str, Any], work: Callable[[Any], T]) -> T:
        """The result of what is done with the evaluation at these arguments; an error says which call it is of."""
        return self.product.told(lambda *call: (work(self.engine(*call)), None), self.names, args, kwargs)[0]

    def without_samples(self, params: Any) -> BatchOfProduct:
        """The evaluation of no samples, which has parameters only."""
        p, (leaves, structure) = self.product, tree.flatten([params], none_is_leaf=False)
        sizes = (p.out_dims, leaves, structure)
        return BatchOfProduct(self, BoundProblem(p.f, p.loss, (params,), {}, (0,), False, p.has_aux, *sizes, {}, 0))
