"""Calls that need not be watched: of functions that compute and do nothing else, at arguments of a known form.

A function that is shown to (`purity`), and that was seen to in watched calls, forwards and backwards, does the very
same operations at further arguments of the same form: it has no other branch to take, nothing to read that may have
changed, nothing to write or to draw. What it closes over is compared in each call, and in each backward pass; so are
the forms of all tensors, and those of what autograd saves. Whatever else is different takes the watched way again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc._torch.levels import only_level, undisturbed
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import Unwritten
from invfunc.recomputation.like import Like
from invfunc.recomputation.look import Look
from invfunc.recomputation.origins import OUTSIDE, Key
from invfunc.recomputation.purity import PLAIN, NotShown, Purity
from invfunc.recomputation.readings import TENSORS

Form = tuple[torch.Size, torch.dtype, tuple[int, ...], bool, torch.device]
"""Shape, dtype, strides, whether a gradient is needed, and the device."""
_DEVICES = ("cpu", "cuda")
_MOST = 8
"""How many forms of arguments are known, and how often what a function closes over may change."""


@dataclass
class Template:
    """A watched call, as a form of all that are the same."""

    options: tuple
    structure: Any
    others: list[tuple[int, Any]]
    """The other leaves, with their places."""
    number: int
    """How many leaves x and the further arguments have."""
    places: list[int]
    """Where the tensors are among them."""
    forms: list[Form]
    """Of the tensors."""
    count: int
    """How many of them are x."""
    x: tree.Form
    rest: tree.Form
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
    closed: list[Form]
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

    @cached_property
    def needs(self) -> list[bool]:
        """Which of the further arguments need a gradient."""
        return [form[3] for form in self.forms[self.count :]]

    @property
    def known(self) -> bool:
        """Whether both directions were seen to compute, and to do nothing else."""
        return self.look.seen and self.look.harmless

    def fits(
        self, options: tuple, leaves: list[Any], structure: Any, closed: list[torch.Tensor], names: set[str]
    ) -> bool:
        """Whether a call has this form, whose functions close over these tensors and read these attributes."""
        if len(leaves) != self.number or options != self.options or structure != self.structure:
            return False
        tensors = [leaves[place] for place in self.places]
        if not _look_like(tensors, self.forms, names) or not _look_like(closed, self.closed, names):
            return False
        same = all(leaves[i] is other or _equal(leaves[i], other) for i, other in self.others)
        return same and self.default is torch.get_default_dtype()


def _look_like(tensors: Sequence[torch.Tensor], forms: list[Form], names: set[str]) -> bool:
    """Whether tensors are plain, of these forms, and have none of some attributes of their own."""
    if len(tensors) != len(forms):
        return False
    for t, (shape, dtype, stride, needs, device) in zip(tensors, forms, strict=True):
        if type(t) not in TENSORS or t.requires_grad is not needs or t.shape != shape or t.dtype is not dtype:
            return False
        if t.layout is not torch.strided or t.device != device or t.is_inference() or t.stride() != stride:
            return False
        if t.__dict__ and not names.isdisjoint(t.__dict__):
            return False
    return True


def looks_of(tensors: Iterable[torch.Tensor]) -> list[Form]:
    """The forms of plain tensors."""
    return [_form_of(t) for t in tensors]


def _form_of(t: torch.Tensor) -> Form:
    return t.shape, t.dtype, t.stride(), t.requires_grad, t.device


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants cannot be told apart."""
    return type(a) is type(b) and type(a) in PLAIN and a == b and repr(a) == repr(b)


def form_of(t: torch.Tensor) -> Form | None:
    """The form of a plain tensor; None of any other."""
    plain = type(t) in TENSORS and t.layout is torch.strided and t.device.type in _DEVICES and not t.is_quantized
    if not plain or t.is_inference() or t.is_conj() or t.is_neg():
        return None
    return _kept(_form_of(t))


@lru_cache(maxsize=256)
def _kept(form: Form) -> Form:
    """A form that is kept. Blocks that have the same keep one together."""
    return form


def is_simple(structure: Any) -> bool:
    """Whether a tree consists of tuples, lists and dicts."""
    if structure is None:
        return True
    return type(structure) is tuple and structure[0] in (tuple, list, dict) and all(map(is_simple, structure[2]))


def _has_dict(structures: Sequence[Any]) -> bool:
    """Whether a dict with anything in it is among the arguments, or the last of them, which are those by name."""
    *_, (_, _, by_name) = structures
    waiting = [*structures[:-1], *by_name]
    while waiting:
        structure = waiting.pop()
        if structure is not None:
            if structure[0] is dict:
                return True
            waiting += structure[2]
    return False


def _fits_around(node: bool) -> bool:
    """Whether hooks, or a node, are all that a call takes."""
    level = only_level()
    return level is not None and (level > 0) is node and undisturbed()


class Straightness(NamedTuple):
    """How a call is known that need not be watched."""

    template: Template
    purity: Purity
    """What the functions are, which is compared with what they are in the backward pass."""
    tensors: list[torch.Tensor]
    """Those that they close over."""


class Straight:
    """What is known of the calls of a block."""

    def __init__(self) -> None:
        self._pair: Invertible | None = None
        self._purity: Purity | None = None
        self._templates: list[Template] = []
        self._looks = 0

    def __reduce__(self) -> tuple:  # a copy is of the functions that the copied block has
        return Straight, ()

    def find(self, pair: Invertible, options: tuple, leaves: list[Any], structure: Any) -> Straightness | None:
        """What is known of a call, if it need not be watched."""
        purity = self._purity
        if not self._templates or purity is None or self._pair is not pair or not _fits_around(options[-1]):
            return None
        if not purity.unchanged():
            self._purity, self._templates = None, []
            return None
        if (tensors := purity.tensors()) is None:
            return None
        templates = self._templates
        for template in templates:
            if template.known and template.fits(options, leaves, structure, tensors, purity.names):
                if template is not templates[0]:  # the next call is likely to be of the same form
                    self._templates = [template, *(other for other in templates if other is not template)]
                return Straightness(template, purity, tensors)
        return None

    def begins(self, pair: Invertible, node: bool) -> Look | None:
        """A look at a call that is watched, where more is to be found out of it."""
        if pair.hidden or (self._pair is not None and self._pair is not pair) or not _fits_around(node):
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
        """Whether arguments of a structure cannot be parameters that take the place of a module's own."""
        return self._purity is not None and not (self._purity.takes_no_dicts and _has_dict(structure[2][1:]))

    def add(self, template: Template) -> None:
        """Note a call that was seen to compute and to do nothing else."""
        self._templates.append(template)

    def has(self, options: tuple, leaves: list[Any], structure: Any, closed: list[torch.Tensor]) -> bool:
        """Whether a call has a template, known or not yet."""
        return any(t.fits(options, leaves, structure, closed, set()) for t in self._templates)
