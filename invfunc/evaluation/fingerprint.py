"""What tells values from others, also in another process."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.reductions import Reduction


def fingerprint(x: Any) -> int:
    """A number of 63 bits that depends on all numbers, names and shapes in a tree."""
    found = blake2b(digest_size=8)
    for path, leaf in tree.named_leaves(x):
        found.update(f"{path} {_shown(leaf)} ".encode())
        if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_meta:
            leaf = leaf.to_local() if sharded(leaf) else leaf  # pyright: ignore[reportAttributeAccessIssue]
            dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
            y = dense.resolve_conj().resolve_neg().cpu().contiguous()
            found.update((ctypes.c_char * y.nbytes).from_address(y.data_ptr()))
    return int.from_bytes(found.digest(), "big") >> 1


def described(x: Any) -> str:
    """An option as a text that is the same in every process."""
    if isinstance(x, Reduction):
        return f"{type(x).__name__}({_named(vars(x))})"
    if isinstance(x, torch.Tensor):
        return f"{_shown(x)} {fingerprint(x):x}"
    if isinstance(x, Mapping):
        return f"{{{_named(x)}}}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(described, x))})"
    return re.sub(" at 0x[0-9a-f]+", "", getattr(x, "__name__", repr(x))) if callable(x) else _shown(x)


def named(name: str, x: Any) -> dict[str, str]:
    """The leaves of a tree by name, as such texts."""
    return {name + path: described(leaf) for path, leaf in tree.named_leaves(x)}


def _named(options: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={described(x)}" for name, x in options.items())


def _shown(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    plain = x is None or isinstance(x, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))
    return repr(x) if plain else type(x).__name__
