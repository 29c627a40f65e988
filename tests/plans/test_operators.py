"""Operations that draw random numbers: attention's kernels do where they leave something out."""

import pytest
import torch

from invfunc.plans.operators import draws

ATEN = torch.ops.aten
Q = torch.zeros(1, 1, 2, 4)
EFFICIENT, FLASH = (
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
)
CALLS = {
    "by position": (EFFICIENT, (Q, Q, Q, None, True, 0.1), {}, True),
    "by position, nothing": (EFFICIENT, (Q, Q, Q, None, True, 0.0), {}, False),
    "by name": (FLASH, (Q, Q, Q), {"dropout_p": 0.1}, True),
    "by name, nothing": (FLASH, (Q, Q, Q), {"dropout_p": 0.0}, False),
    "left out": (FLASH, (Q, Q, Q), {"is_causal": True}, False),
    "a derivative": (ATEN._scaled_dot_product_efficient_attention_backward.default, (Q,) * 9 + (0.1,), {}, False),
    "dropout": (ATEN.native_dropout.default, (Q, 0.0, True), {}, True),
    "a generator that is not given": (ATEN.bernoulli.p, (Q, 0.5), {}, True),
    "a product": (ATEN.mm.default, (Q[0, 0], Q[0, 0].T), {}, False),
}


@pytest.mark.parametrize(("func", "args", "kwargs", "wanted"), CALLS.values(), ids=CALLS)
def test_what_draws(func, args, kwargs, wanted):
    assert draws(func, args, kwargs) is wanted
