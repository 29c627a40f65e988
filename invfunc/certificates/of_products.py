"""The check of a product with a matrix.

Of a Hessian two plain backward passes, all entries at once. Of the GGN and of Fisher matrices, which products compute
as `J^T (H (J v))`, drawn entries `(J e) . H (J v)`, without the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import tree
from invfunc.arguments.problem import with_aux
from invfunc.certificates.check import Around, Check
from invfunc.certificates.draws import Tape, drawn, rewound
from invfunc.certificates.look import Look, at_places, entry, magnitudes
from invfunc.certificates.rounding import Numbers, Tensors
from invfunc.certificates.run import Entries, Run, in_parts, units, wide
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.products.curvature import of_fisher, of_ggn, of_hessian
from invfunc.products.given import Given
from invfunc.products.product import Product

KINDS = of_hessian, of_ggn, of_fisher
"""The matrices with another path to their products."""


class OfProduct(Check):
    """The check of what a product gave."""

    t: Product

    def looks(self, args: tuple, kwargs: dict[str, Any], result: Any, tape: Tape) -> list[Look]:
        found = tree.flatten(result[0] if self.t.has_aux else result, none_is_leaf=False)[0]
        params = tree.flatten(args[0], none_is_leaf=False)[0]
        names = [self.names[0] + path for path, _ in tree.named_leaves(args[0], none_is_leaf=False)]
        if self.t.record is of_hessian:
            places = [torch.arange(p.numel()) for p in params]
        else:
            sizes = [magnitudes(x, p) for x, p in zip(found, params, strict=True)]
            places = tape.draw(lambda generator: drawn(sizes, self.k, generator)).of
        each = enumerate(zip(found, params, places, strict=True))
        return [self._look(i, names[i], x, p, at) for i, (x, p, at) in each if len(at)]

    @staticmethod
    def _look(leaf: int, name: str, found: torch.Tensor, p: torch.Tensor, places: torch.Tensor) -> Look:
        def called(j: int, *vector: int) -> str:
            return entry(name, p.shape, int(places[j])) + "".join(f" of vector {k}" for k in vector)

        return Look(at_places(found, p, places), lambda entries: (entries(leaf, places), 0.0), called, p.dtype)

    def expected(self, looks: list[Look], args: tuple, kwargs: dict[str, Any], around: Around = None) -> list[Numbers]:
        rewound(self.before)
        if self.t.record is of_hessian:
            whole = _twice_backward(self.t, args, kwargs)
            return [look.expected(lambda leaf, places: whole[leaf][places]) for look in looks]
        t, names = self.t, self.names.without_vector
        given = Given(t.f, t.loss, (args[0], *args[2:]), kwargs, names, t.in_dims, t.out_dims, t.has_aux)
        with given.scope:
            along = _along(t, given, _vectors(args), around)
            return [look.expected(along) for look in looks]


def _vectors(args: tuple) -> Tensors:
    """The leaves of v in the order of the parameters, as a dict may have its keys in another."""
    given = dict(tree.named_leaves(args[1], none_is_leaf=False))
    return [given[path] for path, _ in tree.named_leaves(args[0], none_is_leaf=False)]


def _along(t: Product, given: Given, v: Tensors, around: Around) -> Entries:
    """`(J e) . H (J v)` of drawn entries."""
    if t.record is of_fisher:
        drawing = t.drawing
        split = given.given_split(each=True) if given.loss is not None else given.found_split(losses=drawing is None)
        run = Run(given, split)
        columns = run.gradient if drawing is None else split.drawn(drawing, "ggnvp")
    else:
        split = given.found_split() if given.loss is None else given.given_split(each=False)
        run, columns = Run(given, split, around), None

    def numbers(leaf: int, places: torch.Tensor) -> torch.Tensor:
        ways = [run.forth(leaf, x[None]) for x in v[leaf]] if t.lead else [run.there([x[None] for x in v])]
        rows = []
        for part in in_parts(places, given.args, given.kwargs):
            e = run.forth(leaf, units(given.leaves[leaf], part))
            found = []
            for way in ways:
                same = [x.expand(len(part), *x.shape[1:]) for x in way]
                if columns is None:
                    found.append(run.curved(e, same).sum(1))
                else:
                    found.append((run.along(e, columns) * run.along(same, columns)).sum((0, 2)))
            rows.append(torch.stack(found, 1))
        whole = torch.cat(rows)
        return whole if t.lead else whole[:, 0]

    return numbers


def _twice_backward(t: Product, args: tuple, kwargs: dict[str, Any]) -> Tensors:
    """All entries of the product of a Hessian, or of each of its blocks: `[P, *lead]` of each leaf."""
    leaves, structure = tree.flatten(args[0], none_is_leaf=False)
    vectors, batch = _vectors(args), args[2:]
    leaves = [p.detach().requires_grad_() for p in leaves]
    mode = TwiceDifferentiable()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), mode:
        result = t.f(tree.unflatten(leaves, structure), *(batch if t.loss is None else batch[:-1]), **kwargs)
        result = with_aux(result)[0] if t.has_aux else result
        value = (result if t.loss is None else t.loss(result, batch[-1])).sum()
    with torch.enable_grad(), mode.back(value.device):
        slopes = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)

    def of(which: list[int], v: Tensors) -> Tensors:
        along = [(slopes[i], x) for i, x in zip(which, v, strict=True) if slopes[i].requires_grad]
        if not along:
            return [torch.zeros_like(leaves[i]) for i in which]
        ends, cotangents = zip(*along, strict=True)
        options = {"retain_graph": True, "materialize_grads": True}
        with mode.back(value.device):
            return list(torch.autograd.grad(ends, [leaves[i] for i in which], cotangents, **options))

    if not t.lead:
        return [wide(x).flatten() for x in of(list(range(len(leaves))), vectors)]
    return [torch.stack([wide(of([i], [x])[0]).flatten() for x in v], 1) for i, v in enumerate(vectors)]
