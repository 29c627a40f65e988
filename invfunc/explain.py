"""How an exact GGN is going to be computed."""

from __future__ import annotations

from collections.abc import Callable

from invfunc.errors import ArgumentTypeError
from invfunc.jacobian.structure.report import Explanation
from invfunc.transform import Statistic


def explain(statistic: Statistic) -> Callable[..., Explanation]:
    """Say how the exact columns of a GGN are going to be pulled back, without doing it.

        print(explain(diag_ggn(f, loss))(params, *batch))

    Args:
        statistic: `diag_ggn`, `batch_diag_ggn`, `ggn_trace` or `kflr` of a function.

    Returns:
        A function with the arguments of the statistic that returns an `Explanation`: which parameters take a closed
        form, columns that share passes ("local"), columns of a narrow layer, or all columns ("dense"); how many passes
        that are; about how many bytes the columns take; the estimated work over that of all columns; and why.

    Raises:
        ArgumentTypeError: something else than a statistic of the columns of a GGN.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x: torch.nn.functional.conv1d(x, w)
        >>> g = invfunc.diag_ggn(f, torch.nn.functional.mse_loss)
        >>> w, x = torch.ones(4, 4, 3), torch.ones(2, 4, 1026)
        >>> print(invfunc.explain(g)(w, x, torch.zeros(2, 4, 1024)).passes)
        0

    Composes with: `chunked` over samples inside of it.

    Cost: a forward pass; where structure is looked for, another one and one of a single sample.

    Source: this library.
    """
    if not isinstance(statistic, Statistic) or statistic.of != "ggn" or statistic.drawing is not None:
        raise ArgumentTypeError(
            f"explain({statistic!r}): it explains statistics of the exact columns of a GGN: `diag_ggn`, "
            "`batch_diag_ggn`, `ggn_trace`, `kflr`."
        )
    return statistic.explained
