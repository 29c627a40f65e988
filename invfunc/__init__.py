"""Pure function transforms on `torch.func`: gradient statistics, curvature, and memory for time."""

from invfunc.chunked import chunked
from invfunc.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConvexityError,
    InvFuncError,
    MissingExtraError,
    RandomnessError,
    SampleAxisError,
    SplitError,
)
from invfunc.functional import functional
from invfunc.operation import operation
from invfunc.outputs import outputs
from invfunc.statistics.batch_diag_ggn import batch_diag_ggn
from invfunc.statistics.batch_grad import batch_grad
from invfunc.statistics.batch_jacobian import batch_jacobian
from invfunc.statistics.batch_l2_grad import batch_l2_grad
from invfunc.statistics.clipped_grad import clipped_grad
from invfunc.statistics.diag_ggn import diag_ggn
from invfunc.statistics.grad_and_variance import grad_and_variance
from invfunc.statistics.gram import gram
from invfunc.statistics.sqrt_ggn import sqrt_ggn
from invfunc.statistics.sum_grad_squared import sum_grad_squared
from invfunc.statistics.variance import variance

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "ConvexityError",
    "InvFuncError",
    "MissingExtraError",
    "RandomnessError",
    "SampleAxisError",
    "SplitError",
    "batch_diag_ggn",
    "batch_grad",
    "batch_jacobian",
    "batch_l2_grad",
    "chunked",
    "clipped_grad",
    "diag_ggn",
    "functional",
    "grad_and_variance",
    "gram",
    "operation",
    "outputs",
    "sqrt_ggn",
    "sum_grad_squared",
    "variance",
]
