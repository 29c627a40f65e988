"""Planted faults: small changes to the library, each of which the tests have to find.

    python -m tests.mutants [--part 1/4] [--only WORD] [--processes 2] [--certified]

`fault` says what a fault is and runs it; `planted` has a list of them for each folder of the package.
With `--certified` no test looks for them: `certificates` lets `certified` do it, on drawn problems alone.
"""
