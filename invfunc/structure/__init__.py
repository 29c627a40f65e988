"""Shortcuts to exact columns of a GGN, by what entries of a function's outputs depend on."""
