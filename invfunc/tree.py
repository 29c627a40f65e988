"""The one door to torch's pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

Tree = Any

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
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in (tuple, list):  # without torch's detour, which takes ten times as long for arguments of a call
        return [x for branch in tree for x in tensors(branch)]
    if type(tree) is dict:
        return [x for branch in tree.values() for x in tensors(branch)]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def broadcast(prefix: Tree, tree: Tree) -> list[Any] | None:
    """The leaves of a prefix of a tree, one for each leaf of the tree; None if it is no prefix."""
    return pytree._broadcast_to_and_flatten(prefix, pytree.tree_structure(tree))
