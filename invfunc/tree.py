"""The one door to torch's pytrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

Tree = Any
Class = TypeVar("Class", bound=type)

flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten
leaves = pytree.tree_leaves
map_leaves = pytree.tree_map


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """The leaves with their key paths, as one would write them behind the name of the tree."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """`fn` on every tensor of the tree; anything else stays as it is."""
    return pytree.tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors(tree: Tree) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    found: list[torch.Tensor] = []
    _gather((tree,), found)
    return found


_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, slice}


def _gather(branches: Iterable[Any], found: list[torch.Tensor]) -> None:
    """For the arguments of a call, a tenth of the time of torch's own walk."""
    for branch in branches:
        kind = type(branch)
        if kind is torch.Tensor:
            found.append(branch)
        elif kind is tuple or kind is list:
            _gather(branch, found)
        elif kind is dict:
            _gather(branch.values(), found)
        elif kind not in _PLAIN:
            found.extend(leaf for leaf in pytree.tree_leaves(branch) if isinstance(leaf, torch.Tensor))


def broadcast(prefix: Tree, tree: Tree) -> list[Any] | None:
    """The leaves of a prefix of a tree, one for each leaf of the tree; None if it is no prefix."""
    return pytree._broadcast_to_and_flatten(prefix, pytree.tree_structure(tree))


def register(*names: str) -> Callable[[Class], Class]:
    """Makes a frozen dataclass a node: the fields of these names are its children, the others belong to its structure.

    None is no child, as it would be a leaf. Leaves are put in unchecked: torch.func has its own things travel there.
    """

    def registered(kind: Class) -> Class:
        def flatten_with_keys(node: Any) -> tuple[list, tuple]:
            given = {f.name: getattr(node, f.name) for f in fields(kind)}
            children = {name: value for name, value in given.items() if name in names and value is not None}
            rest = tuple((name, value) for name, value in given.items() if name not in children)
            return [(pytree.GetAttrKey(name), value) for name, value in children.items()], (tuple(children), rest)

        def flatten(node: Any) -> tuple[list, tuple]:
            children, structure = flatten_with_keys(node)
            return [value for _, value in children], structure

        def unflatten(children: Iterable[Any], structure: tuple) -> Any:
            node = object.__new__(kind)
            for name, value in (*zip(structure[0], children, strict=True), *structure[1]):
                object.__setattr__(node, name, value)
            return node

        pytree.register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
        return kind

    return registered


@dataclass(frozen=True)
class Form:
    """A tree without its tensors: its structure, and its other leaves in their places."""

    structure: Any
    others: tuple
    places: tuple[int, ...]
    """Where the tensors are among the leaves."""

    def join(self, values: Iterable[Any]) -> Tree:
        """The tree again, with other tensors."""
        found = list(self.others)
        for place, value in zip(self.places, values, strict=True):
            found[place] = value
        return unflatten(found, self.structure)


def separate(tree: Tree) -> tuple[list[torch.Tensor], Form]:
    """The tensors of a tree, and the rest of it."""
    found, structure = flatten(tree)
    places = tuple(i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor))
    tensors = [found[i] for i in places]
    for i in places:
        found[i] = None
    return tensors, Form(structure, tuple(found), places)
