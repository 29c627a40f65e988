"""The options that say which columns a statistic takes: all of them, drawn ones, or the gradient itself, and how."""

from __future__ import annotations

import math
from typing import Any

import torch

from invfunc import tree
from invfunc.callables import check_choice, check_count, check_generator, describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker.matrix import Kronecker, LowRank
from invfunc.loss.drawn import Peel, key_of
from invfunc.plan import Options
from invfunc.reductions.columns import Covariance
from invfunc.reductions.gradients import PROJECTIONS, Sketches
from invfunc.reductions.reduction import GGN, GRADIENT, Drawing


def drawing(
    name: str, mc_samples: Any, generator: Any, sample: Any = None, peel: Any = None, with_error: bool = False
) -> Drawing | None:
    """Check how columns are to be drawn; None takes all of them."""
    if mc_samples is None:
        given = {"generator": generator, "sample": sample, "peel": peel, "with_error": with_error or None}
        for option, value in given.items():
            if value is not None:
                least = 2 if with_error else 1
                raise ArgumentError(
                    f"{name}({option}=...): nothing is drawn without mc_samples; pass mc_samples={least}."
                )
        return None
    call, least = (f"{name}(with_error=True, ", 2) if with_error else (f"{name}(", 1)
    check_count(call, "mc_samples", mc_samples, least)
    check_generator(f"{name}(mc_samples={mc_samples}, ", generator, "what is drawn comes")
    if sample is not None and not callable(sample):
        kind = type(sample).__name__
        raise ArgumentTypeError(
            f"{name}(sample=...): sample is of type {kind}, but has to be a function (outputs, generator) -> target."
        )
    return Drawing(mc_samples, generator, sample, _peel(name, mc_samples, sample, peel, least))


def projecting(name: str, rows: Any, columns: Any, projection: Any, generator: Any) -> Sketches:
    """Check the sizes and the kind of random matrices, and draw the number that they are made of."""
    for option, value in (("rows", rows), ("columns", columns)):
        check_count(f"{name}(", option, value)
    check_choice(f"{name}(", "projection", projection, PROJECTIONS)
    check_generator(f"{name}(", generator, "the matrices are drawn")
    return Sketches(rows, columns, projection, key_of(generator))


def covariances(name: str, covariance: Any) -> float | dict[str, Covariance] | LowRank:
    """Check a tree of covariances, and bring each `Kronecker` to the form with eigenvalues."""
    if isinstance(covariance, LowRank):
        return covariance
    if isinstance(covariance, (int, float)) and not isinstance(covariance, bool):
        if not covariance >= 0:
            raise ArgumentError(f"{name}(f, {covariance}): a variance has to be 0 or more.")
        return float(covariance)
    found = dict(tree.named_parts(covariance, Kronecker)[0])
    for path, given in found.items():
        if not isinstance(given, torch.Tensor | Kronecker | None):
            raise ArgumentTypeError(
                f"{name}(f, covariance): covariance{path} is of type {type(given).__name__}, but has to be a tensor of "
                "variances, a Kronecker, or None; one of all parameters at once is a tensor [P, P] or a LowRank, as "
                "eigenpairs(f, loss)(...).inverse(damping) returns it."
            )
    return {path: given.eigen() if isinstance(given, Kronecker) else given for path, given in found.items()}


def _peel(name: str, mc_samples: int, sample: Any, peel: Any, least: int) -> Peel | None:
    """Check how many of the columns are taken as they are."""
    if peel is None:
        return None
    if sample is not None:
        raise ArgumentError(f"{name}(peel={peel!r}, sample=...): what a sampler draws cannot be peeled.")
    if peel != "auto" and (not isinstance(peel, int) or isinstance(peel, bool)):
        raise ArgumentTypeError(f"{name}(peel={peel!r}): peel has to be 'auto' or an int: how many are not drawn.")
    if peel != "auto" and not 0 <= peel <= mc_samples - least:
        raise ArgumentError(
            f"{name}(mc_samples={mc_samples}, peel={peel}): of {mc_samples} vectors at least {least} "
            f"{'is' if least == 1 else 'are'} drawn for what is not peeled, so that peel is between 0 and "
            f"{mc_samples - least}."
        )
    return Peel(peel, max(least, mc_samples // 2) if peel == "auto" and least > 1 else least)


def fisher_columns(
    name: str, fisher: str, mc_samples: int, generator: Any, sample: Any, peel: Any = None
) -> dict[str, Any]:
    """The columns that a Fisher matrix is made of, as fields of a `Statistic`."""
    kinds = {"mc": GGN, "exact": GGN, "empirical": GRADIENT}
    check_choice(f"{name}(", "fisher", fisher, kinds)
    if fisher == "mc":
        if mc_samples is None:
            raise ArgumentError(f"{name}(mc_samples=None): fisher='mc' needs mc_samples, 1 at least.")
        return {"kind": GGN, "drawing": drawing(name, mc_samples, generator, sample, peel)}
    if mc_samples != 1 or generator is not None or sample is not None or peel is not None:
        raise ArgumentError(
            f"{name}(fisher={fisher!r}): nothing is drawn, so leave mc_samples, generator, sample and peel out, or "
            "pass fisher='mc'."
        )
    return {"kind": kinds[fisher], "spelled": spelled(fisher=fisher)}


def spelled(**options: Any) -> str:
    """Options as they stand in a call behind its functions; None and False are left out."""
    return "".join(f", {name}={value!r}" for name, value in options.items() if value not in (None, False))


def by_method(name: str, f: Any, method: str) -> Options:
    """Check how exact columns are to be pulled back."""
    check_choice(f"{name}({describe(f)}, ", "method", method, ("auto", "dense"))
    return Options(dense=method == "dense")


def most_of(name: str, max_factor_dim: int | None) -> float:
    """Check up to which dimension a factor is kept whole."""
    if max_factor_dim is None:
        return math.inf
    check_count(f"{name}(", "max_factor_dim", max_factor_dim, least=0)
    return max(1, max_factor_dim)  # a matrix of one entry is its diagonal


def check_factors(name: str, weight_sharing: str, unsupported: str) -> None:
    """Check how positions share a weight, and what to do with parameters that have no factors."""
    check_choice(f"{name}(", "weight_sharing", weight_sharing, ("expand", "reduce", "backpack"))
    check_choice(f"{name}(", "unsupported", unsupported, ("error", "diagonal", "skip"))
