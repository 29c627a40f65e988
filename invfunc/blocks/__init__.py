"""Blocks of invertible functions, whose inputs are freed: `series` calls them, `run` is the engine, by hooks."""
