"""Products of curvature matrices with vectors, alone and as statistics of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc._torch.weak import WeakIdMap
from invfunc.callables import (
    check_callable,
    check_choice,
    check_count,
    check_functions,
    check_generator,
    describe,
    fisher_columns,
    spelled,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.evaluation.engine import JointFold, check_joined
from invfunc.evaluation.kinds import LossPart
from invfunc.evaluation.processes import ALONE, Processes, named, same, whole
from invfunc.plan import Options
from invfunc.problem import BoundProblem, InDims, check_params, of_numpy
from invfunc.products.curvature import of_fisher, of_ggn, of_hessian, of_positive_hessian
from invfunc.products.given import Kind, Linear, ProductArguments
from invfunc.reductions.reduction import GRADIENT, Drawing, Quantity, Reduction
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
        given = ProductArguments(self, args, kwargs, names)
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


def hvp(
    f: Callable,
    loss: Callable | None = None,
    *,
    blocks: bool = False,
    modify: Literal["abs", "clip"] | None = None,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """The product of the Hessian of a loss with a vector, a tree like the parameters.

        jvp(grad(lambda p: f(p, *batch).sum()), (params,), (v,))[1]

        for name in params:                                  # with blocks=True, over all dimensions of the parameter
            H = hessian(lambda p: f({**params, name: p}, *batch).sum())(params[name])
            H V[name][k]                                     # for k in range(K)

    f may mix its samples, as batch norm in train mode does. It may draw random numbers; a linearisation draws them once
    for all vectors.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]` losses, whose sum then counts; with
            `loss` a model function `f(params, *inputs)`. f and loss are pure in torch.func's sense (see the
            conventions).
        loss: `loss(outputs, target)`, any twice differentiable one.
        blocks: multiply the diagonal block of each parameter alone, with K vectors for each.
        modify: with blocks, multiply the blocks of the positive-curvature Hessian (PCH), `J^T H J + sum(J_s^T
            positive(h_s) J_s)` over the nonlinear operations s of the model. h_s is the second derivative of an
            element-wise operation times the gradient at its output, J_s the Jacobian of its input in the parameter.
            With h_s unchanged, this is the block of the Hessian. "abs" takes the absolute value of h_s, "clip" takes 0
            where it is negative: both are positive semi-definite, and no smaller than the block of the GGN. f and loss
            are as in `ggnvp`, and the nonlinear operations of f are element-wise.
        in_dims, out_dims: as in `ggnvp`. Only `modify` looks at the samples.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *batch) -> tree`, with loss `(params, v, *inputs, target) -> tree`, of tensors like the
        parameters and v; with blocks, those of V and of the result are `[K, *p]`. Its `.linearize(params, *batch)`
        gives a function `v -> tree` that has run f once.

    Raises:
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than a loss,
            or one that no parameter reaches. With `modify`: a nonlinear operation is not element-wise (it is named).
        SplitError, ConvexityError, SampleAxisError: with `modify`, as in `ggnvp`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: (x @ w).exp().sum()
        >>> w, x = torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> invfunc.hvp(f)(w, torch.tensor([1.0, 0.0]), x)
        tensor([2., 1.])
        >>> product = invfunc.hvp(f).linearize(w, x)
        >>> torch.stack([product(e) for e in torch.eye(2)])
        tensor([[2., 1.],
                [1., 1.]])

        >>> f = lambda p, x: (x * p["a"] * p["b"]).exp().sum()
        >>> params = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
        >>> V = {"a": torch.tensor([1.0, 10.0]), "b": torch.tensor([1.0, 0.0])}
        >>> invfunc.hvp(f, blocks=True)(params, V, torch.zeros(3) + 0.5)["a"]
        tensor([ 8.1548, 81.5485])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation; `streamed`; but for blocks
    `linear_operator`, `estimate_trace`, `estimate_diagonal`.

    Cost: two and a half to four gradients, and the memory of two. A linearisation keeps that memory, and each product
    takes about half of the time. Attention runs without fused kernels, which have no second derivative. With blocks,
    two gradients, and for each parameter K backward passes through the part of the network behind it, batched.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994; BackPACK's hessianfree, HMP (Dangel, Kunstner
    and Hennig, ICLR 2020) and PCHMP; Chen, "Positive-curvature Hessian", arXiv 1802.06502.
    """
    check_choice(f"hvp({describe(f)}, ", "modify", modify, ("abs", "clip", None))
    if modify and not blocks:
        raise ArgumentError(
            f"hvp({describe(f)}, modify={modify!r}): it is of the blocks of single parameters; pass blocks=True, too."
        )
    record = partial(of_positive_hessian, modify=modify) if modify else of_hessian
    options = spelled(blocks=blocks, modify=modify)
    return Product("hvp", f, record, loss, in_dims, out_dims, has_aux, blocks, spelled=options)


def ggnvp(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["exact", "mc", "empirical"] = "exact",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    blocks: bool = False,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Product:
    """The product of the generalised Gauss-Newton matrix (GGN) of a loss with a vector, a tree like the parameters.

        z, Jv = jvp(lambda p: f(p, *inputs), (params,), (v,))
        HJv = jvp(grad(lambda z: loss(z, target)), (z,), (Jv,))[1]
        vjp(lambda p: f(p, *inputs), params)[1](HJv)[0]

        G = batch_grad(f)(params, *batch)
        sum(g * (g * v).sum() for g in G)                    # with fisher="empirical", for one tensor of parameters

        for name in params:                                  # with blocks=True, over all dimensions of the parameter
            J = jacrev(lambda p: f({**params, name: p}, *inputs))(params[name])
            J^T H J V[name][k]                               # for k in range(K)

    `diag_ggn` is the diagonal of this matrix. The model may mix its samples, as batch norm in train mode does, or draw
    random numbers; only Fisher matrices need samples that are kept apart.

    The steps, pixels or entries of a sample belong to one gradient, which is squared as a whole. (curvlinops'
    `EFLinearOperator` takes each step of outputs `[N, T, C]` for a sample of its own, and puts 1/E in place of 1/E^2,
    with E the losses that a mean averages: N T C of mse_loss and binary_cross_entropy_with_logits, N T of a
    cross_entropy, 1 of a sum. It is E times this one for T = 1, and else the sum over t of 1/E times that of the `[N]`
    losses of step t, each summed over its entries.)

    Args:
        f: a model function `f(params, *inputs)`, which returns outputs, a tensor or a pytree of them. Without `loss`,
            a loss function `f(params, *batch)`, whose outputs are found: those that are marked by `outputs(z)`, or else
            what torch's convex losses are called with. f and loss are pure in torch.func's sense (see the conventions).
        loss: `loss(outputs, target)`, convex in the outputs. A loss without known structure whose Hessian, sample by
            sample (of all outputs, where it mixes samples), has more than 2^24 numbers is not checked for that.
        fisher: the matrix. "exact" is the GGN. "mc" is made of the rows `S[m, n]` of `sqrt_ggn(..., mc_samples=M)`,
            gradients at targets drawn from the model's prediction: on average it is the Fisher matrix, which equals the
            GGN, with the scale of the loss. "empirical" is made of the per-sample gradients at the given targets. A
            mean loss puts 1/N^2 into it: return the `[N]` losses, each a negative log-likelihood.
        mc_samples: with fisher="mc", the number of targets drawn for each sample.
        generator: draws them; needed with fisher="mc". A linearisation draws once for all vectors.
        sample: `sample(outputs, generator) -> target` draws targets for a loss of your own.
        blocks: multiply the diagonal block of each parameter alone, with K vectors for each.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        out_dims: the sample axis of the outputs of a model function.
        has_aux: f returns `(result, aux)`, and the transform `(product, aux)`.

    Returns:
        A function `(params, v, *inputs, target) -> tree`, without `loss` `(params, v, *batch) -> tree`, of tensors like
        the parameters and v; with blocks, those of V and of the result are `[K, *p]`. Its `.linearize(params, *batch)`
        gives a function `v -> tree` that has run f once.

    Raises:
        SplitError: no outputs are found, or a path from the parameters to the result goes around them.
        ConvexityError: the loss is not convex in the outputs.
        SampleAxisError: the samples are mixed, of a Fisher matrix.
        ArgumentError, ArgumentTypeError: v is not a tree like the parameters, or f returns something else than outputs
            or a loss, or a result that depends on no parameter; there is no generator, or no sampler for the loss.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x, y = torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 1)
        >>> invfunc.ggnvp(f, torch.nn.functional.mse_loss)(w, torch.tensor([[1.0], [0.0]]), x, y)
        tensor([[2.],
                [1.]])

        >>> f = lambda w, x, y: (x @ w - y).square() / 2
        >>> w, y = torch.zeros(2), torch.tensor([1.0, 3.0])
        >>> invfunc.ggnvp(f, fisher="empirical")(w, torch.tensor([1.0, 0.0]), x, y)
        tensor([10.,  9.])

        >>> f = lambda p, x: x @ p["w"] + p["b"]
        >>> params, V = {"w": torch.zeros(2, 1), "b": torch.zeros(1)}, {"w": torch.ones(1, 2, 1), "b": torch.ones(1, 1)}
        >>> invfunc.ggnvp(f, torch.nn.functional.mse_loss, blocks=True)(params, V, x, torch.zeros(2, 1))["w"]
        tensor([[[3.],
                 [2.]]])

    Composes with: `torch.func.grad`, `vmap`, `jvp` around it and around its linearisation; `streamed`; but for blocks
    `linear_operator`, `estimate_trace`, `estimate_diagonal`.

    Cost: two gradients, and little more than the memory of one. `J v` is taken in forward mode, in a run of f of its
    own that keeps no graph and draws the same random numbers. Where f has no derivative there, and inside of
    torch.func, it is three to four gradients and the memory of two. A linearisation runs f once and keeps that memory;
    each of its products takes two gradients more. Attention runs without fused kernels. With blocks, two gradients, and
    for each parameter K Jacobian products and K pullbacks through the part of the network behind it, batched. For one
    cross entropy of the outputs, `p o u - p (p . u)` overwrites u = J v, for some rows at a time, and large outputs of
    `F.linear` without a bias have one tensor of tangents: with the logits of a vocabulary, two tensors of their size
    exist at once, them and J v (of a Fisher matrix "mc" four).

    Source: Schraudolph, "Fast curvature matrix-vector products", 2002; BackPACK's hessianfree and GGNMP (Dangel,
    Kunstner and Hennig, ICLR 2020). Of Fisher matrices: Martens, "New insights and perspectives on the natural gradient
    method", JMLR 2020; Kunstner, Balles and Hennig, "Limitations of the empirical Fisher approximation", NeurIPS 2019.
    """
    drawing = fisher_columns("ggnvp", fisher, mc_samples, generator, sample).get("drawing")
    exact, degree = fisher == "exact", 2 if fisher == "empirical" else 1
    record, options = of_ggn if exact else of_fisher, spelled(fisher=None if exact else fisher, blocks=blocks)
    dims = in_dims, out_dims, has_aux
    return Product("ggnvp", f, record, loss, *dims, blocks, degree, drawing, forward=True, spelled=options)


T = TypeVar("T")


class Summed(Reduction):
    """A reduction that keeps the sum of the products of a parameter with something in a power of a loss."""

    def __init__(self, degree: int) -> None:
        self.power = degree


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


@dataclass(eq=False)
class WithVector:
    """A product with a vector, or several, as a statistic of a batch."""

    product: Product
    vectors: list[torch.Tensor]
    lead: int
    members = ()
    others = None
    sweeps = 1

    def __post_init__(self) -> None:
        p = self.product
        self.f, self.loss, self.has_aux, self.drawing = p.f, p.loss, p.has_aux, p.drawing
        self.drawings = [] if p.drawing is None else [p.drawing]

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
        return BatchOfProduct(self, BoundProblem.of_no_samples(self.product, params))
