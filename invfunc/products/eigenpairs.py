"""The eigenvalues and eigenvectors of a curvature matrix, by way of a small one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
import torch.nn.functional as F

from invfunc import thresholds, tree
from invfunc._extras import kind, ticking
from invfunc._torch.functorch import innermost, transforming
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.sharded import sharded
from invfunc._torch.values import anywhere, double_on, doubled, near
from invfunc.budget import free_on
from invfunc.budget import told as in_words
from invfunc.callables import check_count, check_functions, describe, fisher_columns
from invfunc.core.evaluate import kept
from invfunc.errors import ArgumentError, InvFuncError
from invfunc.kronecker.matrix import LowRank, Whole
from invfunc.linear_algebra.matrices import Damping, damped, wide
from invfunc.loss.square_root import Columns, rooted
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.plan import Explanation, Options
from invfunc.problem import BoundProblem, InDims
from invfunc.products.curvature import OutputRows, of_root
from invfunc.products.given import Direction, Kind, Linear, ProductArguments, Pull, Scope, States, Vectors
from invfunc.products.product import Space, check_product, ggnvp, names_of, space_of, through
from invfunc.reductions.columns import ProductsOfColumns
from invfunc.reductions.reduction import ColumnKind, Drawing, Quantity
from invfunc.spectra import largest
from invfunc.transform import ArgumentNames, Transform, told

RIGHT = 1e-4
"""The part of a result that may be rounding, unless parameters in half precision have larger ones themselves."""


class Eigenpairs(Whole):
    """A symmetric positive semi-definite matrix over all parameters, `H = S^T S`, known by `S S^T = Q diag(l) Q^T`.

        S = torch.cat([s.flatten(0, 1).flatten(1) for s in sqrt_ggn(f, loss)(params, x, y).values()], 1)   # [V N, P]
        l, Q = torch.linalg.eigh(S @ S.T)                # as long as there are samples, not parameters
        E = Q.T @ S / l.sqrt()[:, None]                  # the eigenvectors of H with eigenvalues that are not 0
        v / damping - S.T @ Q @ ((Q.T @ S @ v) / (damping * (damping + l)))      # (H + damping)^-1 v

    S is not formed: `S v` and `S^T u` are products with the Jacobian and its transpose. `eigenpairs` makes it.

    `S S^T` and all that follows from it are in float64; products with J are in the dtype of the parameters, eps the
    distance of 1 to the next number there. `values`, `vectors`, `slopes` and `curvatures` leave out eigenvalues below
    `16 eps (l_max + sqrt(V N) d_max)`, with d_max the largest entry on the diagonal of `S S^T`: an eigenvector is right
    to about `eps sqrt(l_max / l)`, in float32 to 1e-4 at that threshold. `solve`, `logdet` and `inverse` take all.

    In float32 `solve` and `inverse` are right to 1e-4, or an error (to 6 % in bfloat16). What `solve` gives cancels
    along large eigenvectors: `eps |v| / damping` is rounding, and an error where that is more than 5e-5 of the result,
    as for a gradient with `l_max / damping` above some 1e4. Covariances with `inverse` are right up to
    `eps sqrt(l_max / damping) / 2`, so for `l_max / damping` below 3e6. In-place writes to parameters and data are
    errors, too, as long as they are not made through `.data`. Where a device has no float64, all of this is an error
    unless `eps l_max / damping` is as small.

    With `top=` S is `E * l.sqrt()[:, None]` of the largest eigenvalues alone, and all that it gives is of the matrix
    `S^T S` of that rank; `bounds` are then the lengths of the residuals `|H e - l e|`, with rounding as far as products
    that are not symmetric show it, and `16 eps l_max`.

    Composes with: `kronecker.solve` and `kronecker.logdet` in place of factors, `predictive_covariance` (`inverse`);
    `torch.func.grad`, `vmap`, `jvp` around `solve` and `@` in v, around `solve`, `logdet` and `inverse` in damping.
    There are no derivatives in the parameters and data. `torch.save` and `torch.load` keep it, with its vectors in
    place of the graph that it holds: `k P` numbers.

    Cost: `solve`, `@`: a product with J and one with J^T, about half of a gradient each, in the memory of the graph
    that is kept; `solve` three times as much where rounding of the first product shows. `vectors`, `slopes`: one or two
    such products for each vector, 16 at a time; `vectors` and `inverse` take `k P` numbers, and `inverse` `k^2 P`
    multiplications in float64. `curvatures`, `values`, `logdet`: none.

    Source: Dangel, Tatzel and Hennig, "ViViT", TMLR 2022; Woodbury (1950).
    """

    def __init__(
        self,
        shown: str,
        space: Space,
        root: Linear,
        values: torch.Tensor,
        rows: torch.Tensor,
        bounds: torch.Tensor,
        slope: Linear | torch.Tensor | None = None,
        of_samples: bool = True,
    ) -> None:
        """Of the rows S `[V, N, P]` as a map, and in float64 eigenvalues `[k]`, Q^T `[k, V, N]` and how far off values
        may be, `[k]`; the rows of the gradient as another map, unless they are S."""
        self._shown, self._space, self._root, self._slope = shown, space, root, slope
        self._all, self._rows, self._bounds, self._of_samples = values.clamp(min=0), rows, bounds, of_samples
        self._kind, self._eps = _coarsest(space.kinds)
        self._dtype = wide(self._kind)
        self.rank: int = int((values > bounds).sum()) if of_samples else len(values)

    def __getstate__(self) -> dict[str, Any]:
        """Tensors, names and numbers alone: the map is written as its rows `Q^T S`, `[k, P]`."""
        rows = self._joined(len(self._all), torch.ones_like(self._all))
        state = {"values": self._all, "rows": self._rows, "images": self._space.tree(rows)}
        state |= {"bounds": self._bounds, "of_samples": self._of_samples}
        slopes = None if self._slope is None else self.slopes()
        return {**state, "slopes": slopes, "shown": self._shown, "name": self._space.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        leaves, structure = tree.flatten(state["images"], none_is_leaf=False)
        kinds = [Kind.of(x)._replace(shape=x.shape[1:]) for x in leaves]
        space, root = Space([state["name"]], structure, kinds), formed(state["rows"], leaves)
        more = state["bounds"], state["slopes"], state["of_samples"]
        self.__init__(state["shown"], space, root, state["values"], state["rows"], *more)

    def __repr__(self) -> str:
        return f"Eigenpairs({self._shown}, rank {self.rank} of {self.size}{kind(self._space.kinds)})"

    @property
    def size(self) -> int:
        """P, how many numbers the parameters have."""
        return sum(kind.shape.numel() for kind in self._space.kinds)

    @property
    def values(self) -> torch.Tensor:
        """The eigenvalues that are not 0, the largest first: `[k]`."""
        return self._all[: self.rank].to(self._dtype)

    @property
    def bounds(self) -> torch.Tensor:
        """The distance of each value to an eigenvalue of the matrix at most, rounding with it where it shows: `[k]`."""
        return self._bounds[: self.rank].to(self._dtype)

    def vectors(self, top: int | None = None) -> Any:
        """The eigenvectors of the largest eigenvalues, by default of all that are not 0: a tree of tensors `[k, *p]`.

        They are orthogonal and of length 1, over all parameters together.
        """
        return self._space.tree(self._joined(self._count("vectors", top), self._all.rsqrt()))

    def slopes(self, top: int | None = None) -> torch.Tensor:
        """The slope of each sample along the eigenvectors, `G[n] . e_k`: `[N, k]`, which sum to those of the loss."""
        count = self._count("slopes", top, of_samples=True)
        if self._slope is None:  # S is the gradient
            return (self._all[:count].sqrt()[:, None] * self._rows[:count, 0]).T.to(self._dtype)
        if isinstance(self._slope, torch.Tensor):
            return self._slope[:, :count]
        found = [self._slope(block, 1)[0][:, 0] for block in self._blocks(count, self._all.rsqrt())]
        return (torch.cat(found).T if found else self._all.new_zeros(self._rows.shape[2], 0)).to(self._dtype)

    def curvatures(self, top: int | None = None) -> torch.Tensor:
        """The curvature of each sample along the eigenvectors, `e_k^T H[n] e_k`: `[N, k]`, which sum to `values`."""
        count = self._count("curvatures", top, of_samples=True)
        return (self._all[:count, None] * self._rows[:count].square().sum(1)).T.to(self._dtype)

    def trace(self) -> torch.Tensor:
        """The sum of the eigenvalues."""
        return self._all.sum().to(self._dtype)

    def __matmul__(self, v: Any) -> Any:
        """The product with a tree of vectors `[*lead, *p]`."""

        def product() -> Any:
            vectors, lead = self._leaves(v)
            return self._space.tree(self._root.transposed(self._root(vectors, lead), lead))

        return self._told(" @ v", product)

    def solve(self, v: Any, damping: Damping = 0.0) -> Any:
        """The product of the inverse of `H + damping I` with a tree of vectors `[*lead, *p]`."""

        def solved() -> Any:
            vectors, lead = self._leaves(v)
            shift = self._damping(damping)
            found, least = self._solved(vectors, lead, shift), self._least(shift)
            size = self._eps * _norms(vectors, lead) / least  # rounding of terms that cancel along large eigenvectors
            more = (self._all[:1].sum() / least).sqrt()  # as much of S v
            if anywhere(size * more > self._right * _norms(found, lead)):
                images = self._root.transposed(self._root(found, lead), lead)
                rest = [x - (y + (shift * z).to(z)) for x, y, z in zip(vectors, images, found, strict=True)]
                found = [x + y for x, y in zip(found, self._solved(rest, lead, shift), strict=True)]
                self._enough(2 * size / _norms(found, lead), shift)
            return self._space.tree(found)

        return self._told(".solve(v, damping)", solved)

    def _solved(self, vectors: list[torch.Tensor], lead: int, shift: torch.Tensor) -> list[torch.Tensor]:
        """Vectors times the inverse, with the rounding of `S v`, which a second step removes."""
        (along,) = self._root(vectors, lead)
        undamped = anywhere(shift == 0)
        weights = self._all.square().reciprocal() if undamped else -1 / (shift * (shift + self._all))
        inner = along.to(self._rows).flatten(-2) @ self._rows.flatten(1).T * weights
        sent = torch.tensordot(inner, self._rows, 1).to(along.dtype)
        images = self._root.transposed([sent], lead)
        return images if undamped else [(x / shift).to(x) + y for x, y in zip(vectors, images, strict=True)]

    def logdet(self, damping: Damping = 0.0) -> torch.Tensor:
        """The logarithm of the determinant of `H + damping I`."""

        def found() -> torch.Tensor:
            total, others = (self._damping(damping) + self._all).log().sum(), self.size - len(self._all)
            return (total + others * self._damping(damping).log() if others else total).to(self._dtype)

        return self._told(".logdet(damping)", found)

    def inverse(self, damping: Damping = 0.0, top: int | None = None) -> LowRank:
        """The inverse of `H + damping I` as the covariance that it is in a Laplace approximation, in `k P` numbers.

        Of the eigenvectors times the roots of their eigenvalues, T `[k, P]`, in the dtype of the parameters:

            (I - T.T @ torch.linalg.inv(T @ T.T + damping * I) @ T) / damping

        The weights are `[k, k]` in float64, from the rounded T, so that `predictive_covariance` is right along large
        eigenvectors, too. Eigenvalues below eps of the damping change nothing and are left out. With `top`, of the
        matrix of that many eigenvectors in place of H: the covariance along all others is that of the damping alone,
        the prior. As a matrix it is right to eps of its largest eigenvalue: for a product with one vector take `solve`.
        """

        def inverted() -> LowRank:
            count = len(self._all) if top is None else self._count("inverse", top)
            shift = self._damping(damping, None if top is None else count)
            self._enough(self._eps * (self._all[:1].sum() / self._least(shift)).sqrt() / 2, shift)
            count = min(count, int((self._all > torch.finfo(self._dtype).eps * innermost(shift).amin()).sum()))
            rows = self._joined(count, torch.ones_like(self._all))
            values, vectors = torch.linalg.eigh(gram(rows, self._all.new_zeros(count, count)))
            undamped = anywhere(shift == 0)
            weights = values.square().reciprocal() if undamped else -1 / (shift * (shift + values))
            scale = shift if undamped else shift.reciprocal()
            return LowRank(self._space.tree(rows), (vectors * weights) @ vectors.T, scale)

        return self._told(".inverse(damping)", inverted)

    def _least(self, shift: torch.Tensor) -> torch.Tensor:
        """The smallest eigenvalue of `H + damping I`."""
        return shift + self._all[-1:].sum() if self.rank == self.size else shift

    @property
    def _right(self) -> float:
        return max(RIGHT, 8 * self._eps)

    def _enough(self, lost: torch.Tensor, shift: torch.Tensor) -> None:
        """Damping with which this part of a result, which is rounding, is small."""
        if anywhere(lost > self._right):
            largest, most = (innermost(x).amax().item() for x in (self._all[:1], lost))
            raise ArgumentError(
                f"damping is {innermost(shift).amin().item():.3g}, too small beside the largest eigenvalue "
                f"{largest:.3g}: in {self._kind} the rounding error may be {most:.1e} of the result, more than "
                f"{self._right:.1e}. Pass more damping, or parameters and data in a wider dtype."
            )

    def _damping(self, damping: Damping, rank: int | None = None) -> torch.Tensor:
        """Damping, which may be 0 if there are as many eigenvectors as parameters."""
        shift = damped(damping, "") + torch.zeros((), dtype=self._all.dtype, device=self._all.device)
        rank = self.rank if rank is None else rank
        if rank < self.size and anywhere(shift == 0):
            raise ArgumentError(
                f"damping is 0, but a matrix of rank {rank} over {self.size} parameters has no inverse. Pass a damping "
                "above 0."
            )
        if self._all.dtype is not torch.float64:
            self._enough(self._eps * self._all[:1].sum() / self._least(shift), shift)
        return shift

    def _leaves(self, v: Any) -> tuple[list[torch.Tensor], int]:
        """The leaves of vectors, and how many axes they have in front."""
        v = tree.map_tensors(lambda x: x.full_tensor() if sharded(x) else x, v)  # pyright: ignore[reportAttributeAccessIssue]
        first, kind = dict(tree.named_leaves(v)).get(self._space.paths[0]), self._space.kinds[0]
        lead = max(0, first.ndim - len(kind.shape)) if isinstance(first, torch.Tensor) else 0
        return self._space.leaves(v, "v", lead), lead

    def _count(self, called: str, top: int | None, of_samples: bool = False) -> int:
        if of_samples and not self._of_samples:
            raise ArgumentError(
                f"{self!r}.{called}(): with top= the eigenpairs come from a sum over the samples, which has no numbers "
                "of single ones. Take eigenpairs(f, loss) of one batch without top=, or batch_grad(f) times vectors()."
            )
        if top is not None:
            check_count(f"{self!r}.{called}(", "top", top)
        return self.rank if top is None else min(top, self.rank)

    def _blocks(self, count: int, scale: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """The rows of `Q^T S` times their scale, some at a time."""
        for start in range(0, count, thresholds.DIRECTIONS):
            part = slice(start, min(count, start + thresholds.DIRECTIONS))
            sent = self._rows[part] * scale[part, None, None]
            yield self._root.transposed([sent.to(self._root.there.into[0].dtype)], 1)

    def _joined(self, count: int, scale: torch.Tensor) -> list[torch.Tensor]:
        """The first rows of `Q^T S` times their scale."""
        found, start = [kind.zeros(count) for kind in self._space.kinds], 0
        for block in self._blocks(count, scale):
            stop = start + len(block[0])
            for whole, part in zip(found, block, strict=True):
                whole[start:stop] = part
            start = stop
        return found

    def _told(self, call: str, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except InvFuncError as error:
            raise told(error, f"{self!r}{call}") from error.__cause__


def formed(rows: torch.Tensor, images: list[torch.Tensor]) -> Linear:
    """The map S by Q^T, `[k, V, N]`, and its rows in the space of the samples, `Q^T S`: `[k, *p]` of each parameter."""

    def forth(vectors: list[Any], pull: Pull) -> Vectors:
        pairs = zip(vectors, images, strict=True)
        flat = [
            (v.reshape(*v.shape[: int(pull.batched)], -1), x.reshape(len(x), x.shape[1:].numel())) for v, x in pairs
        ]
        along = reduce(torch.add, [doubled(v) @ doubled(x).T for v, x in flat])
        return [torch.tensordot(along.to(rows), rows, 1).to(vectors[0].dtype)]

    def back(vectors: list[Any], pull: Pull) -> Vectors:
        along = vectors[0].to(rows).flatten(int(pull.batched)) @ rows.flatten(1).T
        return [torch.tensordot(along.to(x), x, 1) for x in images]

    samples = Kind.of(images[0])._replace(shape=rows.shape[1:])
    kinds = [Kind.of(x)._replace(shape=x.shape[1:]) for x in images]
    return Linear(Scope(images), TwiceDifferentiable(), Direction(forth, [samples]), Direction(back, kinds))


def _coarsest(kinds: list[Kind]) -> tuple[torch.dtype, float]:
    """The dtype of parameters with the fewest digits, and its eps."""
    dtype = max((kind.dtype for kind in kinds), key=lambda dtype: torch.finfo(dtype).eps)
    return dtype, torch.finfo(dtype).eps


def _norms(vectors: list[torch.Tensor], lead: int) -> torch.Tensor:
    """Lengths `[*lead]`."""
    squares = [doubled(x.detach()).square().reshape(*x.shape[:lead], x.shape[lead:].numel()) for x in vectors]
    return torch.cat(squares, -1).sum(-1).sqrt()


def gram(rows: list[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    """The products of vectors `[k, *p]` in float64, added to a total."""
    for x in rows:
        for some in x.reshape(len(x), x.shape[1:].numel()).split(thresholds.WIDENED // max(1, len(x)) + 1, 1):
            total += (doubled(some) @ doubled(some).T).to(total)
    return total


torch.serialization.add_safe_globals([Eigenpairs])  # its state is of tensors, numbers and names only


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
    top: int | None = None,
) -> Decomposition | Largest:
    """The eigenpairs of the generalised Gauss-Newton matrix (GGN), of the empirical Fisher matrix, or of any product.

        S = sqrt_ggn(f, loss)(params, *inputs, target)       # [V, N, *p]; "empirical": batch_grad
        l, Q = torch.linalg.eigh(S @ S.T)                    # [V N, V N], as P of H = S.T @ S may be too many
        E = Q.T @ S / l.sqrt()[:, None]                      # H @ E[k] == l[k] * E[k]

        l, E = torch.linalg.eigh(H)                          # with top=k: the last k of any symmetric H, positive ones

    Neither S nor the matrix [P, P] is formed: `S S^T` is computed as in `gram`, and everything else by products with J
    and J^T. The result solves damped systems exactly in the space of the samples, `(H + d)^-1 v = (v - S^T (S S^T +
    d)^-1 S v) / d`: natural gradients, influence functions, the covariance of a Laplace approximation.

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
        progress: show a bar while the matrix or the products are computed.
        top: the number of largest eigenvalues, by Lanczos' method from products alone. Then f may also be a product,
            such as `hvp(f)`, also `streamed` and `distributed`, for a data set. Only positive eigenvalues are returned
            (for negative ones pass minus f). For some of the parameters, close over the others.

    Returns:
        A function `(params, *inputs, target) -> Eigenpairs`, without `loss` `(params, *batch) -> Eigenpairs`. It has
        the nonzero `values [k]`, largest first; `vectors(top)`, a tree of tensors `[k, *p]`; `solve(v, damping)`,
        `pairs @ v`, `logdet(damping)`, `trace()`; `slopes(top)` and `curvatures(top)`, `[N, k]` of each sample (not
        with `top=`); `inverse(damping, top)` for `predictive_covariance`. `bounds [k]` are the errors that each value
        may have. `kronecker.solve` and `logdet` take it, too.

    Raises:
        SplitError, ConvexityError, SampleAxisError, ArgumentError: as in `diag_ggn`; a call inside of torch.func;
            gradients that are not finite; a decomposition that needs more than the free memory.
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

        Influence of each sample on a loss: the change of the loss if the sample is left out, to first order.

        >>> losses = lambda w, x, y: (x @ w - y).square()[:, 0]
        >>> of_test = torch.tensor([[1.0], [0.0], [0.0]])                 # the gradient of the loss of a test sample
        >>> step = pairs.solve(of_test, damping=1.0)
        >>> (invfunc.batch_grad(losses)(w, x, y) * step).flatten(1).sum(1).round(decimals=3)
        tensor([-0.4000, -0.4000])

        The variance of predictions, by a Laplace approximation with a prior of variance 1.

        >>> invfunc.predictive_covariance(f, pairs.inverse(1.0))(w, x).round(decimals=3).flatten()
        tensor([0.4000, 0.4000])

        The largest eigenvalues of the Hessian of a data set, each with its own bound.

        >>> loader = [(x[:1], y[:1]), (x[1:], y[1:])]
        >>> data_set = invfunc.streamed(invfunc.hvp(f, torch.nn.MSELoss(reduction="sum")))
        >>> invfunc.eigenpairs(data_set, top=2)(w, loader).values.round(decimals=3)
        tensor([4., 4.])

    Composes with: see `Eigenpairs`; `streamed` and `distributed` inside, with `top=`. Not with `torch.func` around it,
    as how many eigenvalues there are depends on numbers, nor with `chunked`.

    Cost: two forward passes, the products of `gram` with V columns for each sample, and an eigendecomposition of `[V N,
    V N]` in float64: `(V N)^3`, and some `40 (V N)^2` bytes while it runs, for V N up to some 10^4. The result keeps
    the eigenvectors, `(V N)^2` numbers, and the graph of a linearisation, the memory of two gradients. If V N is 2 P or
    more, S is formed by P products with J and has a singular value decomposition: `V N P^2`, and some `24 V N P` bytes.
    If the samples of f are not followed, S is formed, too, by V N products with J^T. `explain` shows which way is
    taken; too little free memory is an error before the start. With `top=k` some 3 to 10 k products, and `4 k` vectors
    (20 or more) while it runs. One start vector finds one of several equal eigenvalues, so the last 8 products look for
    others, and go on if there are some. An eigenvalue hardly larger than the last one may still be missed. After 50
    restarts, values are returned with their larger bounds.

    Source: Dangel, Tatzel and Hennig, "ViViT: curvature access through the generalized Gauss-Newton's low-rank
    structure", TMLR 2022; Koh and Liang, "Understanding black-box predictions via influence functions", ICML 2017; Ren
    and Goldfarb, "Efficient subsampled Gauss-Newton and natural gradient methods", 2019. With `top=`: Lanczos (1950);
    Parlett, "The symmetric eigenvalue problem", 1980; Wu and Simon, "Thick-restart Lanczos method", 2000.
    """
    if top is not None:
        product = f
        if not hasattr(f, "linearize"):
            dims = {"in_dims": in_dims, "out_dims": out_dims, "has_aux": has_aux}
            draws = {"mc_samples": mc_samples, "generator": generator, "sample": sample}
            product = ggnvp(f, loss, fisher=fisher, **draws, **dims)
        return Largest(product, top, progress)
    if hasattr(f, "linearize"):
        raise ArgumentError(
            f"eigenpairs({f!r}): of a product there are the largest eigenvalues alone: pass their number, as top=10."
        )
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
        "its eigenvectors are in the space of the samples of one batch. The largest of a data set are "
        "eigenpairs(streamed(ggnvp(f, loss)), top=k)"
    )

    def __post_init__(self) -> None:
        check_functions("eigenpairs", self.f, self.loss)

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", {describe(self.loss)}"
        return f"eigenpairs({describe(self.f)}{loss})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> tuple[Any, Any]:
        if transforming():
            raise inside_of_torch_func()
        with torch.no_grad():
            given, states, root, slope, aux = self._recorded(args, kwargs, names)
            space = Space(names, given.structure, given.kinds)
            (v, n), size = root.there.into[0].shape, sum(p.numel() for p in given.leaves)
            side, wanted = _decomposed(v * n, size)
            if wanted > (there := free_on(given.leaves[0].device)):
                raise ArgumentError(
                    f"it decomposes {side}, in {in_words(wanted)}, but {in_words(int(there))} are free. Pass fewer "
                    "samples, or draw columns: fisher='mc'."
                )
            title = repr(self) if self.progress else ""
            if of_columns := _smaller(v * n, size):
                small = self._products(given.problem, root, states, title)
            else:
                small = doubled(_formed(root, space.kinds, size, title)[0]).movedim(0, -1)
            if anywhere(~small.isfinite()):
                raise ArgumentError("per-sample gradients are not finite: f or its loss gives NaN or inf.")
            values, of_rows, noise = _spectrum_of(small, of_columns, size)
            bounds = 16 * _coarsest(space.kinds)[1] * noise.expand(len(values))
            return Eigenpairs(repr(self), space, root, values, of_rows, bounds, slope), aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames) -> Explanation:
        """Explains what it decomposes at these arguments, and in how much memory."""
        with torch.no_grad():
            given, states, root, *_ = self._recorded(args, kwargs, names)
            set_states(states)
        (v, n), size = root.there.into[0].shape, sum(p.numel() for p in given.leaves)
        side, wanted = _decomposed(v * n, size)
        told_of = (
            f"eigenpairs of {side}, of {v} columns of {n} samples and {size} parameters, in about {in_words(wanted)}"
        )
        return Explanation(repr(self), 0, 0, 0, wanted, 1.0, told_of, plan=" ")

    def _recorded(
        self, args: tuple, kwargs: dict[str, Any], names: ArgumentNames
    ) -> tuple[ProductArguments, States, Linear, Linear | None, Any]:
        """The arguments, the random states before, the square root as a map, the shares of the gradient as another,
        and aux."""
        given = ProductArguments(self, args, kwargs, names)
        states = given.states
        with given.scope:
            split = given.split(each=True, losses=self.kind.first_order)
            with given.mode.back(split.result.device):
                slope: list[Columns] = [split.gradient()]
                if self.drawing is not None:
                    columns = split.drawn(self.drawing, "eigenpairs")
                else:
                    columns = slope if self.kind.first_order else [rooted(c) for c in split.hessian()]
            root = of_root(given, split, OutputRows(split, columns))
            slopes = None if self.kind.first_order else of_root(given, split, OutputRows(split, slope))
            return given, states, root, slopes, given.scope.result(given.aux)

    def _products(self, given: BoundProblem, root: Linear, states: States, title: str) -> torch.Tensor:
        """`S S^T` of the rows S of a map, `[V, N, V, N]` in float64: from each sample's share of them, if the core has
        these of the same numbers, or else from rows that are formed."""
        quantity, after = Quantity(ProductsOfColumns(), self.kind, self.drawing), [(g, state_of(g)) for g, _ in states]
        (kind,), u = root.there.into, torch.arange(1, root.there.into[0].shape.numel() + 1).cos()
        try:
            set_states(states)  # f is run again
            with ticking(title, 1) as ticks:
                ticks.expect(1)
                (small,) = kept(given, [quantity], Options(dense=True)).results
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


@dataclass(frozen=True, repr=False)
class Largest(Transform):
    """A function `(params, *batch) -> Eigenpairs` of the largest eigenvalues of a product."""

    product: Any
    top: int
    progress: bool
    owned = False
    outermost = True
    of_one_batch = "it takes products of all batches: eigenpairs(streamed(ggnvp(f, loss)), top=k)"

    def __post_init__(self) -> None:
        check_product("eigenpairs", self.product)
        check_count("eigenpairs(", "top", self.top)

    def __repr__(self) -> str:
        return f"eigenpairs({describe(self.product)}, top={self.top})"

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.product, "has_aux", False)

    def names(self, count: int) -> Any:
        return names_of(self.product, count)

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if transforming():
            raise inside_of_torch_func()
        space, made = space_of(args, names), self.product.linearize(*args, **kwargs)
        at, aux = made if self.has_aux else (made, None)
        title = repr(self) if self.progress else ""
        values, vectors, bounds = largest(through(at, space), space.kinds, self.top, title)
        values, bounds = (x.to(space.kinds[0].device, double_on(space.kinds[0].device)) for x in (values, bounds))
        k = len(values)
        rows = torch.eye(k, dtype=values.dtype, device=values.device).reshape(k, k, 1)
        images = [
            (values.sqrt().to(x).reshape(k, *[1] * (x.ndim - 1)) * x).to(kind.dtype)
            for x, kind in zip(vectors, space.kinds, strict=True)
        ]
        return Eigenpairs(repr(self), space, formed(rows, images), values, rows, bounds, of_samples=False), aux


def inside_of_torch_func() -> ArgumentError:
    """The error of a call in torch.func."""
    return ArgumentError(
        "it is inside of a transform of torch.func, but the number of eigenpairs depends on values. Compute them "
        "outside, and transform a function that takes them as an argument."
    )


def _spectrum_of(small: torch.Tensor, of_columns: bool, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eigenvalues `[k]`, Q^T `[k, V, N]`, and the size of numbers that are rounded, of S S^T `[V, N, V, N]`, or of S
    itself where it is smaller."""
    v, n = small.shape[:2]
    if of_columns:
        kept, small = min(v * n, size), small.reshape(v * n, v * n)
        squares, (values, vectors) = small.diagonal(), (x.flip(-1)[..., :kept] for x in torch.linalg.eigh(small))
    else:
        rows = small.reshape(v * n, kept := small.shape[2])
        vectors, roots, _ = torch.linalg.svd(rows, full_matrices=False)
        values, squares = roots.square(), rows.square().sum(1)
    noise = values[:1].sum() + math.sqrt(v * n) * F.pad(squares, (0, 1)).amax()
    return values, vectors.T.reshape(kept, v, n), noise


def _smaller(columns: int, size: int) -> bool:
    """True if the products of the columns are decomposed, and not the columns themselves."""
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
