"""Inverses that are found by looking at what a function does with its input."""
