"""The functions that transforms are given, and the options that say which columns a statistic takes, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.functional import Functional
from invfunc.kronecker.matrix import Kronecker, LowRank
from invfunc.loss.drawn import Peel, key_of
from invfunc.plan import Options
from invfunc.reductions.columns import Covariance
from invfunc.reductions.gradients import PROJECTIONS, Sketches
from invfunc.reductions.reduction import GGN, GRADIENT, Drawing


def check_callable(name: str, f: Any) -> None:
    """A transform takes a function; a module needs its parameters taken out first."""
    if isinstance(f, nn.Module):
        kind = type(f).__name__
        raise ArgumentTypeError(
            f"{name}(f): f is a module ({kind}), but has to be a function of its parameters: "
            "f, params = functional(model)."
        )
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f): f is the class {f.__name__}, but has to be a function of parameters: "
            f"f, params = functional({f.__name__}(...))."
        )
    if not callable(f):
        raise ArgumentTypeError(f"{name}(f): f is of type {type(f).__name__}, but has to be a function.")


def check_functions(name: str, f: Any, loss: Any = None) -> None:
    """A model function, or a loss function alone, and the loss of a model function."""
    if loss is not None and _is_loss(f):
        raise ArgumentTypeError(
            f"{name}({describe(f)}, {describe(loss)}): f is a loss, but the model comes first: {name}(f, loss)."
        )
    check_callable(name, f)
    if loss is None:
        return
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ArgumentTypeError(
            f"{name}(f, loss): loss is the class {loss.__name__}, but has to be a function: {loss.__name__}()."
        )
    if isinstance(loss, Functional):
        raise ArgumentTypeError(f"{name}(f, loss): loss is a model, {loss!r}. The model comes first, then its loss.")
    if not callable(loss):
        kind = type(loss).__name__
        raise ArgumentTypeError(f"{name}(f, loss): loss is of type {kind}, but has to be a function.")


def _is_loss(f: Any) -> bool:
    """Tells whether f is one of torch's losses, as a module or as a function."""
    if isinstance(f, nn.Module):
        return type(f).__module__ == nn.modules.loss.__name__
    name = getattr(f, "__name__", "")
    ours = getattr(f, "__module__", None) == nn.functional.__name__
    return ours and (name.endswith("_loss") or "cross_entropy" in name)


def describe(f: Any) -> str:
    """A function as its name or as the transform that it is, a module as its class."""
    if isinstance(f, nn.Module):
        return type(f).__name__
    return getattr(f, "__name__", None) or repr(f)


def check_count(call: str, name: str, value: Any, least: int = 1) -> None:
    """A number of something, in a call that begins so."""
    if not isinstance(value, int) or isinstance(value, bool):
        kind = type(value).__name__
        raise ArgumentTypeError(f"{call}{name}={value!r}): {name} is of type {kind}, but has to be an int.")
    if value < least:
        raise ArgumentError(f"{call}{name}={value}): {name} has to be at least {least}.")


def check_choice(call: str, name: str, value: Any, known: Iterable[Any]) -> None:
    """One of some values."""
    if value not in [*known]:
        raise ArgumentError(f"{call}{name}={value!r}): {name} is one of {', '.join(map(repr, known))}.")


def check_generator(call: str, generator: Any, what: str) -> None:
    """A generator, from which something is drawn."""
    if not isinstance(generator, torch.Generator):
        given = "missing" if generator is None else f"of type {type(generator).__name__}"
        raise ArgumentTypeError(
            f"{call}generator=...): generator is {given}, but {what} from an explicit torch.Generator: pass "
            "generator=torch.Generator().manual_seed(0)."
        )


class WithValue:
    """A loss function that returns its value as aux, too: `(loss, loss)`, or `(loss, (loss, aux))`."""

    def __init__(self, f: Callable, has_aux: bool) -> None:
        self.__wrapped__, self.__name__, self.has_aux = f, describe(f), has_aux

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__wrapped__(*args, **kwargs)
        return (found[0] if self.has_aux else found), found


def valued(f: Any, value: bool, has_aux: bool) -> tuple[Any, bool]:
    """A loss function, with its value as aux if that is wanted, and whether it has aux."""
    return (WithValue(f, has_aux), True) if value and callable(f) else (f, has_aux)


def plain(path: str) -> str:
    """The name of a parameter from its key path: `"['0.weight']"` is `"0.weight"`, a deeper one has dots."""
    return ".".join(a or b for a, b in _KEYS.findall(path))


_KEYS = re.compile(r"\['([^']*)'\]|\.?\[?([^\[\].']+)\]?")


def by_name(given: dict[str, Any]) -> Callable[[str], Any]:
    """A function of key paths that gives what a dict has at the path or the plain name of a parameter, or None."""
    return lambda path: given.get(path, given.get(plain(path)))


def grouped(name: str, f: Any, groups: Any) -> Any:
    """A function of key paths that gives the names of groups of parameters, from what a caller has given for it."""
    if isinstance(groups, Mapping):
        return by_name(dict(groups))
    if groups == "layer":
        return lambda path: plain(path).rpartition(".")[0]
    if groups is not None and not callable(groups):
        raise ArgumentTypeError(
            f'{name}({describe(f)}, groups=...): groups is {groups!r}, but has to be "layer", a function from the key '
            "path of a parameter to the name of its group or None, or a dict of these by name."
        )
    return groups


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
