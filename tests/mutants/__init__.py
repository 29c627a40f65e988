"""Planted faults: small changes to the library, each of which the tests have to find.

    python -m tests.mutants [--part 1/4] [--only WORD]

`fault` says what a fault is; `planted` has lists of them, one for each mechanism.
"""
