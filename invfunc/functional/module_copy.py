"""The attributes that every module has. Used by recomputation alone."""

from __future__ import annotations

from torch import nn

STANDARD = vars(nn.Module()).keys()
"""The attributes that every module has, and which of them hold what is registered."""
REGISTERED = ("_parameters", "_buffers", "_modules")
