"""Faults in what a run is seen to do."""

from tests.mutants.fault import Fault

REPEATED = "structure/test_repeated.py"

FAULTS = [
    # Parameters that are repeated for the samples
    # Operations
    # Arguments and results
    Fault(
        "a part of the batch is of its first axis",
        "arguments/problem.py",
        "x[(slice(None),) * (dim % x.ndim) + (part,)]",
        "x[part]",
        "test_chunked.py::TestStatistics::test_options_stay_with_the_statistic test_chunked.py statistics evaluation",
    ),
    Fault(
        "a negative sample counts from one place behind the last",
        "arguments/problem.py",
        "return [i % n for i in places]",
        "return [i % (n + 1) for i in places]",
        "statistics/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "statistics/test_samples.py",
    ),
]
