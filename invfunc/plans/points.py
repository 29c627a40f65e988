"""The linear map of a product at a point, by plans: what no vector changes is computed once."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc._torch.functorch import plainly
from invfunc._torch.generators import set_states, state_of
from invfunc.errors import ModifiedError
from invfunc.plans.backends import Backend
from invfunc.plans.calls import Calls, aside, compare
from invfunc.plans.halves import Point, halves_of
from invfunc.plans.recorder import Missed
from invfunc.products.maps import Linear
from invfunc.products.product import Product, Space


@dataclass(frozen=True, eq=False)
class ProductAt:
    """The products with some vectors by a linearisation, and aux."""

    product: Product

    def __call__(self, vectors: list[torch.Tensor], lead: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        names = self.product.names_of_f(len(args))
        linear, aux = self.product.recorded(self.product.given(args, kwargs, names)[0])
        return linear(vectors, lead), aux


@dataclass(eq=False)
class Points:
    """Linearisations of a product."""

    product: Product
    of: Calls
    """Those of the product by itself."""
    calls: Calls = field(init=False)

    def __post_init__(self) -> None:
        of = self.of
        self.calls = Calls(ProductAt(self.product), f"{of.called}.linearize", of.backend, of.recheck)

    def __reduce__(self) -> tuple:
        return Points, (self.product, self.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Points:
        return Points(deepcopy(self.product, memo), deepcopy(self.of, memo))

    def at(
        self, vectors: list[torch.Tensor], lead: int, args: tuple, kwargs: dict[str, Any], like: Point | None = None
    ) -> Point | str:
        """What vectors of such shapes do not change, computed by their plan, with the draws of another point if it is
        given; or why there is none."""
        given = (vectors, lead, args, kwargs)
        if aside(given, {}):
            return "of transforms and modes there is no plan"
        why = ""
        for _ in range(2):  # a plan that misses is made anew
            call, entry = self.calls.prepared(given, {})
            if entry.plan is None or entry.watch is None:
                return entry.why
            if entry.halves is None:
                backend = Backend(self.calls.backend)
                entry.halves = halves_of(entry.plan, len(vectors), backend, self.calls.said)
            if isinstance(entry.halves, str):
                return entry.halves
            before = [(g, state_of(g)) for g in entry.plan.drew]
            try:
                set_states([] if like is None else like.before)
                return entry.halves.at(call.tensors, len(vectors), entry.watch, before)
            except Missed as miss:
                why = str(miss)
                entry.missed(why)
            finally:
                set_states(before if like is not None else [])
        return f"{why} changes from call to call"


class Map:
    """The linear map of a product at a point. Where somebody sees what it does, it is autograd's."""

    def __init__(self, points: Points, args: tuple, kwargs: dict[str, Any], space: Space) -> None:
        self.points, self.args, self.kwargs, self.space = points, args, kwargs, space
        lead = points.product.lead
        one = [kind.zeros(*[1] * lead) for kind in space.kinds]
        self.known: dict[Any, Point | str] = {}
        self.recorded: Linear | None = None
        self.calls, self.aux = 0, None
        self.base = points.at(one, lead, args, kwargs)
        if isinstance(self.base, str):
            points.calls.without(self.base)
            self.recorded, self.aux = self._by_autograd()
        elif points.product.has_aux:
            _, self.aux = self.base(one)

    @property
    def kept(self) -> list[torch.Tensor]:
        """Its own tensors."""
        return [] if isinstance(self.base, str) else self.base.kept

    def __call__(self, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        seen = aside((vectors,), {}) or (torch.is_grad_enabled() and any(x.requires_grad for x in vectors))
        if isinstance(self.base, str) or seen:
            return self._recorded()(vectors, lead)
        vectors, recheck = [x.detach().contiguous() for x in vectors], self.points.calls.recheck
        found, self.calls = self._by_plan(self.base, vectors, lead), self.calls + 1
        if recheck and self.calls % recheck == 0:
            compare(found, self._recorded()(vectors, lead))
        return found

    def _by_plan(self, base: Point, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        """The products of vectors, also of other numbers of them than a plan is for."""
        count, own = vectors[0].shape[:lead], self.points.product.lead
        if count == (1,) * own:
            return base(vectors)[0]
        if 0 in count:
            return [kind.zeros(*count) for kind in self.space.kinds]
        flat = [x.flatten(0, lead - 1) for x in vectors]
        key = len(flat[0])
        if key not in self.known:
            why = base.changed()
            like = [torch.zeros_like(x) for x in flat]
            self.known[key] = why or self.points.at(like, 1, self.args, self.kwargs, base)
        point = self.known[key]
        if isinstance(point, Point):
            found = point(flat)[0]
        else:
            each = [base([x[k : k + own] if own else x[k] for x in flat])[0] for k in range(key)]
            found = [torch.cat(x) if own else torch.stack(x) for x in zip(*each, strict=True)]
        return [x.unflatten(0, count) for x in found]

    def _recorded(self) -> Linear:
        if self.recorded is None:
            assert isinstance(self.base, Point)
            if what := self.base.changed():
                raise ModifiedError(f"{what} is another one since `.linearize`. Linearise again.")
            now = [(g, state_of(g)) for g, _ in self.base.before]
            set_states(self.base.before)
            try:
                with plainly(), torch.no_grad():  # as it was
                    self.recorded, _ = self._by_autograd()
            finally:
                set_states(now)
        return self.recorded

    def _by_autograd(self) -> tuple[Linear, Any]:
        product = self.points.product
        return product.recorded(product.given(self.args, self.kwargs, product.names_of_f(len(self.args)))[0])
