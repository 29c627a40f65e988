"""The one door to torch's pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import EllipsisType
from typing import Any, TypeVar

import torch

from invfunc._nodes import NODES, NOTHING, NodeWay, NoOutput, built
from invfunc._torch.doors import door

pytree = door("torch.utils._pytree")

Tree = Any
Path = tuple[Any, ...]
Class = TypeVar("Class", bound=type)

_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), slice, EllipsisType}
_PLAIN |= {torch.dtype, torch.device, torch.Size, torch.Generator}


def map_leaves(fn: Callable, tree: Tree, *more: Tree, is_leaf: Callable[[Any], bool] | None = None) -> Tree:
    """A tree of what a function makes of each leaf, with those at its place in more trees."""
    return pytree.tree_map(fn, tree, *more, is_leaf=is_leaf)


def flatten(tree: Tree, none_is_leaf: bool = True) -> tuple[list[Any], Any]:
    """The leaves of a tree and its structure. Mappings and dataclasses that hold tensors are nodes here, too."""
    found: list[Any] = []
    try:
        return found, _walk(tree, found, none_is_leaf)
    except _Other:
        return pytree.tree_flatten(_opened(tree, none_is_leaf))


def named_parts(tree: Tree, kind: type) -> tuple[list[tuple[str, Any]], Any]:
    """The leaves with their key paths, and the structure, of a tree in which nodes of one kind are leaves."""
    found, structure = pytree.tree_flatten_with_path(_opened(tree, kind=kind), lambda x: isinstance(x, kind))
    return [(pytree.keystr(path), leaf) for path, leaf in found], structure


def unflatten(leaves: Sequence[Any], structure: Any) -> Tree:
    """The tree of these leaves."""
    if structure is None:
        return leaves[0]
    return built(structure, iter(leaves)) if type(structure) is tuple else pytree.tree_unflatten(leaves, structure)


def leaves(tree: Tree) -> list[Any]:
    """Without their structure."""
    return flatten(tree)[0]


def named_leaves(tree: Tree, none_is_leaf: bool = True) -> list[tuple[str, Any]]:
    """The leaves with their key paths, as one would write them behind the name of the tree."""
    found: list[Any] = []
    try:
        return [*zip(_paths(_walk(tree, found, none_is_leaf)), found, strict=True)]
    except _Other:
        pass
    if any(_opens(leaf, none_is_leaf) for leaf in pytree.tree_leaves(tree)):
        tree = _opened(tree, none_is_leaf)
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def _paths(structure: Any, path: str = "") -> list[str]:
    """The key paths of the leaves of a structure of plain containers and of registered nodes."""
    if structure is None:
        return [path]
    kind, keys, parts = structure
    if kind is dict:
        names = [f"[{key!r}]" for key in keys]
    else:
        names = [f".{key}" for key in keys[0]] if kind in NODES else [f"[{i}]" for i in range(len(parts))]
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
            fixed &= not branch or gather(branch, found)
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


# Nodes that torch does not know. Opened, they are nodes of ours, which become again what they were


def _opens(leaf: Any, none_is_leaf: bool = True) -> bool:
    """Tells whether a leaf of torch's is none here."""
    if leaf is None:
        return not none_is_leaf
    return type(leaf) not in _PLAIN and _parts(leaf) is not None


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """The contents of a leaf of torch's, by key or by name: in a mapping, and in a dataclass that holds tensors."""
    if isinstance(leaf, Mapping):
        return {key: leaf[key] for key in leaf}
    if is_dataclass(leaf) and not isinstance(leaf, type):
        parts = {f.name: getattr(leaf, f.name) for f in fields(leaf) if hasattr(leaf, f.name)}
        return parts if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(parts)) else None
    return None


class _OpenedNode:
    """One opened."""

    def __init__(self, kept: NodeWay, values: Sequence[Any]) -> None:
        self.kept, self.values = kept, list(values)

    def with_keys(self) -> tuple[list, NodeWay]:
        key = pytree.MappingKey if issubclass(self.kept.kind, Mapping) else pytree.GetAttrKey
        return [(key(k), value) for k, value in zip(self.kept.keys, self.values, strict=True)], self.kept


pytree.register_pytree_node(
    _OpenedNode,
    lambda node: (node.values, node.kept),
    lambda values, kept: kept.rebuilt(values),
    flatten_with_keys_fn=_OpenedNode.with_keys,
)


def _constant(value: Any) -> _OpenedNode:
    """A node without leaves."""
    return _OpenedNode(NodeWay(type(value), (), value), ())


def _opened(
    tree: Tree,
    none_is_leaf: bool = True,
    put: Callable[[Path, Any], Any] = lambda path, leaf: leaf,
    path: Path = (),
    inside: tuple[int, ...] = (),
    kind: type | tuple = (),
) -> Tree:
    """The tree with nodes of ours, except for those of a kind, and with what `put` makes of its leaves."""

    def one(at: Path, leaf: Any) -> Any:
        at = (*path, *at)
        if leaf is None and not none_is_leaf:
            return _constant(None)
        closed = type(leaf) in _PLAIN or id(leaf) in inside or isinstance(leaf, kind)
        parts = None if closed else _parts(leaf)
        if parts is None:
            return put(at, leaf)
        node = _OpenedNode(NodeWay(type(leaf), tuple(parts), leaf), list(parts.values()))
        keys = [key for key, _ in node.with_keys()[0]]
        within = (*inside, id(leaf))
        node.values = [
            _opened(x, none_is_leaf, put, (*at, key), within, kind) for key, x in zip(keys, node.values, strict=True)
        ]
        return node

    return pytree.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, kind))


def outputs(result: Tree) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """The tensors that a function returned, with their key paths, and the structure of all.

    Whatever else is in it has no leaves, and cannot be used in a tree that is made of other tensors.
    """

    def put(path: Path, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf
        return _constant(None if leaf is None else NoOutput(f"the part {pytree.keystr(path)}", leaf))

    if isinstance(result, torch.Tensor):
        return [("", result)], None
    found, structure = pytree.tree_flatten_with_path(_opened(result, put=put))
    return [(pytree.keystr(path), leaf) for path, leaf in found], structure


def broadcast(prefix: Tree, tree: Tree) -> list[Any] | None:
    """The leaves of a prefix of a tree, one for each leaf of the tree; None if it is not a prefix."""
    found: list[Any] = []

    def add(leaf: Any, part: Tree) -> None:
        found.extend([leaf] * pytree.tree_structure(part).num_leaves)

    try:
        pytree.tree_map_(add, _opened(prefix), _opened(tree))
    except ValueError:
        return None
    return found


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
            keys = [pytree.GetAttrKey(name) for name in structure[0]]
            return list(zip(keys, values, strict=True)), structure

        def unflatten(values: Iterable[Any], structure: tuple) -> Any:
            node = object.__new__(kind)
            vars(node).update(dict.fromkeys(children))
            vars(node).update(zip((*structure[0], *others), (*values, *structure[1]), strict=True))
            return node

        pytree.register_pytree_node(
            kind,
            flatten,
            unflatten,
            flatten_with_keys_fn=flatten_with_keys,
        )
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
    if type(structure) is tuple or structure is None:
        return False
    return structure.type is _OpenedNode or any(map(templates, structure.children()))


# Trees of plain containers and of nodes that are registered here need not go through torch's walk, which takes ten
# times as long: their structure is a tuple `(kind, keys, parts)` for a node, and None for a leaf


class _Other(Exception):
    """The tree has a node of another kind."""


def _walk(branch: Any, found: list[Any], none_is_leaf: bool) -> tuple | None:
    kind = type(branch)
    if kind in _PLAIN:
        if branch is None and not none_is_leaf:
            return NOTHING
        found.append(branch)
        return None
    if kind is tuple or kind is list:
        values, keys = branch, None
    elif kind is dict:
        values, keys = branch.values(), tuple(branch)
    elif kind in NODES:
        values, keys = NODES[kind][0](branch)
    else:
        if not pytree.tree_is_leaf(branch) or _opens(branch):
            raise _Other
        found.append(branch)
        return None
    if _TENSORS.issuperset(map(type, values)):  # without a call for each of them
        found += values
        return kind, keys, (None,) * len(values)
    return kind, keys, tuple([_walk(part, found, none_is_leaf) for part in values])
