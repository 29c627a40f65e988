"""The eigenvalues and eigenvectors of a curvature matrix, by way of a small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from invfunc import thresholds
from invfunc._extras import ticking
from invfunc._torch.functorch import transforming
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.precision import doubled
from invfunc._torch.values import anywhere, near
from invfunc.arguments.problem import InDims, Problem
from invfunc.budget.size import free_on, told
from invfunc.callables import check_functions, describe
from invfunc.column_options import fisher_columns
from invfunc.core.evaluate import evaluated
from invfunc.errors import ArgumentError
from invfunc.loss.square_root import Columns, rooted
from invfunc.plan import Options
from invfunc.products.curvature import of_root, split_of_fisher
from invfunc.products.given import Given, States
from invfunc.products.maps import Kind, Linear
from invfunc.products.product import Space
from invfunc.products.rows import Rows
from invfunc.products.sample_space import Eigenpairs, gram
from invfunc.products.split import Split
from invfunc.reductions.quantity import ColumnKind, Drawing, Quantity
from invfunc.reductions.squares import ProductsOfColumns
from invfunc.report import Explanation
from invfunc.transform import ArgumentNames, Transform


def eigenpairs(
    f: Callable,
    loss: Callable | None = None,
    *,
    fisher: Literal["mc", "exact", "empirical"] = "exact",
    mc_samples: int = 1,
    generator: torch.Generator | None = None,
    sample: Callable | None = None,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
    progress: bool = False,
) -> Decomposition:
    """The eigenpairs of the generalised Gauss-Newton matrix (GGN), or of the empirical Fisher matrix.

        S = sqrt_ggn(f, loss)(params, *inputs, target)       # [V, N, *p]; "empirical": batch_grad
        l, Q = torch.linalg.eigh(S @ S.T)                    # [V N, V N], as P of H = S.T @ S may be too many
        E = Q.T @ S / l.sqrt()[:, None]                      # H @ E[k] == l[k] * E[k]

    Neither S nor the matrix [P, P] is formed: `S S^T` comes from `gram`'s products of factors, and all that follows is
    products with J and J^T. The result solves damped systems exactly in the space of the samples,
    `(H + d)^-1 v = (v - S^T (S S^T + d)^-1 S v) / d`: natural gradients, influence functions, the covariance of a
    Laplace approximation.

    Args:
        f: a model function `f(params, *inputs)`. Without `loss`, a loss function `f(params, *batch)`, whose outputs are
            found as those of `diag_ggn` are. f and loss are pure in torch.func's sense (see the conventions).
        loss: `loss(outputs, target)`, convex in the outputs, a scalar or `[N]`, which keeps the samples apart.
        fisher: "exact", the GGN, with V columns (rows of `sqrt_ggn`) for each sample: one less than classes for a cross
            entropy, one for each output for another loss; "mc", its estimate from drawn columns, V = `mc_samples`;
            "empirical", from the per-sample gradients, V = 1. A mean loss puts 1/N into a GGN and 1/N^2 into the
            empirical matrix.
        mc_samples, generator, sample: as in `kfac`, for `fisher="mc"`.
        in_dims, out_dims, has_aux: as in `ggnvp`.
        progress: whether to show a bar while the matrix to be decomposed is computed.

    Returns:
        A function `(params, *inputs, target) -> Eigenpairs`, without `loss` `(params, *batch) -> Eigenpairs`. It has
        `values [k]`, those that are not 0, largest first; `vectors(top)`, a tree of tensors `[k, *p]`;
        `solve(v, damping)`, `pairs @ v`, `logdet(damping)`, `trace()`; `slopes(top)` and `curvatures(top)`, `[N, k]` of
        each sample; `inverse(damping, top)` for `predictive_covariance`. `kronecker.solve` and `logdet` take it, too.

    Raises:
        SplitError, ConvexityError, SampleAxisError, ArgumentError: as in `diag_ggn`; inside of torch.func; gradients
            that are not finite; a decomposition that takes more memory than is free.
        MissingExtraError: `progress` without tqdm: `pip install 'invfunc[progress]'`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: x @ w
        >>> w, x, y = torch.zeros(3, 1), torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]), torch.ones(2, 1)
        >>> pairs = invfunc.eigenpairs(f, torch.nn.MSELoss(reduction="sum"))(w, x, y)      # diag(4, 4, 0)
        >>> pairs.values.round(decimals=3)
        tensor([4., 4.])
        >>> pairs.solve(torch.tensor([[5.0], [10.0], [2.0]]), damping=1.0).round(decimals=3)
        tensor([[1.],
                [2.],
                [2.]])

        Influence of each sample on a loss: what leaving it out does to it, to first order.

        >>> losses = lambda w, x, y: (x @ w - y).square()[:, 0]
        >>> of_test = torch.tensor([[1.0], [0.0], [0.0]])                 # the gradient of the loss of a test sample
        >>> step = pairs.solve(of_test, damping=1.0)
        >>> (invfunc.batch_grad(losses)(w, x, y) * step).flatten(1).sum(1).round(decimals=3)
        tensor([-0.4000, -0.4000])

        How sure the model is, by Laplace's approximation with a prior of variance 1.

        >>> invfunc.predictive_covariance(f, pairs.inverse(1.0))(w, x).round(decimals=3).flatten()
        tensor([0.4000, 0.4000])

    Composes with: see `Eigenpairs`. Not with `torch.func` around it, as how many eigenvalues there are depends on
    numbers, nor with `chunked`, `streamed`, `distributed`.

    Cost: two forward passes, the products of `gram` with V columns for each sample, and an eigendecomposition of
    `[V N, V N]` in float64: `(V N)^3`, and some `40 (V N)^2` bytes while it runs, for V N up to some 10^4. Kept are the
    eigenvectors, `(V N)^2` numbers, and the graph of a linearisation, the memory of two gradients. Where V N is 2 P
    or more, S is formed by P products with J and has a singular value decomposition: `V N P^2`, and some `24 V N P`
    bytes. Where the samples of f are not followed, S is formed too, by V N products with J^T. `explain` says which side
    it is; what is not free is an error before it is computed.

    Source: Dangel, Tatzel and Hennig, "ViViT: curvature access through the generalized Gauss-Newton's low-rank
    structure", TMLR 2022; Koh and Liang, "Understanding black-box predictions via influence functions", ICML 2017; Ren
    and Goldfarb, "Efficient subsampled Gauss-Newton and natural gradient methods", 2019.
    """
    columns = fisher_columns("eigenpairs", fisher, mc_samples, generator, sample)
    drawing = columns.get("drawing")
    return Decomposition(f, columns["kind"], loss, drawing, in_dims, out_dims, has_aux, progress)


@dataclass(frozen=True, repr=False)
class Decomposition(Transform):
    """A function `(params, *batch) -> Eigenpairs`."""

    f: Callable
    kind: ColumnKind
    loss: Callable | None = None
    drawing: Drawing | None = None
    in_dims: InDims = 0
    out_dims: int = 0
    has_aux: bool = False
    progress: bool = False
    owned = False  # what it gives is no tree
    outermost = True
    of_one_batch = (
        "its eigenvectors are in the space of the samples of one batch. scipy's eigsh finds those of a data set, of "
        "linear_operator(streamed(ggnvp(f, loss)))"
    )

    def __post_init__(self) -> None:
        check_functions("eigenpairs", self.f, self.loss)

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", {describe(self.loss)}"
        return f"eigenpairs({describe(self.f)}{loss})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[Any, Any]:
        if transforming():
            raise ArgumentError(
                "it is inside of a transform of torch.func, where there are no eigenpairs, as how many there are "
                "depends on numbers. Take them outside, and transform what is done with them."
            )
        with torch.no_grad():
            dims = self.in_dims, self.out_dims, self.has_aux
            given = Given(self.f, self.loss, args, kwargs, names, *dims, self.drawing)
            states = given.states
            with given.scope:
                split = self._split(given)
                root, slope = self._rows(given, split)
                aux = given.scope.result(given.aux)
            space = Space(names, given.structure, [Kind.of(p) for p in given.leaves])
            (v, n), size = root.there.into[0].shape, sum(p.numel() for p in given.leaves)
            of_columns = _smaller(v * n, size)
            self._check_room(given.leaves[0].device, v * n, size)
            title = repr(self) if self.progress else ""
            if of_columns:
                small = self._products(given.problem, root, states, title)
            else:
                small = doubled(_formed(root, space.kinds, size, title)[0]).movedim(0, -1)
            if anywhere(~small.isfinite()):
                raise ArgumentError("per-sample gradients are not finite: f or its loss gives NaN or inf.")
            return Eigenpairs(repr(self), space, root, slope, small, of_columns), aux

    def _check_room(self, device: torch.device, columns: int, size: int) -> None:
        """Check that there is memory for the decomposition."""
        side, wanted = _decomposed(columns, size)
        if wanted > (there := free_on(device)):
            raise ArgumentError(
                f"it decomposes {side}, in {told(wanted)}, but {told(int(there))} are free. Pass fewer samples, or "
                "draw columns: fisher='mc'."
            )

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> Explanation:
        """What it decomposes at these arguments, and in how much memory."""
        with torch.no_grad():
            dims = self.in_dims, self.out_dims, self.has_aux
            given = Given(self.f, self.loss, args, kwargs, names, *dims, self.drawing)
            states = given.states
            with given.scope:
                v, n = self._rows(given, self._split(given))[0].there.into[0].shape
            set_states(states)
        size = sum(p.numel() for p in given.leaves)
        side, wanted = _decomposed(v * n, size)
        told_of = f"eigenpairs of {side}, of {v} columns of {n} samples and {size} parameters, in about {told(wanted)}"
        return Explanation(repr(self), 0, 0, 0, wanted, 1.0, told_of, plan=" ")

    def _products(self, given: Problem, root: Linear, states: States, title: str) -> torch.Tensor:
        """`S S^T` of the rows S of a map, `[V, N, V, N]` in float64: from each sample's share of them, if the core has
        these of the same numbers, or else from rows that are formed."""
        quantity, after = Quantity(ProductsOfColumns(), self.kind, self.drawing), [(g, state_of(g)) for g, _ in states]
        (kind,), u = root.there.into, torch.arange(1, root.there.into[0].shape.numel() + 1).cos()
        try:
            set_states(states)  # f is run again
            with ticking(title, 1) as ticks:
                ticks.expect(1)
                (small,), _ = evaluated(given, [quantity], Options(dense=True))
                ticks.done()
            u = u.reshape(kind.shape).to(small)
            ours, theirs = torch.tensordot(small, u, 2), root(root.transposed([u.to(kind.dtype)]))[0]
            if near(theirs, ours.to(theirs), ours.abs().amax().to(theirs)):
                return small
        except Exception:  # f is not followed, as the loss is of several outputs, say
            pass
        set_states(after)
        v, n = kind.shape
        rows = _formed(root.transposed, [kind], v * n, title) if v else [given.leaves[0].new_zeros(0, 0)]
        return gram(rows, doubled(rows[0]).new_zeros(v * n, v * n)).reshape(v, n, v, n)

    def _rows(self, given: Given, split: Split) -> tuple[Linear, Linear | None]:
        """The square root as a map, and the shares of the gradient as another."""
        with given.mode.back(split.result.device):
            slope: list[Columns] = [split.gradient()] if split.roots else []
            if self.kind.first_order:
                return of_root(given, split, Rows(split, slope)), None
            columns = [rooted(c, "all") for c in split.hessian()] if self.drawing is None else []
            columns = split.drawn(self.drawing, "eigenpairs") if self.drawing is not None else columns
        return of_root(given, split, Rows(split, columns)), of_root(given, split, Rows(split, slope))

    def _split(self, given: Given) -> Split:
        if self.kind.first_order:
            return split_of_fisher(given)
        return given.found_split() if self.loss is None else given.given_split(each=True)


def _smaller(columns: int, size: int) -> bool:
    """Whether the products of the columns are decomposed, and not the columns themselves."""
    return columns < 2 * size


def _decomposed(columns: int, size: int) -> tuple[str, int]:
    """The matrix that is decomposed, and about how many bytes that takes, with what is kept."""
    if _smaller(columns, size):
        return f"a symmetric matrix [{columns}, {columns}]", 40 * columns**2
    return f"a matrix [{columns}, {size}]", 8 * (3 * columns * size + 4 * size**2)


def _formed(of: Linear, kinds: list[Kind], size: int, title: str) -> list[torch.Tensor]:
    """The images `[size, ...]` of unit vectors, some at a time."""
    found, at_once = [], thresholds.DIRECTIONS
    with ticking(title, 1) as ticks:
        ticks.reach(1)
        ticks.expect(-(-size // at_once))
        for start in range(0, size, at_once):
            units = torch.eye(min(at_once, size - start), size, device=kinds[0].device).roll(start, 1)
            parts = units.split([kind.shape.numel() for kind in kinds], 1)
            given = [x.reshape(len(x), *kind.shape).to(kind.dtype) for x, kind in zip(parts, kinds, strict=True)]
            found.append(of(given, 1))
            ticks.done()
    return [*map(torch.cat, zip(*found, strict=True))]
