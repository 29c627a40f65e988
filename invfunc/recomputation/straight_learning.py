"""What a watched call tells of further ones, which then need not be watched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from invfunc import tree
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.like import Like
from invfunc.recomputation.look import Look
from invfunc.recomputation.origins import Key
from invfunc.recomputation.purity import PLAIN
from invfunc.recomputation.shared import Moment
from invfunc.recomputation.straight import Template, form_of, is_simple

T = TypeVar("T")


def looked(call: Call, node: bool = False) -> Look | None:
    """A look at a call that begins, where it may tell of further ones: by hooks, or of a node."""
    report = call.report
    if report.block is None or call.kept or call.tolerance is not None:
        return None
    return report.known.straight.begins(call.pair, node)


def learn(
    call: Call,
    xs: Tensors,
    rest: Tensors,
    saved: list[tuple[torch.Size, torch.dtype]],
    keys: list[Key],
    needs: Sequence[Sequence[bool]],
    dtypes: list[torch.dtype],
    node: bool = False,
) -> None:
    """Note a call that was seen to do nothing but to compute. Its inverse is looked at when it is evaluated.

    Args:
        call: it.
        xs, rest: its tensors.
        saved: what autograd saves.
        keys: which part saves it.
        needs: of each evaluation of a shared function, of which tensors a gradient is needed.
        dtypes: those that it computes in.
        node: whether it is one of a node, not by hooks.
    """
    straight, options = call.report.known.straight, (*call.report.block.options, node)
    x, further, y, like = call.forms()
    if len(y.places) < len(y.others):  # what is no tensor there may depend on numbers
        return
    leaves, structure = tree.flatten((x.join(xs), *further.join(rest)))
    forms = [form_of(t) for t in (*xs, *rest)]
    others = [(i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
    evaluations = [_of_state(moment, need) for moment, need in zip(call.moments, needs, strict=True)]
    closed = straight.closed(other.only_read() for others in call.others.values() for other in others)
    if None in evaluations or any(type(leaf) not in PLAIN for _, leaf in others) or closed is None:
        return
    closed_forms = [form_of(t) for t in closed]
    if None in (*forms, *closed_forms) or not is_simple(structure) or not straight.takes(structure):
        return
    if straight.has(options, leaves, structure, closed):
        return
    forward, inverse, shared = straight.functions(x, like)
    template = Template(
        options=options,
        structure=structure,
        others=others,
        number=len(leaves),
        places=[i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)],
        forms=_known(forms),
        count=len(xs),
        x=x,
        rest=further,
        like=like,
        y=y,
        saved=saved,
        keys=keys,
        evaluations=_known(evaluations),
        dtypes=dtypes,
        closed=_known(closed_forms),
        default=torch.get_default_dtype(),
        look=(look := Look()),
        forward=forward,
        inverse=inverse,
        shared=shared,
    )
    call.look = look
    straight.add(template)


def _known(found: list[T | None]) -> list[T]:
    """What was found, which is all."""
    return [one for one in found if one is not None]


def _of_state(moment: Moment, needs: Sequence[bool]) -> tuple[Like, bool] | None:
    """What a shared function gets of the state, if that is its first tensor and no other one is."""
    like = moment.like[0] if moment.like else None
    return None if like is None or None in moment.places[1:] else (like, needs[0])
