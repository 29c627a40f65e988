"""Faults in Kronecker factors as matrices."""

from tests.mutants.fault import Fault

KRONECKER = "kronecker"

FAULTS = [
    Fault(
        "damping is split the other way round",
        "kronecker/matrix.py",
        "return [(damping * ratio).sqrt(), (damping / ratio).sqrt()]",
        "return [(damping / ratio).sqrt(), (damping * ratio).sqrt()]",
        "kronecker/test_matrix.py::TestInverse::test_with_a_split_is_that_of_damped_factors kronecker",
    ),
    Fault(
        "eigenvectors are applied without being transposed",
        "kronecker/matrix.py",
        "blocks.product(self.factors, x, transposed=True)",
        "blocks.product(self.factors, x)",
        "kronecker/test_matrix.py::TestMatrix::test_product_is_that_with_the_flat_vectors kronecker",
    ),
    Fault(
        "groups of dims come back in the order of the groups",
        "kronecker/matrix.py",
        "return x.permute(sorted(range(v.ndim), key=order.__getitem__)).to(dtype)",
        "return x.permute(order).to(dtype)",
        "kronecker/test_matrix.py::TestMatrix::test_is_the_product_of_its_factors " + KRONECKER,
    ),
    Fault(
        "an inverse is rounded before it solves",
        "kronecker/matrix.py",
        "return (self._inverse(damping, split) @ v)",
        "return (self.inverse(damping, split) @ v)",
        "linear_algebra/test_ill_conditioned.py::TestFactors",
    ),
    Fault(
        "damping is split by traces, not by mean eigenvalues",
        "kronecker/matrix.py",
        "_diagonal(f).mean(dtype=",
        "_diagonal(f).sum(dtype=",
        "kronecker/test_matrix.py::TestInverse::test_with_a_split_is_that_of_damped_factors " + KRONECKER,
    ),
    Fault(
        "the trace of blocks is that of the mean block",
        "kronecker/matrix.py",
        "return torch.vmap(Kronecker.trace)(each).sum()",
        "return torch.vmap(Kronecker.trace)(each).mean()",
        "kronecker/test_matrix.py::TestMatrix::test_of_blocks_that_differ " + KRONECKER,
    ),
    Fault(
        "merged factors of a mean loss weigh alike",
        "kronecker/batches.py",
        "weights = [(k / (n or 1)) ** degree for k in known]",
        "weights = [1 / len(known)] * len(known)",
        "kronecker/test_batches.py::TestMerge::test_does_not_depend_on_the_order_or_on_steps " + KRONECKER,
    ),
    Fault(
        "merged inputs are counted as samples",
        "kronecker/batches.py",
        "inputs = sum(known), [part.origin.inputs for part in parts]",
        "inputs = sum(known), known",
        "kronecker/test_batches.py::TestMerge::test_counts_positions " + KRONECKER,
    ),
    Fault(
        "a bias comes before the inputs of its weight",
        "kronecker/origin.py",
        "torch.cat([w, b.unsqueeze(-1)], -1)",
        "torch.cat([b.unsqueeze(-1), w], -1)",
        "kronecker/test_trees.py::TestSolve::test_of_one_position_is_that_of_the_gradient " + KRONECKER,
    ),
    Fault(
        "an inverse still counts as a sum over samples",
        "kronecker/origin.py",
        "return replace(args[0], n=None)",
        "return args[0]",
        "kronecker/test_batches.py::test_errors_name_the_place " + KRONECKER,
    ),
]
