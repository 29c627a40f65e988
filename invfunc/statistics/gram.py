"""The inner products of the shares."""

from __future__ import annotations

from collections.abc import Callable

from invfunc import tree
from invfunc.arguments.problem import Indices, InDims
from invfunc.errors import ArgumentTypeError
from invfunc.reductions.quantity import GRADIENT_OR_JACOBIAN
from invfunc.reductions.squares import InnerProducts, ProductsWithOthers
from invfunc.statistic import Statistic


def gram(
    f: Callable,
    *,
    others: tuple | list | None = None,
    per_parameter: bool = False,
    samples: Indices | None = None,
    argnums: int | tuple[int, ...] = 0,
    in_dims: InDims = 0,
    out_dims: int = 0,
    has_aux: bool = False,
) -> Statistic:
    """The inner products of the per-sample gradients; of a model function the neural tangent kernel (NTK).

        G = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *batch).values()], 1)         # [N, P]
        G @ G.T

        J = torch.cat([j.flatten(2) for j in batch_jacobian(f)(params, *inputs).values()], 2)    # [N, C, P]
        torch.einsum("ncp,mdp->ncmd", J, J)

    With `others`, the products between the samples of the call and those of another batch, as training and test data:

        H = torch.cat([g.flatten(1) for g in batch_grad(f)(params, *others).values()], 1)        # [M, P]
        G @ H.T

    A mean loss puts 1/N^2 into every product of a loss function; a model function has no such scale.

    Args:
        f: a loss function `f(params, *batch)`, which returns a scalar or `[N]`, or a model function
            `f(params, *inputs)`, which returns one tensor `[N, *out]` of two dimensions or more. f is pure in
            torch.func's sense (see the conventions).
        others: the other batch, with an entry for each batch argument that has a sample axis. Its tensors have the
            shapes of those of the call, but for the number of samples M. f runs once, on both batches joined, and has
            to return a loss for each sample, or outputs.
        per_parameter: a matrix for each parameter instead of their sum.
        out_dims: the sample axis of the outputs of a model function.
        samples, argnums, in_dims, has_aux: as in `batch_grad`; `samples` selects from the samples of the call, not from
            `others`.

    Returns:
        A function `(params, *batch) -> [N, N]`, in the unit of (loss / parameter)^2; for a model function
        `(params, *inputs) -> [N, *out, N, *out]`. With `others`, `[N, M]` and `[N, *out, M, *out]`. With
        `per_parameter` a tree like the parameters of these.

    Raises:
        ArgumentError, SampleAxisError: as in `batch_grad`; with `others`, a scalar loss, as its scale in each batch is
            not known, or an f that depends on the number of samples or on their positions.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> invfunc.gram(f)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[ 4., 16.],
                [16., 64.]])

        Which sample of the training data moves the loss of a test sample: a step down the gradient of the first lowers
        that of the second where their product is positive.

        >>> test = torch.tensor([[-1.0]]), torch.ones(1)
        >>> invfunc.gram(f, others=test)(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([[ 8.],
                [32.]])

        Of chosen outputs, here one logit of each sample: a function that picks them is a loss function, whose products
        take one backward pass in place of C.

        >>> logit = lambda w, x, y: (x @ w).gather(1, y[:, None])[:, 0]
        >>> invfunc.gram(logit)(torch.eye(2), torch.ones(3, 2), torch.tensor([0, 1, 0]))
        tensor([[2., 0., 2.],
                [0., 2., 0.],
                [2., 0., 2.]])

    Composes with: `chunked` over params, `reduced`, `certified`; `torch.func.grad`, `vmap`, `jvp` around it, in what
    `others` holds too. Of a data set, `streamed(gram(f))(params, loader)`, of two `(params, loader, other_loader)`; and
    `distributed`. Tiles of one batch: `chunked(lambda *args: gram(f, others=others)(*args), n)` goes over the rows, a
    loop over parts of `others` over the columns.

    Cost: one forward pass and a pullback of all outputs of a sample at once. The per-sample gradients of a layer are
    formed, some at a time, if that is cheaper than products of its inputs and of the gradients at its outputs. With
    `others`, the cost of N + M samples, without the products within either batch, and a forward pass of each batch
    alone, which checks that f does not mix them (not for an f that draws random numbers).

    Source: Jacot, Gabriel and Hongler, "Neural tangent kernel", NeurIPS 2018; Dangel, Tatzel and Hennig, "ViViT",
    TMLR 2022.
    """
    if others is not None and not isinstance(others, (tuple, list)):
        raise ArgumentTypeError(
            f"gram(f, others=...): others is of type {type(others).__name__}, but has to be a tuple of batch "
            "arguments, as in gram(f, others=(x, y)); of one argument, others=(x,)."
        )
    both = None if others is None else tuple(others)
    options = {
        "others": both,
        "argnums": argnums,
        "in_dims": in_dims,
        "has_aux": has_aux,
        "samples": samples,
        "out_dims": out_dims,
    }
    return Statistic(
        "gram",
        f,
        InnerProducts(per_parameter) if both is None else ProductsWithOthers(per_parameter, _count(both, in_dims)),
        kind=GRADIENT_OR_JACOBIAN,
        **options,
    )


def _count(others: tuple, in_dims: InDims) -> int:
    """The number of samples the first tensor of another batch has; a call checks the rest."""
    dims = [in_dims] * len(others) if in_dims is None or isinstance(in_dims, int) else in_dims
    given = zip(others, (d for d in dims if d is not None), strict=False)
    sizes = (x.shape[d] for other, d in given for x in tree.tensors(other) if -x.ndim <= d < x.ndim)
    return next(sizes, 0)
