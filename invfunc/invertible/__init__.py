"""Transforms of pairs: one that frees what can be computed again, chains of them, and checks of their inverses."""
