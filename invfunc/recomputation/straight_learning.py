"""What a watched call tells of further ones, which then need not be watched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from invfunc import tree
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.like import Like
from invfunc.recomputation.origins import Key
from invfunc.recomputation.purity import PLAIN, Look
from invfunc.recomputation.straight import Template, form_of, is_simple


def looked(call: Call) -> Look | None:
    """A look at a call that begins, where it may tell of further ones."""
    report = call.report
    if report.block is None or call.kept or call.tolerance is not None:
        return None
    return report.known.straight.begins(call.pair)


def learn(
    call: Call,
    xs: Tensors,
    rest: Tensors,
    saved: list[tuple[torch.Size, torch.dtype]],
    keys: list[Key],
    evaluations: Sequence[tuple[Like | None, bool]],
    dtypes: list[torch.dtype],
) -> None:
    """Note a call that was seen to do nothing but to compute. Its inverse is looked at when it is evaluated."""
    straight, options = call.report.known.straight, call.report.block.options
    x, further, y, like = call.forms
    leaves, structure = tree.flatten((x.join(xs), *further.join(rest)))
    forms = [form_of(t) for t in (*xs, *rest)]
    others = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
    if any(type(leaf) not in PLAIN for _, leaf in others):
        return
    if None in forms or not is_simple(structure) or straight.has(options, leaves, structure):
        return
    template = Template(
        options=options,
        structure=structure,
        others=others,
        number=len(leaves),
        places=[i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)],
        forms=[form for form in forms if form is not None],
        count=len(xs),
        x=x,
        rest=further,
        like=like,
        y=y,
        saved=saved,
        keys=keys,
        evaluations=[(like, need) for like, need in evaluations if like is not None],
        dtypes=dtypes,
        default=torch.get_default_dtype(),
        look=(look := Look()),
    )
    call.look = look
    straight.add(template)
