"""Faults in the evaluation of statistics."""

from tests.mutants.fault import Fault

EIGENPAIRS = "products/test_eigenpairs.py"

FAULTS = [
    # Eigenpairs, and covariances of low rank
    Fault(
        "products of samples in blocks are those within each",
        "evaluation/engine.py",
        "averaged or thin or pairs",
        "averaged or thin",
        EIGENPAIRS,
    ),
    # Chunks of samples
    Fault(
        "the mean over a chunk keeps its scale",
        "evaluation/engine.py",
        '(b - a) / self.problem.n if kind == "mean" else 1',
        "1",
        "test_chunked.py::TestChunksAlone::test_a_chunk_is_one_call_of_f test_chunked.py",
    ),
    # Arguments and results
    Fault(
        "samples come in the inverse of the order in which they were chosen",
        "evaluation/fold.py",
        "torch.tensor(sorted(order, key=order.__getitem__), device",
        "torch.tensor(order, device",
        "per_sample/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "per_sample/test_samples.py",
    ),
    Fault(
        "samples that were chosen are counted from the start of each block",
        "evaluation/fold.py",
        "sorted(i - run.start for i in chosen if run.start <= i < run.start + n)",
        "sorted(i for i in chosen if i < n)",
        "per_sample/test_samples.py::TestEveryStatistic::test_does_not_depend_on_chunks "
        "per_sample/test_samples.py test_chunked.py statistics",
    ),
    # Sparsity
    Fault(
        "another block of samples bends in the calls of the first",
        "evaluation/decisions.py",
        "if self._steps[key] != [c.step for c in second_order]:",
        "if False:",
        "sparsity/test_structure_hessian.py::test_a_loss_whose_samples_bend_in_other_calls sparsity",
    ),
    Fault(
        "the loss of a batch by a plan is not weighed",
        "evaluation/brought.py",
        "kept, shapes, places, engine.scalar, outputs, aux = found",
        "kept, shapes, places, _, outputs, aux = found",
        "plans/test_batches.py::TestWays plans/test_batches.py",
    ),
]
