"""What the evaluation of a batch brings, apart from the evaluation: a tree of tensors and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.fold import Fold
from invfunc.evaluation.weights import LossPart
from invfunc.reductions.quantity import Accumulator


def keeping(fold: Fold, phase: int) -> list[Accumulator]:
    """What keeps something of the samples in a phase, with what has to know of each of them alone."""
    found = fold.of_phase(phase)
    return [t for own in found for t in (own, own.before if own.reduction.apart else None) if t is not None]


def brought(engine: Engine, phase: int) -> Any:
    """All that a batch brings to a fold in a phase."""
    fold, aux = engine.fold, engine.kept()
    shapes = [*map(tuple, fold.found.outputs)]
    places = tree.unflatten([*range(len(shapes))], fold.found.structure)
    kept = [(dict(t.states), t.columns) for t in keeping(fold, phase)]
    outputs = None if engine.loss_part is None else engine.loss_part.outputs
    return kept, shapes, places, engine.scalar, outputs, aux


def bring(engine: Engine, phase: int, found: Any) -> Any:
    """Have an evaluation that was not made keep what another one of the same batch has brought; aux."""
    kept, shapes, places, engine.scalar, outputs, aux = found
    fold = engine.fold
    fold.found = replace(fold.found, outputs=[*map(torch.Size, shapes)], structure=tree.flatten(places)[1])
    for t, (states, columns) in zip(keeping(fold, phase), kept, strict=True):
        t.states, t.columns = states, columns
    if outputs is not None:
        engine.loss_part = LossPart.of(engine.problem, outputs)
    return aux
