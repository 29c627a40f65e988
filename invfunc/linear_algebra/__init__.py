"""Contractions, and matrices: whole, symmetric, of low rank."""
