"""`explain`: the way a statistic is going to be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from invfunc.callables import describe
from invfunc.errors import ArgumentTypeError
from invfunc.report import Explanation
from invfunc.transform import Transform


@runtime_checkable
class Explainable(Protocol):
    """A statistic, or what is made of one."""

    def names(self, count: int) -> Any: ...

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation: ...


def explain(statistic: Explainable) -> Callable[..., Explanation]:
    """Say how a statistic would be computed, without computing it.

        print(explain(diag_ggn(f, loss))(params, *batch))

    Args:
        statistic: a statistic of this library, also `chunked`, `reduced`, `certified`, `streamed`, `distributed` or of
            several `together`; or a `compiled` product, of which it has the `plan` and its `code`.

    Returns:
        A function with the arguments of the statistic that returns an `Explanation`, which prints as a table. It has
        the number of `columns` of a sample (vectors of outputs that are pulled back, see `diag_ggn`), of backward
        `passes` (of one column each; with `chunked` the number of chunks) and of `pullbacks` (of several columns at
        once, if memory allows); `why`, which begins with how f is called if it is not followed operation by operation
        (on single samples, or by the rows of its losses); the `parts` of the exact columns with a shortcut: a closed
        form, columns that share backward passes ("local"), columns of a narrow layer, or the entries of parameters one
        by one; for each of the `params` the `operations` that read it, whether all have a "fast" rule, or some are
        "generic" (with a copy of the parameter for each sample), or it is "unread", and the shapes of its factors;
        about how many `bytes` the result takes; the estimated `cost` over that of all columns; an explanation of each
        of the `members` of `together`; what is `checked` if it is `certified`. If it is `streamed`, all this is for the
        first batch, which the loader is asked for, and there is the number of `sweeps` over how many `batches` (None if
        the loader has no length), and of `tiles` of `gram`. If it is `distributed`, there is the number of `processes`;
        no other process is asked, so one process can call it alone.

    Raises:
        ArgumentTypeError: something else than a statistic; a loader that gives its batches once, as a generator. The
        errors of the statistic if it cannot follow f. Errors that come later in a call (a parameter without Kronecker
        factors, say) are not found.

    Example:
        >>> import torch, invfunc
        >>> f = lambda p, x: torch.nn.functional.linear(x, p["w"]) * p["s"].exp()
        >>> g = invfunc.chunked(invfunc.diag_ggn(f, torch.nn.functional.mse_loss), 2)
        >>> p, x = {"w": torch.ones(4, 3), "s": torch.ones(4)}, torch.ones(2, 3)
        >>> invfunc.explain(g)(p, x, torch.zeros(2, 4))
        chunked(diag_ggn(<lambda>, mse_loss), n=2, over='outputs'): because chunked asks for it
          2 backward passes for 4 columns of a sample (vectors that are pulled back), in 2 pullbacks
          params['w']  fast  linear
          params['s']  fast  mul
          about 0.0 MiB for the result, 100.0% of the work without structure

    Composes with: `chunked`, `reduced`, `together`, `certified`, `streamed`, `distributed` inside of it.

    Cost: the forward passes of the statistic (for the Hessian also backward passes to the nonlinear operations); if it
    looks for structure, one of a single sample. No random numbers are used up.

    Source: this library.
    """
    if not isinstance(statistic, Explainable):
        raise ArgumentTypeError(
            f"explain({describe(statistic)}): it is of type {type(statistic).__name__}, but has to be a statistic, as "
            "in explain(diag_ggn(f, loss))(params, *batch). Of a block `pairs.held_states` tells what stays in memory, "
            "and `pairs.drift` how exactly it runs backwards."
        )
    return Explained(statistic)


@dataclass(frozen=True, repr=False)
class Explained(Transform):
    """A function `(params, *batch) -> Explanation`."""

    statistic: Explainable
    owned = False

    def __repr__(self) -> str:
        return f"explain({self.statistic!r})"

    def names(self, count: int) -> Any:
        return self.statistic.names(count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Explanation, Any]:
        return self.statistic.explanation(args, kwargs, names), None
