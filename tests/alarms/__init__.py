"""False alarms of `certified`: drawn problems, all that it takes, in each precision, whose results are right.

    python -m tests.alarms [--calls 1000] [--seed 0] [--dtype float32] [--scale 3] [--part 1/4]

`calls` says what is drawn; each alarm is told with a line of code that raises it again.
"""
