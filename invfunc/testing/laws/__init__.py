"""Laws for functions of your own: `laws.check(f, params, *batch)` in a test says whether all of them hold for f.

A law is a small function that lists what has to be equal; its docstring is its formula. `LAWS` has all of them by name.
"""

from invfunc.testing.laws.book import LAWS
from invfunc.testing.laws.check import check
from invfunc.testing.laws.check_operation import check_operation
from invfunc.testing.laws.check_pair import check_pair
from invfunc.testing.laws.check_transform import check_transform
from invfunc.testing.laws.law import Claim, Law
from invfunc.testing.laws.run import Outcome
from invfunc.testing.laws.table import Table

__all__ = ["LAWS", "Claim", "Law", "Outcome", "Table", "check", "check_operation", "check_pair", "check_transform"]
