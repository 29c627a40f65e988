"""The rows of the public statistics stand in `invfunc.testing.laws.rows`."""

from invfunc.testing.laws.rows import *  # noqa: F403
