"""Products, functions `(params, v, *batch)` that say what they are, with linearisations, and at fixed arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc._torch.weak import WeakIdMap
from invfunc.arguments.problem import InDims, check_params, of_numpy
from invfunc.callables import check_callable, check_count, check_functions, check_generator, describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.evaluation.processes import ALONE, Processes, named, same, whole
from invfunc.products.given import ProductArguments
from invfunc.products.maps import Kind, Linear
from invfunc.reductions.quantity import Drawing
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

_REFUSED = WeakIdMap[bool]()
"""Products of functions of which forward mode has no derivative."""


@dataclass(frozen=True)
class Space:
    """Trees of tensors of a kind: the vectors that a map takes, or those that it gives."""

    names: Sequence[str]
    """The names of the arguments; an error calls the vectors by the first."""
    structure: Any
    kinds: list[Kind]

    def leaves(self, v: Any, name: str, lead: int = 0) -> list[torch.Tensor]:
        """The leaves of a vector, checked against what they have to be; `lead` axes in front count several vectors."""
        leaves, structure = tree.flatten(v, none_is_leaf=False)
        if structure != self.structure:
            leaves = self._in_order(v, name)
        counts: dict[torch.Size, int] = {}
        for i, (x, kind) in enumerate(zip(leaves, self.kinds, strict=True)):
            right = isinstance(x, torch.Tensor) and x.ndim >= lead and (x.shape[lead:], x.dtype, x.device) == kind
            if not right:
                path, (error, text) = self.paths[i], self._wrong(x, kind, lead)
                raise error(f"{name}{path} {{}}, but {self.name}{path} {{}}.".format(*text))
            counts.setdefault(x.shape[:lead], i)
        if len(counts) > 1:
            (a, i), (b, k) = list(counts.items())[:2]
            raise ArgumentError(
                f"{name}{self.paths[i]} has {a[0]} vectors but {name}{self.paths[k]} has {b[0]}; all "
                "tensors need the same number, along axis 0."
            )
        return leaves

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def paths(self) -> list[str]:
        found = tree.named_leaves(tree.unflatten([0] * len(self.kinds), self.structure), none_is_leaf=False)
        return [path for path, _ in found]

    def _in_order(self, v: Any, name: str) -> list[Any]:
        """The leaves of a tree that has the same ones in another order, or in containers of another type."""
        own = self.paths
        given = {path: x for path, x in tree.named_leaves(v) if x is not None or path in own}
        missing, more = [p for p in own if p not in given], [p for p in given if p not in own]
        if missing or more:
            what = f"has no {name}{missing[0]}" if missing else f"has an entry {name}{more[0]} too many"
            raise ArgumentError(f"{name} {what}; it has to be a tree of tensors like {self.name}.")
        return [given[path] for path in own]

    @staticmethod
    def _wrong(x: Any, kind: Kind, lead: int) -> tuple[type[InvFuncError], tuple[str, str]]:
        """The error that a leaf calls for, with what it is and what it ought to be."""
        if not isinstance(x, torch.Tensor):
            array = ": pass torch.as_tensor of it" if of_numpy(x) else ""
            return ArgumentTypeError, (f"is of type {type(x).__name__}", f"is a tensor{array}")
        if x.dtype != kind.dtype:
            return ArgumentTypeError, (f"has dtype {x.dtype}", f"has {kind.dtype}")
        if x.ndim < lead or x.shape[lead:] != kind.shape:
            wanted = f"has {tuple(kind.shape)}" + (", which is that of each vector behind axis 0" if lead else "")
            return ArgumentError, (f"has shape {tuple(x.shape)}", wanted)
        return ArgumentError, (f"is on {x.device}", f"on {kind.device}")

    def tree(self, leaves: list[torch.Tensor]) -> Any:
        return tree.unflatten(leaves, self.structure)


@dataclass(frozen=True, repr=False, eq=False)
class Linearised(Transform):
    """A linear map `v -> tree`, as a function that has recorded all it needs."""

    shown: str
    linear: Callable[[list[torch.Tensor], int], list[torch.Tensor]]
    takes: Space
    gives: Space
    vector: str = "v"
    lead: int = 0
    memory: Any = ()

    def __repr__(self) -> str:
        return self.shown

    def __call__(self, v: Any) -> Any:
        return super().__call__(v)

    def names(self, count: int) -> Sequence[str]:
        return [self.vector]

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        leaves = self.takes.leaves(args[0], self.vector, self.lead)
        return self.gives.tree(self.linear(leaves, self.lead)), None


@dataclass(frozen=True, repr=False)
class Product(Transform):
    """A function `(params, v, *batch) -> tree like params`, linear in v, made of a function by a transform."""

    name: str
    f: Callable
    record: Callable[[ProductArguments, bool], Linear]
    """The map at some arguments, of the whole matrix or of its blocks."""
    loss: Callable | None = None
    in_dims: InDims = 0
    out_dims: int = 0
    has_aux: bool = False
    blocks: bool = False
    """True if the matrix is that of each parameter alone, with several vectors for each."""
    degree: int = 1
    """The power of a factor of the loss that is in the product."""
    drawing: Drawing | None = None
    """The drawing of columns, if they are drawn."""
    forward: bool = False
    """True for `J^T (...) J v`, so that forward mode may compute J v."""
    spelled: str = ""
    """The options of the transform that make it another product of that name, as they stand in a call."""

    def __post_init__(self) -> None:
        check_functions(self.name, self.f, self.loss)

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", {describe(self.loss)}"
        return f"{self.name}({describe(self.f)}{loss}{self.spelled})"

    @property
    def lead(self) -> int:
        """The axes that v has in front of those of the parameters."""
        return int(self.blocks)

    @property
    def vector(self) -> str:
        return "V" if self.blocks else "v"

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, *batch) -> (v -> product)`: one forward pass for all v.

        With `has_aux`, the pair of that function and aux.
        """
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[Any, Any]:
        if len(args) < 2:
            raise ArgumentError("arguments are missing: the parameters come first, then the vector.")
        given, space = self.given((args[0], *args[2:]), kwargs, names.without_vector)
        leaves = space.leaves(args[1], names.vector, self.lead)
        found, aux = self.directly(given, leaves, self.lead)
        return space.tree(found), aux

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[Any, Any]:
        given, space = self.given(args, kwargs, names)
        linear, aux = self.recorded(given)
        shown = f"{self!r}.linearize({', '.join(names)})"
        return Linearised(shown, linear, space, space, self.vector, self.lead, (args, kwargs)), aux

    def names_of_f(self, count: int) -> ArgumentNames:
        """The names of so many arguments, which are all but the vector."""
        return ArgumentNames(self.f, count, self.loss is not None)

    def given(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[ProductArguments, Space]:
        """The arguments of a call, and the space of the vectors."""
        given = ProductArguments(
            self.f, self.loss, args, kwargs, names, self.in_dims, self.out_dims, self.has_aux, self.drawing
        )
        given.mode.scope = given.scope if self.forward else None
        return given, Space(names, given.structure, given.kinds)

    def directly(
        self, given: ProductArguments, vectors: list[torch.Tensor], lead: int
    ) -> tuple[list[torch.Tensor], Any]:
        """The product of vectors at these arguments, and aux."""
        pushes = self.forward and not lead and not _REFUSED.get(self)
        refused = pushes and not given.push(vectors, losses=self.degree == 2)
        linear, aux = self.recorded(given)
        if refused:  # and not for what is wrong with f or its arguments
            _REFUSED.set(self, True)
        return linear(vectors, lead, keep=False), aux

    def recorded(self, given: ProductArguments) -> tuple[Linear, Any]:
        """The map at these arguments, and aux."""
        with given.scope:
            linear = self.record(given, self.blocks)
            return linear, None if given.aux is None else given.scope.result(given.aux)


def check_product(name: str, product: Any) -> None:
    """Check that a transform of products is given a product."""
    check_callable(name, product)
    if isinstance(getattr(product, "t", product), Statistic):
        raise ArgumentTypeError(
            f"{name}({product!r}): it is a statistic, but has to be a product (params, v, *batch), as `ggnvp(f)` is."
        )
    if getattr(product, "lead", 0):
        raise ArgumentError(
            f"{name}({product!r}): a product of blocks takes several vectors at once; give that of the whole."
        )


def names_of(product: Callable, count: int) -> Sequence[str]:
    """The names, in an error, of the arguments behind a transform of a product: all but the vector."""
    known = getattr(product, "names_of_f", None)
    if known is not None:
        return known(count)
    names = ArgumentNames(product, count + 1)
    return [*names[:1], *names[2:]]


def space_of(args: tuple, names: Sequence[str]) -> Space:
    """The space of the parameters, which may be divided among processes."""
    if not args:
        raise ArgumentError("the parameters are missing.")
    check_params(args[0], names, 0, whole=False)
    leaves, structure = tree.flatten(args[0], none_is_leaf=False)
    if not leaves:
        raise ArgumentError(f"{names[0]} has no tensors in it.")
    return Space(names, structure, [Kind.of(p) for p in leaves])


@dataclass(frozen=True)
class OfAll(Space):
    """The space of vectors that several processes give, each the same."""

    processes: Processes = ALONE

    def leaves(self, v: Any, name: str, lead: int = 0) -> list[torch.Tensor]:
        def looked() -> tuple[list[torch.Tensor], dict[str, str]]:
            found = super(OfAll, self).leaves(v, name, lead)
            return found, named(name, self.tree(found))

        found, each = self.processes.told(name, looked)
        same(each)
        return tree.tensors((whole(self.processes, name, self.tree(found)),))


def along(
    product: Callable, args: tuple, kwargs: dict[str, Any], space: Space, several: bool = False
) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """From the leaves of a vector to those of its product, without aux; linearised once where that can be done. Of
    `several` vectors, which an axis in front counts, to those of all."""
    aux, linearize = getattr(product, "has_aux", False), getattr(product, "linearize", None)
    if linearize is not None:
        made = linearize(*args, **kwargs)
        at = made[0] if aux else made
    else:

        def at(v: Any) -> Any:
            result = product(args[0], v, *args[1:], **kwargs)
            return result[0] if aux else result

    of_one = through(at, space)
    if not several:
        return of_one
    if isinstance(at, Linearised):
        return through(replace(at, lead=1), space, 1)
    return lambda v: [torch.stack(x) for x in zip(*map(of_one, zip(*v, strict=True)), strict=True)]


def through(at: Callable, space: Space, lead: int = 0) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A product of trees as one of leaves, each as a whole; `lead` axes in front count several vectors."""

    def of_leaves(v: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves: list[Any] = space.leaves(at(space.tree([*v])), "product", lead)
        return [x.full_tensor() if sharded(x) else x for x in leaves]

    return of_leaves


def check_probes(shown: str, probes: Any, generator: Any) -> None:
    """Check a number of random vectors, and from what they are drawn."""
    check_count(f"{shown}, ", "probes", probes)
    check_generator(f"{shown}, ", generator, "the vectors are drawn")
