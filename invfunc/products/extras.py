"""Packages that belong to an extra, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from invfunc.errors import MissingExtraError


def extra(module: str, name: str) -> Any:
    """A module of the extra of this name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            f"the package {missing.name} is missing: python -m pip install 'invfunc[{name}]'."
        ) from None
