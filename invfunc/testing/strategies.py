"""Strategies of hypothesis for functions of parameters: models, losses, chunkings, invertible functions.

Each value is small, is drawn simple first, and prints as a line of code that makes it again, numbers and all:

    import torch
    from invfunc.testing.strategies import *
    problem = Problem(model=Model(family='affine', n=2, ...), loss=Loss(called='mse_loss', ...))

It needs hypothesis, which comes with the extra `invfunc[testing]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc._extras import extra
from invfunc.testing.models import (
    FAMILIES,
    LOSS_FUNCTIONS,
    PAIRS,
    Loss,
    Model,
    Numbers,
    Pair,
    Problem,
    option,
    seeded,
)

st: Any = extra("hypothesis.strategies", "testing")

__all__ = [
    "Loss",
    "Model",
    "Numbers",
    "Pair",
    "Problem",
    "chunkings",
    "losses",
    "models",
    "pairs",
    "problems",
    "seeded",
    "splits",
]
SEEDS = st.integers(0, 99)


def models(
    families: Sequence[str] | None = None,
    *,
    n: tuple[int, int] = (1, 4),
    in_dims: Sequence[int] = (0,),
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Any:
    """A `Model`: `f(params, x) -> [N, 3]` of a family, with x and N.

    Args:
        families: names of `FAMILIES`; by default all whose outputs are `[N, 3]`.
        n: the least and the most samples.
        in_dims: where x may have its samples.
        dtype, device: of parameters and inputs.

    Example:
        >>> from hypothesis import given, settings
        >>> from invfunc.testing import strategies
        >>> @settings(max_examples=3, database=None)
        ... @given(strategies.models(["perceptron", "attention"]))
        ... def test_outputs(model):
        ...     assert model.f(model.params, model.x).shape == (model.n, 3)
        >>> test_outputs()
    """
    names = [name for name in FAMILIES if name != "sequence"] if families is None else list(families)
    for name in names:
        option("models", "family", name, FAMILIES)
    drawn = {"family": st.sampled_from(names), "n": st.integers(*n), "seed": SEEDS, "in_dim": st.sampled_from(in_dims)}
    return st.builds(Model, **drawn, dtype=st.just(dtype), device=st.just(device))


def losses(names: Sequence[str] | None = None, *, reductions: Sequence[str] = ("mean", "sum", "none")) -> Any:
    """A `Loss` of outputs `[N, 3]`, with its reduction and a factor in front."""
    called = st.sampled_from(list(LOSS_FUNCTIONS) if names is None else list(names))
    return st.builds(Loss, called, st.sampled_from(list(reductions)), st.sampled_from([1.0, 2.0, 0.5]))


def problems(families: Sequence[str] | None = None, **options: Any) -> Any:
    """A `Problem`: a model with its loss, which `laws.check` takes; options as for `models`."""
    return st.builds(Problem, models(families, **options), losses())


def splits(length: int) -> Any:
    """A ragged split: a list of lengths, each at least 1, that add up to this one."""
    cuts = st.sets(st.integers(1, max(1, length - 1)), max_size=max(0, length - 1))

    def lengths(at: set[int]) -> list[int]:
        edges = [0, *sorted(at - {length}), length]
        return [b - a for a, b in zip(edges[:-1], edges[1:], strict=True)]

    return cuts.map(lengths)


def chunkings(axes: Sequence[str] = ("samples", "params"), *, most: int = 4) -> Any:
    """The options of `chunked`: `{"n": 2, "over": "samples"}` or a `chunk_size`, over one of these axes."""
    over = st.sampled_from([axes] if isinstance(axes, str) else list(axes))
    by_number = st.fixed_dictionaries({"n": st.integers(1, most), "over": over})
    return st.one_of(by_number, st.fixed_dictionaries({"chunk_size": st.integers(1, most), "over": over}))


def pairs(
    names: Sequence[str] | None = None,
    *,
    n: tuple[int, int] = (1, 3),
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Any:
    """A `Pair`: an invertible function or a chain of some, with its state and arguments, which `check_pair` takes."""
    drawn = {"called": st.sampled_from(list(PAIRS) if names is None else list(names)), "seed": SEEDS}
    sizes = {"n": st.integers(*n), "width": st.integers(1, 3)}
    return st.builds(Pair, **drawn, **sizes, dtype=st.just(dtype), device=st.just(device))
