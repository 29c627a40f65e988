"""Rules of operations that move entries, and of those that contract or normalise along whole axes."""

from __future__ import annotations

import torch

from invfunc.operations.receptive_fields.regions import NONE
from invfunc.operations.receptive_fields.rule import (
    Rows,
    Step,
    behind,
    elementwise,
    flattened,
    joined,
    most,
    raised,
    rule,
)

FILLS = set("copy_ zero_ fill_ uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_".split())
"""Write all of their first argument, and do not read it."""
rule(*FILLS)(elementwise)
rule(
    *"clone _to_copy contiguous positive tril triu bernoulli normal poisson native_dropout _fused_dropout".split(),
    *"hardswish _prelu_kernel rrelu_with_noise log_sigmoid_forward view_as_complex complex lift_fresh_copy".split(),
    *"mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split(),
    *"soft_margin_loss dropout alpha_dropout nan_to_num bitwise_not logical_not".split(),
)(elementwise)


# The same operation on the labels


@rule("cat", "concat", "concatenate")
def _cat(step: Step, out: torch.Tensor) -> Rows:
    parts = [step.filled(x) for x in step["tensors"] if x.ndim == out.ndim]
    return torch.cat(parts, behind(step["dim"], out.ndim)[0])


@rule("stack")
def _stack(step: Step, out: torch.Tensor) -> Rows:
    return torch.stack([step.filled(x) for x in step["tensors"]], behind(step["dim"], out.ndim)[0])


@rule("flip")
def _flip(step: Step, out: torch.Tensor) -> Rows:
    return step.filled(step["self"]).flip([d % out.ndim + 1 for d in step["dims"]])


@rule("roll")
def _roll(step: Step, out: torch.Tensor) -> Rows:
    rows, shifts = step.filled(step["self"]), step["shifts"]
    if not step["dims"]:
        return rows.flatten(1).roll(shifts, 1).view(rows.shape)
    return rows.roll(shifts, behind(step["dims"], out.ndim))


@rule("constant_pad_nd")
def _constant_pad(step: Step, out: torch.Tensor) -> Rows:
    return torch.constant_pad_nd(step.filled(step["self"]), step["pad"], NONE)


@rule(*(f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)))
def _pad(step: Step, out: torch.Tensor) -> Rows:
    rows = flattened(step.filled(step["self"]), len(step["padding"]) // 2)
    return step.func(rows, step["padding"]).reshape(-1, *out.shape)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def _shuffle(step: Step, out: torch.Tensor) -> Rows:
    rows = step.filled(step["self"])
    batched = rows.reshape(-1, *rows.shape[-3:]) if "channel" not in str(step.func) else rows.flatten(0, 1)
    return step.func(batched, *step.args[1:], **step.kwargs).reshape(-1, *out.shape)


@rule("repeat")
def _repeat(step: Step, out: torch.Tensor) -> Rows:
    return raised(step.filled(step["self"]), out.ndim).repeat(1, *step["repeats"])


@rule("slice_scatter", "select_scatter")
def _scattered(step: Step, out: torch.Tensor) -> Rows:
    rows, src, dim = step.filled(step["self"]), step.filled(step["src"]), behind(step["dim"], out.ndim)[0]
    if "index" in step:
        return rows.select_scatter(src, dim, step["index"])
    return rows.slice_scatter(src, dim, step["start"], step["end"], step["step"])


@rule("index_select")
def _index_select(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    if not step.only(x) or not x.ndim:
        return None
    return step.filled(x).index_select(behind(step["dim"], x.ndim)[0], step["index"].to(x.device))


@rule("gather")
def _gather(step: Step, out: torch.Tensor) -> Rows:
    x, index = step["self"], step["index"]
    if not step.only(x) or x.ndim != index.ndim or not x.ndim:
        return None
    return step.filled(x).gather(behind(step["dim"], x.ndim)[0], index.expand(step.height, *index.shape))


@rule("index")
def _index(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    if not step.only(x):
        return None
    rows = step.filled(x).movedim(0, -1)  # last, indices of whichever axes leave it there
    return torch.ops.aten.index.Tensor(rows, step["indices"]).movedim(-1, 0)


@rule("index_put")
def _index_put(step: Step, out: torch.Tensor) -> Rows:
    x, indices, values = step["self"], step["indices"], step["values"]
    known = [step.rows(i) is None for i in indices if i is not None]
    if step["accumulate"] or not all(known):
        return None
    rows, put = step.filled(x), step.filled(values)
    return torch.stack([torch.ops.aten.index_put.default(a, indices, b) for a, b in zip(rows, put, strict=True)])


@rule("embedding")
def _embedding(step: Step, out: torch.Tensor) -> Rows:
    weight, index = step["weight"], step["indices"]
    entries = step.rows(index)
    if entries is None:
        return step.filled(weight)[:, index]
    read = step.rows(weight)
    return joined(entries[..., None], None if read is None else raised(most(read, (1, 2)), out.ndim))


# Along axes


@rule(
    *"sum nansum mean amax amin max min var std var_mean std_mean logsumexp prod any all argmax argmin norm".split(),
    *"linalg_vector_norm median nanmedian mode kthvalue count_nonzero aminmax".split(),
)
def _reduced(step: Step, out: torch.Tensor) -> Rows:
    x = step.args[0]
    if not step.only(x):
        return None
    axes = behind(step["dim"] if "dim" in step else None, x.ndim)
    return most(step.filled(x), axes).reshape(-1, *out.shape)


@rule(*"_softmax _log_softmax softmax log_softmax _safe_softmax sort argsort topk msort".split())
def _along(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    if not step.only(x):
        return None
    return most(step.filled(x), behind(step["dim"] if "dim" in step else 0, x.ndim))


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def _cumulated(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    return step.filled(x).cummax(behind(step["dim"], x.ndim)[0]).values if x.ndim else step.filled(x)


@rule("glu")
def _glu(step: Step, out: torch.Tensor) -> Rows:
    return joined(*step.filled(step["self"]).chunk(2, behind(step["dim"], out.ndim)[0]))


def _rows_of(rows: Rows) -> Rows:
    return None if rows is None else most(rows, (rows.ndim - 1,))


def _columns_of(rows: Rows) -> Rows:
    return None if rows is None else most(rows, (rows.ndim - 2,))


def _product(step: Step, a: torch.Tensor, b: torch.Tensor) -> Rows:
    return joined(_rows_of(step.rows(a)), _columns_of(step.rows(b)))


@rule("mm", "bmm")
def _mm(step: Step, out: torch.Tensor) -> Rows:
    return _product(step, step["self"], step["mat2"])


@rule("addmm", "_addmm_activation", "baddbmm")
def _addmm(step: Step, out: torch.Tensor) -> Rows:
    a, b = ("batch1", "batch2") if "batch1" in step else ("mat1", "mat2")
    added = step.rows(step["self"])
    return joined(None if added is None else raised(added, out.ndim), _product(step, step[a], step[b]))


@rule("mv", "addmv")
def _mv(step: Step, out: torch.Tensor) -> Rows:
    matrix = step["mat"] if "mat" in step else step["self"]
    read, whole = step.rows(matrix), step.hull(step["vec"])
    return joined(
        None if read is None else most(read, (2,)).squeeze(2),
        None if whole is None else whole[:, None],
        raised(step.filled(step["self"]), 1) if "mat" in step else None,
    )


@rule("linear")
def _linear(step: Step, out: torch.Tensor) -> Rows:
    weight, bias = _rows_of(step.rows(step["weight"])), step.rows(step["bias"])
    return joined(
        _rows_of(step.rows(step["input"])),
        None if weight is None else raised(weight.squeeze(-1), out.ndim),
        None if bias is None else raised(bias, out.ndim),
    )


@rule("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
def _fused_attention(step: Step, out: torch.Tensor) -> Rows | list[Rows]:
    inputs = [step[n] for n in ("src", "query", "key", "value") if n in step]
    if not all(any(x is i for i in inputs) for x in step.labelled) or out.ndim != 3:
        return None
    return joined(*(most(step.filled(x), (2, 3)) for x in step.labelled))


_KERNELS = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"


@rule(*(f"_scaled_dot_product_{kernel}" for kernel in _KERNELS.split()))
def _attention(step: Step, out: torch.Tensor) -> Rows | list[Rows]:
    query, key, value = step["query"], step["key"], step["value"]
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        return None
    names = [name for name in ("attn_mask", "attn_bias") if name in step]
    mask, k = step.rows(step[names[0]]) if names else None, step.rows(key)
    parts = [_rows_of(step.rows(query)), None if k is None else most(k, (3, 4)), _columns_of(step.rows(value))]
    return [joined(*parts, None if mask is None else raised(most(mask, (mask.ndim - 1,)), out.ndim))]
