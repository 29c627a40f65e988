"""Calls within `torch.compile`, as one operation of its graph, which makes the call when that runs."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc._torch.eager import as_called, constant, nonstrict, not_compiling
from invfunc._torch.functorch import fake_tensors, undispatched
from invfunc.errors import ReplayError
from invfunc.kronecker.matrix import Origin
from invfunc.plans.calls import CALLS, Calls, call_of
from invfunc.reductions.estimates import NoiseScale

_ATEN = torch.ops.aten
_FORMS: list[tree.Form] = []
"""Forms of the arguments, in each place where a graph has the operation."""
_RESULTS: dict[int, tuple[tree.Form, list[tuple]]] = {}
"""The forms of the results there, with the sizes and types of their tensors."""


def _sizes(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(x.shape, x.dtype, x.device) for x in tensors]


constant(Origin, typ="value")  # of Kronecker factors, which the compiler puts together

_NAME = "invfunc::planned"
torch.library.define(
    _NAME, "(int number, int place, Tensor[] tensors) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _planned(number: int, place: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The call of those of a number, in a place."""
    args, kwargs = _FORMS[place].join([x.detach() for x in tensors])
    with as_called(), torch.inference_mode(False), torch.no_grad():
        found = tree.tensors((CALLS[number](args, kwargs),))
    if _sizes(found) != _RESULTS[place][1]:
        raise ReplayError(
            f"{CALLS[number].called} within torch.compile: the result has other shapes or dtypes than in the compiled "
            "graph, as something that f reads has changed. Call `torch._dynamo.reset()`, or call it outside."
        )
    return found


@torch.library.register_fake(_NAME)
def _(number: int, place: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with not_compiling(), undispatched(), as_called():
        result = _made_up(CALLS[number], _FORMS[place], tensors)
    found, form = tree.separate(result)
    _RESULTS[place] = form, _sizes(found)
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in found]


def _made_up(calls: Calls, form: tree.Form, tensors: list[torch.Tensor]) -> Any:
    """The result of a call for tensors of such sizes: without numbers, or where numbers decide, for ones and zeros."""

    def like(x: torch.Tensor) -> torch.Tensor:
        size, stride = tuple(map(int, x.shape)), tuple(map(int, x.stride()))  # of one graph for each size
        return torch.empty_strided(size, stride, dtype=x.dtype, device=x.device).fill_(x.is_floating_point())

    with torch.no_grad(), calls.rewound(call_of(*form.join([*map(like, tensors)]))):
        try:
            with fake_tensors.FakeTensorMode(allow_non_fake_inputs=True):
                args, kwargs = form.join([*map(like, tensors)])
                return calls.t(*args, **kwargs)
        except Exception:
            args, kwargs = form.join([*map(like, tensors)])
            return calls.t(*args, **kwargs)


def within(number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of the calls of a number, as one operation, unless the graph is run as it is."""
    return _named(_within(number, args, kwargs))


_NAMED = "NoiseScale"


def _plain(result: Any) -> Any:
    """A result with dicts in place of tuples that have a name, of which torch.compile makes none."""
    found, structure = tree.named_parts(result, NoiseScale)
    return tree.unflatten([{_NAMED: tuple(x)} if isinstance(x, NoiseScale) else x for _, x in found], structure)


def _named(found: Any) -> Any:
    """The result again; looked into by the compiler."""
    if type(found) is tuple:
        return tuple([_named(x) for x in found])
    if type(found) is dict and _NAMED in found:
        return NoiseScale(*found[_NAMED])
    if type(found) is dict and all(type(x) is dict and _NAMED in x for x in found.values()):
        return {name: _named(x) for name, x in found.items()}
    return found


@nonstrict
def _within(number: int, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not torch.compiler.is_compiling():
        return _plain(CALLS[number](args, kwargs))
    tensors, form = tree.separate((args, kwargs))
    _FORMS.append(form)
    place = len(_FORMS) - 1
    found = torch.ops.invfunc.planned(number, place, tensors)
    return _plain(_RESULTS[place][0].join(found))
