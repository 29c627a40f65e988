"""Pure function transforms on `torch.func`: each takes a function, and returns a function of the same arguments.

    f, params = invfunc.functional(model)                             # f(params, x) == model(x)
    loss = lambda params, x, y: cross_entropy(f(params, x), y)        # any function of (params, *batch)
    gradient, spread = invfunc.grad_and_variance(loss)(params, x, y)  # dicts like params

Per-sample gradients: `batch_grad`, `batch_l2_grad`, `sum_grad_squared`, `variance`, `grad_and_variance`,
`clipped_grad`, `noise_scale`, `sketched_grad`, `gram`, `batch_jacobian`.
Curvature: `diag_ggn`, `ggn_trace`, `sqrt_ggn`, `diag_hessian`.
Kronecker factors: `kfac`, `ekfac`; in `kronecker` are others, what they give, and what is done with it.
Products with vectors: `hvp`, `ggnvp`, `linearize`, `linear_operator`, `estimate_trace`, `estimate_diagonal`.
Covariances: `predictive_covariance`, `eigenpairs`.
Around a statistic: `chunked`, `together`, `reduced`, `explain`, `certified`, `compiled`; of a data set `streamed`, of
many processes `distributed`.
Around f: `functional`, `outputs`, `operation`.
Invertible functions: `invertible_checkpoint`, `chain`, `repeated`, `check_inverse`; of pairs `Invertible`, `invert`,
`with_log_det`, `additive_coupling`, `affine_coupling`; more in `pairs` and in `layers`.
Errors: all in `errors`, each an `InvFuncError` and the builtin that people expect; warnings are `InvFuncWarning`s.

Words; all others are torch's, or the field's.

per-sample gradient: `G[n]`, what sample n adds to the gradient: `sum_n G[n] = grad f`. A mean loss puts 1/N into each.
loss function, model function: `f(params, *batch)`, a scalar or `[N]`; `f(params, *inputs)`, outputs `[N, ...]`.
sample axis: the axis of a tensor that counts the N samples; axis 0, unless `in_dims` or `out_dims` say otherwise.
tree: a tensor, or a pytree of tensors such as the dict of all parameters; most results are trees like the parameters.
GGN: the generalised Gauss-Newton matrix, `sum_n J[n]^T H[n] J[n]`: J, Jacobian of the outputs, H, Hessian of the loss.
column: a vector of outputs that is sent back to the parameters, such as each r of a square root `sum r r^T = H[n]`.
pullback: a vector-Jacobian product, of one column or of several at once: what `torch.func.vjp` gives.
K-factors: matrices whose Kronecker product is a parameter's block of the GGN, or near it. Probe: a random vector.
chunk: a part of the columns, samples or parameters, of which one is in memory at a time.
pair: an invertible function with its inverse. Block: a pair whose input is freed, and computed again when it is needed.
"""

# Words of the code, beside those. Share: a per-sample gradient. Cotangent: what arrives of a column at a tensor on the
# way back. Parameter use: a place where a run combines a parameter with samples; its site: the output of that
# operation. Recipe: how the shares at a parameter use factorise, as an einsum of small tensors. Derived parameter: a
# tensor computed from parameters alone. Reduction: what a statistic keeps of shares, and how that adds up over samples,
# columns and parameters. Loss term: a known loss behind the model's outputs; the output finder looks for both. Batch
# sum: a tensor without a sample axis. Untraced tensor: one that a run reads, and that no call which was seen has made.
# Nonlinear: with a second derivative in what it reads of the model; its second-order term is what it adds to the
# Hessian. Bottleneck: a layer that all paths cross, narrower than there are columns. Pattern, colouring: which outputs
# depend on which entries, and which columns can therefore share a pass. Pass: one pullback, of some columns, samples or
# parameters. Slot: what holds the output of a block.

from invfunc import errors, kronecker, layers, pairs
from invfunc.around import explain, reduced, together
from invfunc.certified import certified
from invfunc.chunks import chunked
from invfunc.compiled import compiled
from invfunc.core.columns import outputs
from invfunc.data_sets.streamed import distributed, streamed
from invfunc.errors import InvFuncError, InvFuncWarning
from invfunc.functional import functional
from invfunc.invertible.chain import chain, repeated
from invfunc.invertible.checkpoint import invertible_checkpoint
from invfunc.invertible.checks import check_inverse
from invfunc.operation import operation
from invfunc.pairs.couplings import additive_coupling, affine_coupling
from invfunc.pairs.pair import Invertible, invert, with_log_det
from invfunc.products.eigenpairs import eigenpairs
from invfunc.products.operators import estimate_diagonal, estimate_trace, linear_operator, linearize
from invfunc.products.product import ggnvp, hvp
from invfunc.statistics.curvature import (
    batch_jacobian,
    diag_ggn,
    diag_hessian,
    ggn_trace,
    predictive_covariance,
    sqrt_ggn,
)
from invfunc.statistics.factors import ekfac, kfac
from invfunc.statistics.first_order import (
    batch_grad,
    batch_l2_grad,
    clipped_grad,
    grad_and_variance,
    gram,
    noise_scale,
    sketched_grad,
    sum_grad_squared,
    variance,
)

__version__ = "0.2.0"

__all__ = [
    "InvFuncError",
    "InvFuncWarning",
    "Invertible",
    "additive_coupling",
    "affine_coupling",
    "batch_grad",
    "batch_jacobian",
    "batch_l2_grad",
    "certified",
    "chain",
    "check_inverse",
    "chunked",
    "clipped_grad",
    "compiled",
    "diag_ggn",
    "diag_hessian",
    "distributed",
    "eigenpairs",
    "ekfac",
    "errors",
    "estimate_diagonal",
    "estimate_trace",
    "explain",
    "functional",
    "ggn_trace",
    "ggnvp",
    "grad_and_variance",
    "gram",
    "hvp",
    "invert",
    "invertible_checkpoint",
    "kfac",
    "kronecker",
    "layers",
    "linear_operator",
    "linearize",
    "noise_scale",
    "operation",
    "outputs",
    "pairs",
    "predictive_covariance",
    "reduced",
    "repeated",
    "sketched_grad",
    "sqrt_ggn",
    "streamed",
    "sum_grad_squared",
    "together",
    "variance",
    "with_log_det",
]

__dir__ = __all__.copy
