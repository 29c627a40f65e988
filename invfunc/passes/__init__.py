"""Passes through a function: forward, whole or in parts, and back, from the columns of a loss to the parameters."""
