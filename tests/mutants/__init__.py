"""Planted faults: small changes to the library, each of which the tests have to find.

    python -m tests.mutants [--part 1/4] [--only WORD] [--processes 2] [--all]

`fault` says what a fault is and runs it; `planted` has lists of them, one for each mechanism.
The tests are those that `python -m pytest` runs; with `--all` they are all, which also find what is marked slow.
"""
