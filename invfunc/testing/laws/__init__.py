"""Laws for functions of your own: `laws.check(f, params, *batch)` in a test says whether all of them hold for f.

A law is a small function that lists what has to be equal; its docstring is its formula. `LAWS` has all of them by name.
"""

from invfunc.testing.laws.functions import check, check_transform
from invfunc.testing.laws.operations import check_operation
from invfunc.testing.laws.pairs import check_pair
from invfunc.testing.laws.run import LAWS, Claim, Law, Outcome, Table

__all__ = ["LAWS", "Claim", "Law", "Outcome", "Table", "check", "check_operation", "check_pair", "check_transform"]
