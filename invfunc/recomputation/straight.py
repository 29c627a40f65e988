"""Calls that need not be watched: of functions that compute and do nothing else, at arguments of a known form.

A function that is shown to (`purity`), and that was seen to in watched calls, forwards and backwards, does the very
same operations at further arguments of the same form: it has no other branch to take, nothing to read that may have
changed, nothing to write or to draw. What it closes over is compared in each call, and in each backward pass; so are
the forms of all tensors, and those of what autograd saves. Whatever else is different takes the watched way again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc._torch.levels import Forms, only_level, undisturbed
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import Unwritten
from invfunc.recomputation.like import Like
from invfunc.recomputation.look import Look
from invfunc.recomputation.origins import OUTSIDE, Key
from invfunc.recomputation.purity import PLAIN, NotShown, Purity
from invfunc.recomputation.readings import TENSORS

_DEVICES = ("cpu", "cuda")
_MOST = 8
"""How many forms of arguments are known, and how often what a function closes over may change."""

Flat = tuple[list[Any], Any]
"""The leaves of a tree, and its structure."""


class Unlike(Exception):
    """There is something else than plain tensors and constants, in tuples, lists and dicts."""


class Arguments:
    """What is known of x, or of the further arguments.

    Args:
        form: theirs.
        tensors: those of a call, which are not kept.

    Raises:
        Unlike: there is something else among them.
    """

    def __init__(self, form: tree.Form, tensors: Sequence[torch.Tensor]) -> None:
        among = {*form.places}
        self._others = [(i, other) for i, other in enumerate(form.others) if i not in among]
        if not _is_simple(form.structure) or any(type(other) not in PLAIN for _, other in self._others):
            raise Unlike
        self.form, self.forms = form, forms_of(tensors)

    def fit(self, given: Flat, names: set[str]) -> list[torch.Tensor] | None:
        """The tensors of some arguments, if these are of this form and none has one of some attributes of its own."""
        leaves, structure = given
        if structure != self.form.structure:
            return None
        if self._others:
            if not all(leaves[i] is other or _equal(leaves[i], other) for i, other in self._others):
                return None
            leaves = [leaves[i] for i in self.form.places]
        return leaves if look_like(leaves, self.forms, names) else None


@dataclass
class Template:
    """A watched call, as a form of all that are the same."""

    options: tuple
    x: Arguments
    rest: Arguments
    like: list[Like]
    y: tree.Form
    saved: list[tuple[torch.Size, torch.dtype]]
    """What autograd saves, in order."""
    keys: list[Key]
    """Which part saves it."""
    evaluations: list[tuple[Like, bool]]
    """What the shared functions get of the state, in order, and whether a gradient of it is needed."""
    dtypes: list[torch.dtype]
    """Those that it computes in."""
    default: torch.dtype
    closed: Forms
    """Of the tensors that the functions close over."""
    look: Look
    """At the inverse."""
    forward: Callable
    inverse: Callable
    shared: tuple[Callable, ...]

    @cached_property
    def saves_outside(self) -> bool:
        """Whether anything is saved beside the shared functions."""
        return any(part == OUTSIDE for part, _ in self.keys)

    @property
    def known(self) -> bool:
        """Whether both directions were seen to compute, and to do nothing else."""
        return self.look.seen and self.look.harmless

    def is_of(self, options: tuple, closed: list[torch.Tensor], names: set[str]) -> bool:
        """Whether it is one of calls with these options, whose functions close over these tensors and read these
        attributes."""
        same = options == self.options and self.default is torch.get_default_dtype()
        return same and look_like(closed, self.closed, names)

    def fits(self, x: Flat, rest: Flat, names: set[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The tensors of such a call, if it has this form."""
        xs, tensors = self.x.fit(x, names), self.rest.fit(rest, names)
        return None if xs is None or tensors is None else (xs, tensors)


def look_like(tensors: Sequence[torch.Tensor], forms: Forms, names: set[str]) -> bool:
    """Whether tensors are of some forms, and have none of some attributes of their own."""
    own = [t.__dict__ for t in tensors if t.__dict__] if forms.fit(tensors) else None
    return own is not None and all(map(names.isdisjoint, own))


def forms_of(tensors: Sequence[torch.Tensor]) -> Forms:
    """The forms of plain tensors.

    Raises:
        Unlike: there are others.
    """
    if not all(map(_is_plain, tensors)):
        raise Unlike
    return Forms.of(tensors)


def _is_plain(t: torch.Tensor) -> bool:
    strided = type(t) in TENSORS and t.layout is torch.strided and t.device.type in _DEVICES and not t.is_quantized
    return strided and not (t.is_inference() or t.is_conj() or t.is_neg())


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants cannot be told apart."""
    return type(a) is type(b) and type(a) in PLAIN and a == b and repr(a) == repr(b)


def _is_simple(structure: Any) -> bool:
    """Whether a tree consists of tuples, lists and dicts."""
    if structure is None:
        return True
    return type(structure) is tuple and structure[0] in (tuple, list, dict) and all(map(_is_simple, structure[2]))


def _has_dict(structure: Any) -> bool:
    """Whether a dict with anything in it is among `(args, kwargs)`, beside the one of those by name."""
    positional, (_, _, by_name) = structure[2]
    waiting = [positional, *by_name]
    while waiting:
        structure = waiting.pop()
        if structure is not None:
            if structure[0] is dict:
                return True
            waiting += structure[2]
    return False


def fits_around(node: bool) -> bool:
    """Whether hooks, or a node, are all that a call takes."""
    level = only_level()
    return level is not None and (level > 0) is node and undisturbed()


class Read(NamedTuple):
    """What the functions of a block are and read, and the calls that are known of them."""

    purity: Purity
    """What they are, which is compared with what they are in the backward pass."""
    tensors: list[torch.Tensor]
    """Those that they close over."""
    templates: list[Template]


class Straight:
    """What is known of the calls of a block."""

    def __init__(self) -> None:
        self._pair: Invertible | None = None
        self._purity: Purity | None = None
        self._templates: list[Template] = []
        self._looks = 0

    def __reduce__(self) -> tuple:  # a copy is of the functions that the copied block has
        return Straight, ()

    def read(self, pair: Invertible, options: tuple) -> Read | None:
        """What the functions read, if there are calls that need not be watched, and they are what they were."""
        purity = self._purity
        if not self._templates or purity is None or self._pair is not pair:
            return None
        if not purity.unchanged():
            self._purity, self._templates = None, []
            return None
        tensors, names = purity.tensors(), purity.names
        if tensors is None:
            return None
        return Read(purity, tensors, [t for t in self._templates if t.known and t.is_of(options, tensors, names)])

    def find(self, read: Read, x: Flat, rest: Flat) -> tuple[Template, list[torch.Tensor], list[torch.Tensor]] | None:
        """What is known of a call, with the tensors that it is given, if it need not be watched."""
        for template in read.templates:
            given = template.fits(x, rest, read.purity.names)
            if given is not None:
                if template is not self._templates[0]:  # the next call is likely to be of the same form
                    self._templates = [template, *(other for other in self._templates if other is not template)]
                return template, *given
        return None

    def begins(self, pair: Invertible, node: bool) -> Look | None:
        """A look at a call that is watched, where more is to be found out of it."""
        if pair.hidden or (self._pair is not None and self._pair is not pair) or not fits_around(node):
            return None
        if self._purity is not None and not self._purity.unchanged():
            self._purity, self._templates = None, []
        if self._purity is None:
            if self._looks > _MOST:
                return None
            self._pair, self._looks = pair, self._looks + 1
            try:
                self._purity = Purity(pair.made_of)
            except NotShown:
                self._looks = _MOST + 1
                return None
        if pair.shared and not getattr(getattr(pair.forward, "__self__", None), "computes", False):
            return None
        if node and self._purity.has_tensors:  # which a node is given as arguments
            return None
        return Look() if len(self._templates) < _MOST else None

    def functions(self, x: tree.Form, like: list[Like]) -> tuple[Callable, Callable, tuple[Callable, ...]]:
        """Forward, the inverse and what they share, which is known not to write, for calls that need not be watched."""
        assert self._pair is not None and self._purity is not None
        shared = [part.fn if isinstance(part, Unwritten) else part for part in self._pair.shared]
        return *self._pair.directions(x, like, self._purity.tensors), tuple(shared)

    def closed(self, read: Iterable[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """The tensors that the functions close over, if a call has read no others from outside."""
        tensors = self._purity.tensors() if self._purity is not None else None
        if tensors is None:
            return None
        return tensors if {*map(id, read)} <= {*map(id, tensors)} else None

    def takes(self, structure: Any) -> bool:
        """Whether further arguments of a structure cannot be parameters that take the place of a module's own."""
        return self._purity is not None and not (self._purity.takes_no_dicts and _has_dict(structure))

    def add(self, template: Template) -> None:
        """Note a call that was seen to compute and to do nothing else."""
        self._templates.append(template)

    def alike(self, options: tuple, x: Flat, rest: Flat, closed: list[torch.Tensor]) -> Template | None:
        """The template of a call, if it has one, known or not yet."""
        own = (t for t in self._templates if t.is_of(options, closed, set()))
        return next((t for t in own if t.fits(x, rest, set()) is not None), None)
