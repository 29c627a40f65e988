"""Log-determinants that are carried along."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from invfunc.errors import ArgumentError
from invfunc.pairs.pair import Invertible, Remembered, as_pair, rewrapped
from invfunc.pairs.value import Value


def with_log_det(pair: Invertible) -> Invertible:
    """The pair on states `(x, s)`, to which it adds its log-determinant: `(x, s) -> (y, s + log |det dy/dx|)`.

    The sum is part of the state, so it is taken back by the inverse, and a checkpointed flow needs no more memory.

    Args:
        pair: an `Invertible` with a log_det. Of a chain the log-determinants of all blocks are carried.

    Returns:
        An `Invertible`; of what `invertible_checkpoint` returned, a block with the same options. s has the shape [N] of
        one sum for each entry of the leading axis of x; `torch.zeros(N)` starts. What the pair hides stays hidden.

    Raises:
        ArgumentTypeError: `pair` is not an `Invertible`.
        ArgumentError: it has no log_det.

    Example:
        >>> import torch, invfunc
        >>> flow = invfunc.with_log_det(invfunc.layers.leaky_relu(0.5))
        >>> flow((torch.tensor([[-1.0, 2.0]]), torch.zeros(1)))
        (tensor([[-0.5000,  2.0000]]), tensor([-0.6931]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `invert`.

    Cost: functions that forward and log_det share are evaluated once.

    Source: D. Rezende and S. Mohamed, Variational Inference with Normalizing Flows, 2015.
    """
    block, pair = pair, as_pair("with_log_det(pair)", pair)
    if pair.composition is not None:
        flow = pair.composition.changed(lambda block: replace(block, pair=with_log_det(block.pair), has_aux=False))
        return rewrapped(block, flow)
    if pair.carried is not None:
        return rewrapped(block, pair.carried)
    if pair.log_det is None:
        raise ArgumentError(f"with_log_det({pair!r}): the pair has no log_det.")
    carried = _Carried(pair)
    name = f"with_log_det({pair!r})"
    return rewrapped(block, Invertible(carried.forward, carried.inverse, pair.shared, pair.hidden, name=name))


@dataclass(frozen=True, eq=False)
class _Carried(Value):
    """Both directions of a pair, with the sum of log-determinants beside the state."""

    carries_a_sum: ClassVar = True
    pair: Invertible

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        (shared, x, s, args), log_det = self._read(given), self.pair.log_det
        assert log_det is not None
        y, hidden = self.pair.apart(self.pair.forward(*shared.functions, x, *args, **kwargs))
        state = y, s + log_det(*shared.recalled(backwards=False), x, *args, **kwargs)
        return (state, *hidden) if hidden else state

    def inverse(self, *given: Any, **kwargs: Any) -> Any:
        (shared, y, s, args), log_det = self._read(given), self.pair.log_det
        assert log_det is not None
        x = self.pair.inverse(*shared.functions, y, *args, **kwargs)
        further = args[1:] if self.pair.hidden else args
        return x, s - log_det(*shared.recalled(backwards=True), x, *further, **kwargs)

    def _read(self, given: tuple) -> tuple[Remembered, Any, Any, list]:
        number = len(self.pair.shared)
        state, *args = given[number:]
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ArgumentError(
                f"with_log_det({self.pair!r}): the state has to be (x, s) with a sum [N] beside x, which starts as "
                f"torch.zeros(N), but is {type(state).__name__}."
            )
        x, s = state
        return Remembered(given[:number]), x, s, args
