"""Faults in the files at the top of the package."""

from tests.mutants.fault import Fault

LAPLACE = "test_laplace.py"

FAULTS = [
    Fault(
        "lists of arguments of a block are read as the program has changed them",
        "tree.py",
        "return tree if type(tree) in _PLAIN else _copied(tree)",
        "return tree",
        "blocks/test_ordinary.py::TestListsOfArguments",
    ),
    # Products, chunks, sparsity
    Fault(
        "the mean of ragged chunks weighs them alike",
        "chunked.py",
        "[x * (size / total) for x, size in zip(xs, sizes, strict=True)]",
        "[x / len(xs) for x, size in zip(xs, sizes, strict=True)]",
        "test_chunked.py::TestPlainFunctions::test_folds_are_a_prefix_of_the_output test_chunked.py",
    ),
    # Arguments and results
    Fault(
        "a result that another one shares memory with is not copied",
        "transform.py",
        "if memory is not None and (memory in taken or (not x.is_contiguous() and _expanded(x))):",
        "if memory is not None and not x.is_contiguous() and _expanded(x):",
        "evaluation/test_memory_of_results.py::test_of_statistics "
        "evaluation/test_memory_of_results.py evaluation products",
    ),
    Fault(
        "chunks of a function are of its first axis",
        "chunked.py",
        "some_samples(x, dims.get(i), slice(start, stop))",
        "some_samples(x, dims.get(i) and 0, slice(start, stop))",
        "test_chunked.py::TestPlainFunctions::test_samples_along_other_axes test_chunked.py",
    ),
    Fault(
        "chunks of a size begin at 0 within another chunk",
        "plan.py",
        "edges = [*range(start, stop, self.size), stop]",
        "edges = [start, *range(self.size, length, self.size), stop]",
        "test_chunked.py::TestPasses::test_of_a_size_divide_each_chunk test_chunked.py",
    ),
    # Backends for Laplace
    Fault(
        "of Laplace's factors always the second one is weighed by the batch",
        "laplace.py",
        "if i == K.origin.read else",
        "if i == 1 else",
        LAPLACE + "::TestBackends::test_factors_of_batches_add_up_to_those_of_all " + LAPLACE,
    ),
    Fault(
        "curvature for Laplace is of the loss without its half",
        "laplace.py",
        "self.factor * curvature",
        "curvature",
        LAPLACE + "::TestBackends::test_have_the_dense_matrix_and_its_diagonal " + LAPLACE,
    ),
    Fault(
        "Jacobians for Laplace are always of detached parameters",
        "laplace.py",
        "p if enable_backprop else p.detach()",
        "p.detach()",
        LAPLACE + "::TestBackends::test_are_differentiable_if_asked " + LAPLACE,
    ),
    Fault(
        "every draw for Laplace has the same seed",
        "laplace.py",
        "seed = int(torch.randint(2**62, ()))",
        "seed = 0",
        LAPLACE + "::TestBackends::test_draw_as_torchs_generator_says " + LAPLACE,
    ),
]
