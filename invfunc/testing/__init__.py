"""Tools for those who test and measure what they build with this library."""

from invfunc.testing import laws
from invfunc.testing.laws.operations import check_operation
from invfunc.testing.memory import peak_memory, return_freed_memory
from invfunc.testing.oracles import (
    assert_trees_close,
    dense_batch_diag_hessian,
    dense_diag_ggn,
    dense_diag_hessian,
    dense_ggn,
    loop_batch_grad,
    loop_batch_jacobian,
    loop_batch_l2_grad,
    loop_clipped_grad,
    loop_grad_and_variance,
    loop_gram,
    loop_noise_scale,
    loop_sum_grad_squared,
    loop_variance,
)

__all__ = [
    "assert_trees_close",
    "check_operation",
    "dense_batch_diag_hessian",
    "dense_diag_ggn",
    "dense_diag_hessian",
    "dense_ggn",
    "laws",
    "loop_batch_grad",
    "loop_batch_jacobian",
    "loop_batch_l2_grad",
    "loop_clipped_grad",
    "loop_grad_and_variance",
    "loop_gram",
    "loop_noise_scale",
    "loop_sum_grad_squared",
    "loop_variance",
    "peak_memory",
    "return_freed_memory",
]
