"""Facts about torch's operations, beside where they move samples and how they read parameters.

Other forms of them, with right second derivatives, or of operations that can be followed; what they ask, read and
write; and what torch calls them.
"""

from invfunc.operations import forms, recurrent  # noqa: F401  (they fill the entries in)
