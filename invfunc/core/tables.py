"""Facts about each operation, by its name: a line for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import version
from invfunc._torch.values import wide
from invfunc.core import axes
from invfunc.core.axes import factors_of, letters, operands
from invfunc.core.marks import Axis, Node, Run, Unsupported, named, option
from invfunc.core.uses import Block, Convolution, Expanded, ProductUse, TableRows, Transposed, Use, front
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.operations.operation import called, getters
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
PLAIN = getters(
    "shape ndim dtype device layout requires_grad is_cuda is_leaf grad_fn is_sparse is_quantized is_meta is_nested "
    "names itemsize nbytes is_mps is_xla is_cpu output_nr _version"
) | called(
    "size dim ndimension numel nelement stride __len__ is_floating_point is_complex is_contiguous get_device "
    "element_size storage_offset is_tensor __hash__ is_same_size is_grad_enabled finfo iinfo __bool__ is_nonzero "
    "is_autocast_enabled broadcast_shapes can_cast result_type item __float__ __int__ __index__ __format__ __repr__"
)
"""Operations that are not looked at: of forms, and of numbers that leave torch, which are constants of the call."""
FILLED = called("zeros ones full empty rand randn new_zeros new_ones new_full new_empty")
SHORT = POINTWISE - called("logsigmoid log_sigmoid")
"""Those that are no criterion."""
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
    if not getattr(func, "__name__", "").rstrip("_") + "_" == getattr(func, "__name__", "")
}
"""Operations that only move entries, so that they may run on the numbers of the samples."""

AXES: list[tuple[set[Any], Callable]] = [
    (POINTWISE, axes.same),
    ({T.unsqueeze_, T.squeeze_, T.t_, T.transpose_, T.swapaxes_, T.swapdims_}, axes.reshaped_in_place),
    (called("sum nansum mean nanmean"), axes.reduction(linear=True)),
    (
        called("amax amin max min argmax argmin std var logsumexp prod any all count_nonzero median var_mean std_mean"),
        axes.reduction(),
    ),
    (called("softmax log_softmax softmin cumsum cumprod sort argsort logcumsumexp cummax"), axes.along(1)),
    (called("glu"), axes.along(1, -1)),
    (called("topk"), axes.along(2, -1)),
    (called("normalize"), axes.along(2, 1)),
    (called("view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as"), axes.reshaped),
    (called("permute"), axes.permuted),
    (called("t transpose swapaxes swapdims") | getters("mT"), axes.swapped),
    (getters("T"), axes.reversed_),
    (called("expand expand_as broadcast_to"), axes.expanded),
    (called("cat concat concatenate"), axes.joined),
    (called("stack"), axes.stacked),
    (called("chunk split tensor_split split_with_sizes"), axes.parts),
    (called("select unbind"), axes.dropped),
    (INDEXES, axes.indexed),
    (called("matmul mm bmm mv dot") - {T.__rmatmul__}, axes.matmul),
    (called("addmm baddbmm addmv"), axes.addmm),
    (called("linear"), axes.linear),
    (called("einsum"), axes.einsum),
    (called("scaled_dot_product_attention"), axes.attention),
    ({F.embedding}, axes.embedding),
    (called("layer_norm rms_norm"), axes.layer_norm),
    (called("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"), axes.convolution),
    (called("_sample_dirichlet multinomial"), axes.spatial(1)),
    ({F.batch_norm}, axes.batch_norm),
    ({F.instance_norm}, axes.instance_norm),
    *[
        (called(f"avg_pool{k}d max_pool{k}d adaptive_avg_pool{k}d adaptive_max_pool{k}d lp_pool{k}d"), axes.spatial(k))
        for k in (1, 2, 3)
    ],
    (
        called("group_norm max_pool2d_with_indices interpolate local_response_norm channel_shuffle upsample"),
        axes.first,
    ),
    (
        called(
            "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
            "poisson_nll_loss gaussian_nll_loss soft_margin_loss margin_ranking_loss hinge_embedding_loss"
        ),
        axes.pointwise_loss,
    ),
    ({states_before, states_after}, axes.steps),
    (called("cross_entropy nll_loss cross_entropy_loss"), axes.class_loss),
    (called("cosine_embedding_loss multilabel_margin_loss multi_margin_loss"), axes.row_loss),
]
BY_ROW = (axes.same, axes.pointwise_loss, axes.class_loss, axes.row_loss)
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


# How operations read parameters: rules `(run, args, kwargs, nodes, axes, out_axis, func) -> uses`, None without a rule

Nodes = dict[int, Node]


def each(value: Any, count: int) -> tuple[int, ...]:
    """An option of a convolution, for each dim."""
    return (value,) * count if isinstance(value, int) else tuple(value) * (count if len(value) == 1 else 1)


def of_linear(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`linear(x, w, b)`."""
    if len(args) == 3:
        x, w, b = args
    else:
        x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    uses: list[Use] = []
    if id(w) in nodes:
        if w.ndim != 2:
            return None
        pair = ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, None, None, ((), (0,), (1,)))
        pair.layer = True
        uses.append(pair)
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis))
    return uses


def _by_letters(
    run: Run, nodes: Nodes, w: torch.Tensor, x: torch.Tensor, ws: str, xs: str, outs: str, axes: Any, axis: Axis
) -> Any:
    """A product of one parameter and one tensor with samples."""
    if len(set(ws)) < len(ws) or len(set(xs)) < len(xs):
        return None
    sample = xs[axes[id(x)][0]]
    g = [c for c in ws if c in xs and c in outs]
    k = [c for c in ws if c in xs and c not in outs]
    o = [c for c in ws if c not in xs and c in outs]
    p = [c for c in outs if c in xs and c not in ws]
    if len(g) + len(k) + len(o) < len(ws) or len(p) + len(g) + len(k) < len(xs) or (sample not in p and run.n > 1):
        return None

    def at(labels: list[str], of: str) -> tuple[int, ...]:
        return tuple(of.index(c) - len(of) for c in labels)

    of_a, of_d = (at(g, xs), at(p, xs), at(k, xs)), (at(g, outs), at(p, outs), at(o, outs))
    of_w = tuple(tuple(ws.index(c) for c in labels) for labels in (g, o, k))
    return [ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, of_a, of_d, of_w)]  # pyright: ignore[reportArgumentType]: three


def of_matmul(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """Products of (batches of) matrices and vectors."""
    a, b = args[0], option(args, kwargs, 1, "other", kwargs.get("mat2"))
    most = max(a.ndim, b.ndim) - 2
    batch = "ABCDEFGH"[: max(most, 0)]
    of_a = "k" if a.ndim == 1 else batch[len(batch) - a.ndim + 2 :] + "mk"
    of_b = "k" if b.ndim == 1 else batch[len(batch) - b.ndim + 2 :] + "ko"
    outs = batch + "m" * (a.ndim > 1) + "o" * (b.ndim > 1)
    (w, ws, x, xs) = (a, of_a, b, of_b) if id(a) in nodes else (b, of_b, a, of_a)
    if id(x) not in axes:
        return None
    if w is b and b.ndim == 2 and axes[id(x)][0] != -1 and x.ndim > 1:
        return [ProductUse(nodes[id(w)], w, x, axes[id(x)], axis, None, None, ((), (1,), (0,)))]
    if any(w.shape[i] != x.shape[i] for i in range(-min(w.ndim, x.ndim), -2)):
        return None
    return _by_letters(run, nodes, w, x, ws, xs, outs, axes, axis)


def of_addmm(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`addmm(c, a, b)`."""
    if len(args) + len(kwargs) != 3 or kwargs.keys() - {"mat1", "mat2"}:
        return None
    uses: list[Use] = [Expanded(nodes[id(args[0])], args[0], axis)] if id(args[0]) in nodes else []
    a, b = factors_of(args, kwargs)
    if id(a) in nodes or id(b) in nodes:
        more = of_matmul(run, (a, b), {}, nodes, axes, axis, func)
        return None if more is None else uses + more
    return uses


def of_einsum(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """An einsum of a parameter and a tensor."""
    given = operands(args)
    if len(given) != 2 or len(nodes) != 1 or len(axes) != 1:
        return None
    ins, outs = letters(args[0], [x.shape for x in given])
    (w, ws), (x, xs) = [*zip(given, ins, strict=True)][:: 1 if id(given[0]) in nodes else -1]
    sizes = dict(zip(ws, w.shape, strict=True))
    if any(sizes.get(c, s) != s for c, s in zip(xs, x.shape, strict=True)):
        return None
    return _by_letters(run, nodes, w, x, ws, xs, outs, axes, axis)


def of_convolution(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`conv2d(x, w, b, stride, padding, dilation, groups)` and its like."""
    x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    rest = w.ndim - 2
    if x.ndim != w.ndim or id(x) not in axes:
        return None
    stride, dilation = (each(option(args, kwargs, i, name, 1), rest) for i, name in ((3, "stride"), (5, "dilation")))
    padding, groups = option(args, kwargs, 4, "padding", 0), option(args, kwargs, 6, "groups", 1)
    if padding == "valid":
        padding = 0
    if padding == "same":
        if any((k - 1) * gap % 2 for k, gap in zip(w.shape[2:], dilation, strict=True)):
            return None
        padding = tuple((k - 1) * gap // 2 for k, gap in zip(w.shape[2:], dilation, strict=True))
    uses: list[Use] = []
    if id(w) in nodes:
        window = (stride, each(padding, rest), dilation)
        uses.append(Convolution(nodes[id(w)], w, x, axes[id(x)], axis, window, groups))
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis, view=(b.numel(), *[1] * rest)))
    return uses


def of_norm(places: tuple[int, int | None], layer: bool = False) -> Callable:
    """A rule of norms: the scale reads what is normalised, the shift is added."""

    def rule(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
        w = option(args, kwargs, places[0], "weight")
        b = option(args, kwargs, places[1], "bias") if places[1] else None
        x = args[0]
        if id(x) not in axes:
            return None
        if named(func) == "batch_norm" and option(args, kwargs, 5, "training", False):
            raise Unsupported("batch norm in train mode")
        plain, options = list(args), {k: v for k, v in kwargs.items() if k not in ("weight", "bias")}
        for i in places:
            if i and i < len(plain):
                plain[i] = None
        before = version(x)

        def normal(run: Run, block: Block) -> torch.Tensor:
            if version(x) != before:
                raise Unsupported("what a parameter met was changed in place later")
            with TwiceDifferentiable() if run.deep else torch.no_grad():
                return wide(run.taken(front(func(run.strip(x), *plain[1:], **options), axis, run.n), block))

        uses: list[Use] = []
        for t, factor in ((w, normal), (b, None)):
            if t is not None and id(t) in nodes:
                view = tuple(t.shape) if layer else (t.numel(), *[1] * (x.ndim - 2))
                uses.append(Expanded(nodes[id(t)], t, axis, factor, view))
        return uses

    return rule


def of_embedding(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`embedding(index, table, padding_idx)`."""
    if option(args, kwargs, 3, "max_norm") is not None or option(args, kwargs, 5, "scale_grad_by_freq", False):
        raise Unsupported("embedding with max_norm or scale_grad_by_freq depends on all samples")
    table, padding = option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "padding_idx")
    if id(table) not in nodes or id(args[0]) not in axes:
        return None
    if padding is not None and padding < 0:
        padding += len(table)
    return [TableRows(nodes[id(table)], table, args[0], axes[id(args[0])], axis, padding)]


def of_index(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`w[i]`."""
    w, i = args[0], args[-1]
    if id(w) in nodes and isinstance(i, torch.Tensor) and id(i) in axes and i.dtype == torch.long and w.ndim > 0:
        return [TableRows(nodes[id(w)], w, i, axes[id(i)], axis, None)]
    return None


def of_transposed(run: Run, args: tuple, kwargs: dict, nodes: Nodes, axes: Any, axis: Axis, func: Any) -> Any:
    """`conv_transpose2d(x, w, b, stride, padding, output_padding, groups, dilation)` and its like."""
    x, w, b = args[0], option(args, kwargs, 1, "weight"), option(args, kwargs, 2, "bias")
    rest = w.ndim - 2
    if x.ndim != w.ndim or id(x) not in axes:
        return None
    names = (3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1)
    window = tuple(each(option(args, kwargs, *name), rest) for name in names)
    uses: list[Use] = []
    if id(w) in nodes:
        groups = option(args, kwargs, 6, "groups", 1)
        uses.append(Transposed(nodes[id(w)], w, x, axes[id(x)], axis, window, groups))
    if b is not None and id(b) in nodes:
        uses.append(Expanded(nodes[id(b)], b, axis, view=(b.numel(), *[1] * rest)))
    return uses


FACTORS: dict[Any, Callable] = {
    func: rule
    for names, rule in [
        ("linear", of_linear),
        ("matmul mm bmm mv", of_matmul),
        ("addmm", of_addmm),
        ("einsum", of_einsum),
        ("conv1d conv2d conv3d", of_convolution),
        ("conv_transpose1d conv_transpose2d conv_transpose3d", of_transposed),
        ("layer_norm", of_norm((2, 3), layer=True)),
        ("rms_norm", of_norm((2, None), layer=True)),
        ("group_norm", of_norm((2, 3))),
        ("getitem", of_index),
    ]
    for func in called(names) - {T.__rmatmul__}
}
FACTORS |= {F.batch_norm: of_norm((3, 4)), F.instance_norm: of_norm((3, 4)), F.embedding: of_embedding}
"""The rules of operations that read parameters."""
