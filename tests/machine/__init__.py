"""Random compositions of transforms, compared with the plain loop after each step.

    python -m tests.machine [--minutes 60] [--seed 0]

`built` says what is composed and what it should give; `compositions` has the rules.
"""
