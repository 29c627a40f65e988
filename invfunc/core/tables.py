"""Facts about each operation, by its name: a line for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.core import rules
from invfunc.operations.operation import OPERATIONS, called, getters, in_place
from invfunc.operations.recurrent import states_after, states_before

T = torch.Tensor


POINTWISE = called(
    "add sub mul div true_divide floor_divide truediv floordiv mod pow neg positive abs exp exp2 expm1 log log2 log10 "
    "log1p sqrt rsqrt square sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf erfc "
    "erfinv lgamma digamma reciprocal sign floor ceil round trunc frac clamp clip clamp_min clamp_max relu relu6 elu "
    "selu celu gelu silu mish softplus softsign tanhshrink hardtanh hardsigmoid hardswish hardshrink softshrink "
    "logsigmoid log_sigmoid leaky_relu threshold rrelu dropout alpha_dropout feature_dropout maximum minimum fmax "
    "fmin where lerp addcmul addcdiv masked_fill eq ne lt le gt ge and or xor not invert logical_and logical_or "
    "logical_not logical_xor isnan isinf isfinite bitwise_and bitwise_or bitwise_not nan_to_num clone contiguous to "
    "float double half bfloat16 int long bool type_as type detach detach_ zeros_like ones_like full_like empty_like "
    "rand_like randn_like bernoulli subtract multiply divide negative rsub sinc logit xlogy hypot heaviside fill zero "
    "dropout1d dropout2d dropout3d alias requires_grad_ copy_ remainder fmod cpu cuda greater less greater_equal "
    "less_equal not_equal logaddexp conj resolve_conj resolve_neg "
    "normal uniform exponential cauchy geometric log_normal random poisson binomial _standard_gamma"
) - {F.glu, T.__bool__, T.__int__, T.__long__, T.__float__}
MULTIPLY = called("mul multiply")
DIVIDE = called("div true_divide divide truediv") - {T.__rdiv__, T.__rtruediv__}
LINEAR = called(
    "add sub subtract neg negative sum mean clone contiguous to float double view reshape squeeze unsqueeze flatten "
    "stack cat select getitem unbind t permute transpose expand radd rsub"
)
SUMS = called("add sub subtract rsub")
VIEWS = called(
    "t transpose permute view reshape flatten unflatten squeeze unsqueeze getitem chunk split select unbind narrow "
    "movedim swapaxes moveaxis contiguous tensor_split view_as alias"
) | getters("T mT")
EXPANDS = called("expand expand_as broadcast_to repeat tile")
JOINS = called("stack cat concat concatenate")
SWAPS = called("t") | getters("T mT")
MOVES = called("gather index_select take_along_dim")
INDEXES = {T.__getitem__}
GROUPED = called("index_add scatter_add")
"""Sums in groups, which may be of samples; then the result is linear in these."""
PLACING = GROUPED | called("scatter scatter_reduce index_put index_copy index_fill masked_scatter put")
"""Operations that place rows among others."""
PRODUCTS = called("matmul mm mv dot inner einsum linear tensordot")
SORTS = called("sort topk")
LEAKS = called("numpy tolist __array__ data_ptr __deepcopy__ __reduce_ex__")
DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, T.backward}
REFUSED = DERIVATIVES | called(
    "register_hook register_post_accumulate_grad_hook max_unpool1d max_unpool2d max_unpool3d"
)
"""Hooks, which may change what is sent back, operations that place the entries of a sample by numbers, and derivatives
that f takes in parameters."""
FILLS = called("zeros_like ones_like empty_like")
LIKE = called("to type_as zeros_like ones_like full_like empty_like rand_like randn_like view_as reshape_as expand_as")
"""Operations that read the values of their first argument alone."""
ASKING = [name for name, facts in OPERATIONS.items() if facts.asks == "form"]
PLAIN = getters(
    " ".join([name[4:] for name in ASKING if name[:4] == "get:"]) + " names is_mps is_xla output_nr _version"
)
PLAIN |= called(
    " ".join(ASKING) + " is_tensor __hash__ is_grad_enabled finfo iinfo __bool__ is_nonzero is_autocast_enabled "
    "broadcast_shapes can_cast item __float__ __int__ __index__ __format__ __repr__"
)
"""Operations that are not looked at: of forms, and of numbers that leave torch, which are constants of the call."""
FILLED = called("zeros ones full empty rand randn new_zeros new_ones new_full new_empty")
SHORT = POINTWISE - called("logsigmoid log_sigmoid")
"""Pointwise operations that are no criterion."""
PURE = POINTWISE | VIEWS
MOVING = {
    func
    for func in VIEWS
    | EXPANDS
    | MOVES
    | INDEXES
    | SORTS
    | called(
        "cat concat concatenate stack hstack vstack dstack roll flip fliplr flipud rot90 repeat_interleave take unfold "
        "masked_select diagonal swapdims ravel hsplit vsplit split_with_sizes broadcast_tensors"
    )
    if not in_place(func)
}
"""Operations that only move entries, so that they may run on the numbers of the samples."""

AXES: list[tuple[set[Any], Callable]] = [
    (POINTWISE, rules.same),
    ({T.unsqueeze_, T.squeeze_, T.t_, T.transpose_, T.swapaxes_, T.swapdims_}, rules.reshaped_in_place),
    (called("sum nansum mean nanmean"), rules.reduction(linear=True)),
    (
        called("amax amin max min argmax argmin std var logsumexp prod any all count_nonzero median var_mean std_mean"),
        rules.reduction(),
    ),
    (called("softmax log_softmax softmin cumsum cumprod sort argsort logcumsumexp cummax"), rules.along(1)),
    (called("glu"), rules.along(1, -1)),
    (called("topk"), rules.along(2, -1)),
    (called("normalize"), rules.along(2, 1)),
    (called("view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as"), rules.reshaped),
    (called("permute"), rules.permuted),
    (called("t transpose swapaxes swapdims") | getters("mT"), rules.swapped),
    (getters("T"), rules.reversed_),
    (called("expand expand_as broadcast_to"), rules.expanded),
    (called("cat concat concatenate"), rules.joined),
    (called("stack"), rules.stacked),
    (called("chunk split tensor_split split_with_sizes"), rules.parts),
    (called("select unbind"), rules.dropped),
    (INDEXES, rules.indexed),
    (called("matmul mm bmm mv dot") - {T.__rmatmul__}, rules.matmul),
    (called("addmm baddbmm addmv"), rules.addmm),
    (called("linear"), rules.linear),
    (called("einsum"), rules.einsum),
    (called("scaled_dot_product_attention"), rules.attention),
    ({F.embedding}, rules.embedding),
    (called("layer_norm rms_norm"), rules.layer_norm),
    (called("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"), rules.convolution),
    (called("_sample_dirichlet multinomial"), rules.spatial(1)),
    ({F.batch_norm}, rules.batch_norm),
    ({F.instance_norm}, rules.instance_norm),
    *[
        (called(f"avg_pool{k}d max_pool{k}d adaptive_avg_pool{k}d adaptive_max_pool{k}d lp_pool{k}d"), rules.spatial(k))
        for k in (1, 2, 3)
    ],
    (
        called("group_norm max_pool2d_with_indices interpolate local_response_norm channel_shuffle upsample"),
        rules.first,
    ),
    (
        called(
            "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
            "poisson_nll_loss gaussian_nll_loss soft_margin_loss margin_ranking_loss hinge_embedding_loss"
        ),
        rules.pointwise_loss,
    ),
    ({states_before, states_after}, rules.steps),
    (called("cross_entropy nll_loss cross_entropy_loss"), rules.class_loss),
    (called("cosine_embedding_loss multilabel_margin_loss multi_margin_loss"), rules.row_loss),
]
BY_ROW = (rules.same, rules.pointwise_loss, rules.class_loss, rules.row_loss)
"""Rules of operations that combine rows with rows."""
RULES: dict[Any, Callable] = {func: rule for funcs, rule in reversed(AXES) for func in funcs}

# Linearity, for second derivatives

POOLS = [f"{kind}_pool{k}d" for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for k in (1, 2, 3)]
CONVOLUTIONS = " ".join(f"conv{k}d" for k in (1, 2, 3))
JOINTLY = LINEAR | VIEWS | EXPANDS | MOVING | LIKE | (PLACING - called("scatter_reduce"))
JOINTLY |= called(
    "abs relu relu6 leaky_relu threshold hardtanh hardsigmoid hardshrink softshrink rrelu clamp clip clamp_min "
    "clamp_max maximum minimum fmax fmin where masked_fill dropout dropout1d dropout2d dropout3d alpha_dropout "
    "feature_alpha_dropout positive nansum nanmean amax amin max min cummax cummin cumsum pad tril triu diag "
    "diag_embed trace diff fold interpolate upsample pixel_shuffle pixel_unshuffle channel_shuffle detach copy_ fill "
    f"zero type half bfloat16 l1_loss nan_to_num setitem max_pool2d_with_indices {' '.join(POOLS)}"
)
"""Operations that are linear, perhaps piece by piece, in all that they read together."""
EACH = MULTIPLY | called(f"matmul mm bmm mv dot linear einsum outer inner bilinear prelu embedding {CONVOLUTIONS}")
PLUS = called("addcmul addmm addmv addr addbmm baddbmm")
"""Operations that add a product to the first tensor."""
EACH |= PLUS | called("conv_transpose1d conv_transpose2d conv_transpose3d lerp tensordot kron cross")
"""Operations that are linear in each tensor that they read."""
FIRST = DIVIDE | called("nll_loss kl_div")
"""Operations that are linear in the first."""
DIAGONAL = POINTWISE | called(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss "
    "soft_margin_loss"
)
"""Operations whose Hessian in one tensor is diagonal."""
ADDED = called(f"add sub subtract rsub radd cat stack concat where masked_fill linear {CONVOLUTIONS}")
"""Operations to which parameters are added, except for weights."""
OF_PARAMETERS = ADDED | EACH | EXPANDS | called("getitem addmm layer_norm rms_norm group_norm batch_norm instance_norm")
"""Operations that are linear in each parameter that they read."""


# How operations read parameters

FACTORS: dict[Any, Callable] = {
    func: rule
    for funcs, rule in [
        (called("linear"), rules.of_linear),
        (called("matmul mm bmm mv") - {T.__rmatmul__}, rules.of_matmul),
        (called("addmm"), rules.of_addmm),
        (called("einsum"), rules.of_einsum),
        (called("conv1d conv2d conv3d"), rules.of_convolution),
        (called("conv_transpose1d conv_transpose2d conv_transpose3d"), rules.of_transposed),
        (called("layer_norm"), rules.of_norm((2, 3), layer=True)),
        (called("rms_norm"), rules.of_norm((2, None), layer=True)),
        (called("group_norm"), rules.of_norm((2, 3))),
        ({F.batch_norm, F.instance_norm}, rules.of_norm((3, 4))),
        ({F.embedding}, rules.of_embedding),
        (called("getitem"), rules.of_index),
    ]
    for func in funcs
}
"""The rules of operations that read parameters."""
