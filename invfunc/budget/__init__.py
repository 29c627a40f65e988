"""Sizes of memory, and the most that a call takes of it."""
