"""What is told of a block, and only once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from invfunc.errors import InvFuncWarning


@dataclass
class Report:
    """What is known of a block from its calls."""

    needs_a_node: bool = False
    """Whether f turned out to use torch.func itself, beside which saved tensors have no hooks."""
    closes_over: bool = False
    """Whether f turned out to close over tensors that need a gradient inside of torch.func."""
    called: bool = False
    """Whether it was called before, so that compiled parts have been told of."""

    def compiled(self) -> None:
        """Tell of a compiled part, which runs without its compiler."""
        if not self.called:
            self.called = True
            warnings.warn(
                "a function that torch.compile made is evaluated as it was written, as it is a part of an invertible "
                "block: what is computed again in the backward pass has to be the same, operation by operation. Leave "
                "it uncompiled to be without this warning; to have compiled code, compile the function that calls the "
                "blocks, which then keeps all activations.",
                InvFuncWarning,
                stacklevel=2,
            )
