"""The one door to torch's pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import islice
from types import EllipsisType
from typing import Any, TypeVar

import torch

from invfunc._torch.doors import door
from invfunc.errors import ArgumentTypeError

pytree = door("torch.utils._pytree")

Tree = Any
Path = tuple[Any, ...]
Class = TypeVar("Class", bound=type)

_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), slice, EllipsisType}
_PLAIN |= {torch.dtype, torch.device, torch.Size, torch.Generator}


NODES: dict[type, tuple[Callable[[Any], tuple[list, tuple]], Callable[[list, tuple], Any]]] = {}
"""Two functions for a kind of nodes: one gives the children and the rest of it, one makes it of them."""
NOTHING = (type(None), None, ())


@dataclass(frozen=True)
class TorchNode:
    """The rest of a node that is registered in torch."""

    spec: Any
    names: tuple[str, ...]

    def rebuilt(self, values: Iterable[Any]) -> Any:
        return pytree.tree_unflatten(values, self.spec)


@dataclass(frozen=True)
class NodeWay:
    """The way a mapping or a dataclass becomes again what it was."""

    kind: type
    keys: tuple
    template: Any = field(compare=False, repr=False)

    @property
    def names(self) -> list[str]:
        return [f"[{key!r}]" if issubclass(self.kind, Mapping) else f".{key}" for key in self.keys]

    def rebuilt(self, values: Iterable[Any]) -> Any:
        if not self.keys and not issubclass(self.kind, MutableMapping):
            return self.template
        given = dict(zip(self.keys, values, strict=True))
        if issubclass(self.kind, Mapping):
            return self._mapping(given)
        found = copy(self.template)
        for name, value in given.items():
            object.__setattr__(found, name, value)
        return found

    def _mapping(self, given: dict) -> Any:
        kind, before = self.kind, dict(self.template)
        found: Any = None
        try:
            found = _shallow(self.template) if issubclass(kind, MutableMapping) else kind(*[given])
            if issubclass(kind, MutableMapping):
                for key in [key for key in found if key not in given]:  # which came into the template since
                    del found[key]
                for key in given:
                    found[key] = given[key]
        except TypeError:
            pass
        if any(self.template[key] is not before[key] for key in before):  # the copy was none
            self.template.update(before)
        elif found is not None and all(found[key] is given[key] for key in given):
            return found
        raise ArgumentTypeError(
            f"a mapping of type {kind.__name__} cannot be copied with other values; pass dict(...) of it."
        )


def _shallow(mapping: Any) -> Any:
    """A copy that has containers of its own, if the mapping keeps its values in some."""
    found = copy(mapping)
    for name, part in list(getattr(found, "__dict__", {}).items()):
        if isinstance(part, (dict, list)):
            vars(found)[name] = copy(part)
    return found


def map_leaves(fn: Callable, tree: Tree, *more: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """A tree of what a function makes of each leaf, with those at its place in more trees."""
    return pytree.tree_map(fn, tree, *more, is_leaf=is_leaf)


def flatten(tree: Tree, none_is_leaf: bool = True, closed: type | tuple = ()) -> tuple[list[Any], Any]:
    """The leaves of a tree and its structure: `(kind, rest, parts)` for a node, and None for a leaf.

    Mappings and dataclasses that hold tensors are nodes here, too; nodes of a `closed` kind are leaves.
    """
    found: list[Any] = []
    return found, _walk(tree, found, none_is_leaf, closed)


def _walk(branch: Any, found: list[Any], none_is_leaf: bool, closed: Any = (), inside: tuple[int, ...] = ()) -> Any:
    """The structure of a branch, whose leaves are added to those found, in a tenth of the time of torch's own walk."""
    kind = type(branch)
    if kind in _PLAIN:
        if branch is None and not none_is_leaf:
            return NOTHING
        found.append(branch)
        return None
    values: Any
    if kind is tuple or kind is list:
        values, keys = branch, None
    elif kind is dict:
        values, keys = branch.values(), tuple(branch)
    elif kind in NODES and not closed:  # without a call of its own
        values, keys = NODES[kind][0](branch)
    else:
        node = None if isinstance(branch, closed) or id(branch) in inside else _node(branch)
        if node is None:
            found.append(branch)
            return None
        (values, keys), inside = node, (*inside, id(branch))
    if _TENSORS.issuperset(map(type, values)):  # without a call for each of them
        found += values
        return kind, keys, (None,) * len(values)
    return kind, keys, tuple([_walk(part, found, none_is_leaf, closed, inside) for part in values])


def _node(branch: Any) -> tuple[Sequence[Any], Any] | None:
    """The children of a node, and the rest of it: of one that is registered here or in torch, of a mapping, or of a
    dataclass that holds tensors; None for a leaf."""
    kind = type(branch)
    if kind in NODES:
        return NODES[kind][0](branch)
    if not pytree.tree_is_leaf(branch):
        own = id(branch)  # which keeps nothing alive in the cycles that torch's walk leaves behind
        children, spec = pytree.tree_flatten_with_path(branch, is_leaf=lambda x: id(x) != own)
        return [x for _, x in children], TorchNode(spec, tuple(pytree.keystr(path) for path, _ in children))
    if isinstance(branch, Mapping):
        parts = {key: branch[key] for key in branch}
    elif is_dataclass(branch) and not isinstance(branch, type):
        parts = {f.name: getattr(branch, f.name) for f in fields(branch) if hasattr(branch, f.name)}
        if not any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(parts)):
            return None
    else:
        return None
    return [*parts.values()], NodeWay(kind, tuple(parts), branch)


def unflatten(leaves: Sequence[Any], structure: Any) -> Tree:
    """The tree of these leaves."""
    return leaves[0] if structure is None else _built(structure, iter(leaves))


def _built(structure: tuple, leaves: Iterator[Any]) -> Any:
    kind, rest, parts = structure
    if any(parts):
        made = [next(leaves) if part is None else _built(part, leaves) for part in parts]
    else:
        made = [*islice(leaves, len(parts))]
    if kind is dict:
        return dict(zip(rest, made, strict=True))
    if kind in NODES:
        return NODES[kind][1](made, rest)
    if isinstance(rest, NodeWay | TorchNode):
        return rest.rebuilt(made)
    return made if kind is list else tuple(made) if kind is tuple else None


def leaves(tree: Tree) -> list[Any]:
    """Without their structure."""
    return flatten(tree)[0]


def named_leaves(tree: Tree, none_is_leaf: bool = True) -> list[tuple[str, Any]]:
    """The leaves with their key paths, as one would write them behind the name of the tree."""
    found, structure = flatten(tree, none_is_leaf)
    return [*zip(_paths(structure), found, strict=True)]


def named_parts(tree: Tree, kind: type) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves with their key paths, and the structure, of a tree in which nodes of one kind are leaves."""
    found, structure = flatten(tree, closed=kind)
    return [*zip(_paths(structure), found, strict=True)], structure


def _paths(structure: Any, path: str = "") -> list[str]:
    """The key paths of the leaves of a structure."""
    if structure is None:
        return [path]
    kind, rest, parts = structure
    if kind is dict:
        names = [f"[{key!r}]" for key in rest]
    elif isinstance(rest, NodeWay | TorchNode):
        names = rest.names
    else:
        names = [f".{key}" for key in rest[0]] if kind in NODES else [f"[{i}]" for i in range(len(parts))]
    found = list[str]()
    for name, part in zip(names, parts, strict=True):
        found += [path + name] if part is None else _paths(part, path + name)
    return found


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """`fn` on every tensor of the tree; anything else stays as it is."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if type(tree) is tuple and _TENSORS.issuperset(map(type, tree)):
        return tuple(map(fn, tree))
    found, structure = flatten(tree)
    return unflatten([fn(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in found], structure)


def tensors(tree: Tree) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    found: list[torch.Tensor] = []
    gather(tree if type(tree) is tuple else (tree,), found)
    return found


def gather(branches: Iterable[Any], found: list[torch.Tensor]) -> bool:
    """Add the tensors in the arguments of a call to those found, in a tenth of the time of torch's own walk.

    Returns True if these are in tuples alone, which nobody changes.
    """
    fixed = True
    if _TENSORS.issuperset(map(type, branches)):
        found += branches
        return fixed
    for branch in branches:
        kind = type(branch)
        if kind in _TENSORS:
            found.append(branch)
        elif kind is tuple:
            fixed &= gather(branch, found) if branch else True  # the compiler knows no `not` of a tuple
        elif kind not in _PLAIN:
            fixed = False
            if kind is list or kind is dict:
                if branch:
                    gather(branch if kind is list else branch.values(), found)
            elif kind in NODES:
                gather(NODES[kind][0](branch)[0], found)
            else:
                found.extend(leaf for leaf in leaves(branch) if isinstance(leaf, torch.Tensor))
    return fixed


def outputs(result: Tree) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """The tensors that a function returned, with their key paths, and the structure of all.

    Whatever else is in it has no leaves, and cannot be used in a tree that is made of other tensors.
    """
    if isinstance(result, torch.Tensor):
        return [("", result)], None
    found, structure = flatten(result)
    named = [*zip(_paths(structure), found, strict=True)]
    structure = _of_tensors(structure, iter(named))
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)], structure


def _of_tensors(part: Any, named: Iterator[tuple[str, Any]]) -> Any:
    """A structure of whose leaves those that are no tensors are nodes without leaves."""
    if part is not None:
        return *part[:2], tuple([_of_tensors(x, named) for x in part[2]])
    path, leaf = next(named)
    if isinstance(leaf, torch.Tensor):
        return None
    return NOTHING if leaf is None else (NoOutput, NodeWay(NoOutput, (), NoOutput(f"the part {path}", leaf)), ())


def broadcast(prefix: Tree, tree: Tree) -> list[Any] | None:
    """The leaves of a prefix of a tree, one for each leaf of the tree; None if it is not a prefix."""
    given, part = flatten(prefix)
    try:
        return _spread(part, flatten(tree)[1], iter(given))
    except ValueError:
        return None


def _spread(part: Any, whole: Any, given: Iterator[Any]) -> list[Any]:
    """The leaves of a structure, one for each leaf of another of which it is a prefix."""
    if part is None:
        return [next(given)] * len(_paths(whole))
    if whole is None or part[0] is not whole[0] or len(part[2]) != len(whole[2]):
        raise ValueError
    if part[0] is dict and {*part[1]} == {*whole[1]}:  # in any order
        own = dict(zip(*whole[1:], strict=True))
        found = {key: _spread(x, own[key], given) for key, x in zip(*part[1:], strict=True)}
        return [leaf for key in own for leaf in found[key]]
    if part[1] != whole[1]:
        raise ValueError
    return [leaf for a, b in zip(part[2], whole[2], strict=True) for leaf in _spread(a, b, given)]


def register(*names: str) -> Callable[[Class], Class]:
    """Makes a frozen dataclass a node: the fields of these names are its children, the others belong to its structure.

    None is not a child, as it would be a leaf. Leaves are put in unchecked: torch.func has its own things travel there.
    """

    def registered(kind: Class) -> Class:
        children = [f.name for f in fields(kind) if f.name in names]
        others = [f.name for f in fields(kind) if f.name not in names]

        def flatten(node: Any) -> tuple[list, tuple]:
            own, values, present = vars(node), [], []
            for name in children:
                if own[name] is not None:
                    values.append(own[name])
                    present.append(name)
            return values, (tuple(present), tuple(map(own.get, others)))

        def flatten_with_keys(node: Any) -> tuple[list, tuple]:
            values, structure = flatten(node)
            return [*zip(map(pytree.GetAttrKey, structure[0]), values, strict=True)], structure

        def unflatten(values: Iterable[Any], structure: tuple) -> Any:
            node = object.__new__(kind)
            vars(node).update(dict.fromkeys(children))
            vars(node).update(zip((*structure[0], *others), (*values, *structure[1]), strict=True))
            return node

        pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
        NODES[kind] = flatten, unflatten
        return kind

    return registered


@dataclass(frozen=True)
class Form:
    """A tree without its tensors: its structure, and its other leaves in their places."""

    structure: Any
    others: tuple
    places: tuple[int, ...]
    """Places of the tensors among the leaves."""

    def join(self, values: Iterable[Any]) -> Tree:
        """The tree again, with other tensors."""
        if self is _ONE:
            [value] = values
            return value
        if self is _several(len(self.places)):
            return tuple(values)
        found = list(self.others)
        for place, value in zip(self.places, values, strict=True):
            found[place] = value
        return unflatten(found, self.structure)

    def leaves(self, tree: Tree) -> list[Any] | None:
        """The leaves of another tree, if it has the same structure."""
        found, structure = flatten(tree)
        return found if structure == self.structure else None


_ONE = Form(None, (None,), (0,))
"""Form of a tensor."""
_TENSORS = {torch.Tensor, torch.nn.Parameter}


@cache
def _several(number: int) -> Form:
    """The structure of a tuple of so many tensors."""
    return Form((tuple, None, (None,) * number), (None,) * number, tuple(range(number)))


def separate(tree: Tree) -> tuple[list[torch.Tensor], Form]:
    """The tensors of a tree, and the rest of it."""
    if type(tree) in _TENSORS:
        return [tree], _ONE
    if type(tree) is tuple and tree and _TENSORS.issuperset(map(type, tree)):
        return [*tree], _several(len(tree))
    found, structure = flatten(tree)
    places = tuple(i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor))
    tensors = [found[i] for i in places]
    for i in places:
        found[i] = None
    return tensors, Form(structure, tuple(found), places)


def templates(structure: Any) -> bool:
    """Tells whether a structure has nodes that torch does not know, which keep what they were made of."""
    return structure is not None and (isinstance(structure[1], NodeWay) or any(map(templates, structure[2])))


class NoOutput:
    """Stands in the place of what a function returned beside its outputs, and refuses to be used."""

    def __init__(self, path: str, value: Any) -> None:
        self.__dict__["said"] = f"{path} of type {type(value).__name__}"

    def __repr__(self) -> str:
        return f"<no output: {self.__dict__['said']}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        """The error for any use of it."""
        raise ArgumentTypeError(
            f"{self.__dict__['said']}, which f returned, is used; but outputs are floating-point tensors. Let f return "
            "what the loss needs as tensors."
        )

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _first((args, kwargs)).refuse()

    __getitem__ = __iter__ = __len__ = __bool__ = __call__ = __eq__ = __lt__ = __gt__ = __le__ = __ge__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = refuse
    __neg__ = __float__ = __int__ = __index__ = refuse
    __hash__ = object.__hash__


def _first(branch: Any) -> Any:
    """The first of them in the arguments of a call."""
    if isinstance(branch, NoOutput):
        return branch
    parts = branch.values() if isinstance(branch, Mapping) else branch if isinstance(branch, list | tuple) else ()
    return next((found for found in map(_first, parts) if found is not None), None)
