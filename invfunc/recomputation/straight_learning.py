"""What a watched call tells of further ones, which then need not be watched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from invfunc import tree
from invfunc.recomputation.call import Call, Tensors
from invfunc.recomputation.like import Like
from invfunc.recomputation.look import Look
from invfunc.recomputation.origins import Key
from invfunc.recomputation.shared import Moment
from invfunc.recomputation.straight import Arguments, Template, Unlike, forms_of


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
    evaluations = [_of_state(moment, need) for moment, need in zip(call.moments, needs, strict=True)]
    closed = straight.closed(other.only_read() for others in call.others.values() for other in others)
    if None in evaluations or closed is None or not straight.takes(further.structure):
        return
    given = tree.flatten(x.join(xs)), tree.flatten(further.join(rest))
    if (alike := straight.alike(options, *given, closed)) is not None:
        call.look = None if alike.look.seen else alike.look  # that of a call whose x is held is never inverted
        return
    forward, inverse, shared = straight.functions(x, like)
    try:
        template = Template(
            options=options,
            x=Arguments(x, xs),
            rest=Arguments(further, rest),
            like=like,
            y=y,
            saved=saved,
            keys=keys,
            evaluations=[one for one in evaluations if one is not None],
            dtypes=dtypes,
            closed=forms_of(closed),
            default=torch.get_default_dtype(),
            look=(look := Look()),
            forward=forward,
            inverse=inverse,
            shared=shared,
        )
    except Unlike:
        return
    call.look = look
    straight.add(template)


def _of_state(moment: Moment, needs: Sequence[bool]) -> tuple[Like, bool] | None:
    """What a shared function gets of the state, if that is its first tensor and no other one is."""
    like = moment.like[0] if moment.like else None
    return None if like is None or None in moment.places[1:] else (like, needs[0])
