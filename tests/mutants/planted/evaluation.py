"""Faults in the evaluation of statistics."""

from tests.mutants.fault import Fault

FAULTS = [
    # Chunks of samples
    Fault(
        "the mean over a chunk keeps its scale",
        "evaluation/engine.py",
        '(b - a) / n if kind == "mean" else 1',
        "1",
        "test_chunked.py::TestChunksAlone::test_a_chunk_is_one_call_of_f test_chunked.py",
    ),
    # Arguments and results
    Fault(
        "samples come in the inverse of the order in which they were chosen",
        "evaluation/fold.py",
        "torch.tensor(sorted(order, key=order.__getitem__), device",
        "torch.tensor(order, device",
        "statistics/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "statistics/test_samples.py",
    ),
    Fault(
        "samples that were chosen are counted from the start of each block",
        "evaluation/engine.py",
        "sorted(i - part[0] for i in chosen if part[0] <= i < part[1])",
        "sorted(i for i in chosen if i < part[1] - part[0])",
        "statistics/test_samples.py::TestEveryStatistic::test_does_not_depend_on_chunks "
        "statistics/test_samples.py test_chunked.py statistics",
    ),
    Fault(
        "columns of a chunk are the first ones",
        "evaluation/engine.py",
        "[Slice(c, slice(a, b)) for c in each]",
        "[Slice(c, slice(0, b - a)) for c in each]",
        "core/test_parts.py::test_are_those_of_the_whole core/test_parts.py",
    ),
    Fault(
        "another phase draws others",
        "evaluation/engine.py",
        "set_states(before)  # each phase sees the same",
        "pass",
        "test_chunked_memory.py::TestResults::test_are_those_of_the_statistic",
    ),
    Fault(
        "samples that stand alone do not show that their data weigh them",
        "evaluation/engine.py",
        "if not same_values(total.to(found), found):",
        "if False:",
        "test_chunked.py::TestChunksAlone test_chunked.py",
    ),
    Fault(
        "the loss of a batch by a plan is not weighed",
        "evaluation/sweep.py",
        "kept, shapes, places, engine.scalar, outputs, aux = found",
        "kept, shapes, places, _, outputs, aux = found",
        "plans/test_batches.py::TestWays plans/test_batches.py",
    ),
]
