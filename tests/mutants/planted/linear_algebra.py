"""Faults in sums of products."""

from tests.mutants.fault import Fault

CROSSED = "operations/test_thresholds.py"
LONG = CROSSED + "::TestKFactors " + CROSSED

FAULTS = [
    # What crosses a threshold of size
    Fault(
        "a matrix that is read along its memory is not turned back",
        "linear_algebra/pairwise.py",
        "return x.mT if self.turned else x",
        "return x.reshape(x.mT.shape) if self.turned else x",
        "operations/test_thresholds.py statistics",
    ),
    Fault(
        "sums that cancel are taken in float32 where there is no float64",
        "linear_algebra/contract.py",
        "    if wide and not exact:",
        "    if wide and not wide:",
        "_torch/test_precision.py",
    ),
    Fault(
        "half of a symmetric product is not mirrored",
        "linear_algebra/contract.py",
        "found[:start, start:stop] = found[start:stop, :start].mT",
        "found[:start, start:stop] = 0",
        LONG + " linear_algebra/test_autocorrelation.py",
    ),
    Fault(
        "long sums of products are doubled",
        "linear_algebra/contract.py",
        "return torch.addbmm(x.new_zeros(k, k)",
        "return 2 * torch.addbmm(x.new_zeros(k, k)",
        LONG,
    ),
    Fault(
        "products as the gradient of a convolution are doubled",
        "linear_algebra/contract.py",
        "_put(conv1d_weight(",
        "_put(2 * conv1d_weight(",
        LONG,
    ),
    Fault(
        "a sum over one tensor alone is left out of a product",
        "linear_algebra/pairwise.py",
        '[_reduced(f"{left}->{first}", x), _reduced(f"{right}->{second}", y)]',
        '[_reduced(f"{left}->{first}", x) * 2, _reduced(f"{right}->{second}", y)]',
        "core/test_norms.py operations/test_thresholds.py",
    ),
    # Eigenpairs, and covariances of low rank
    Fault(
        "vectors of a covariance have no weights",
        "linear_algebra/low_rank.py",
        "return along @ weights if weights.ndim == 2 else along * weights",
        "return along",
        "statistics/test_predictive_covariance.py::TestLowRank",
    ),
    # Per-sample gradients
    Fault(
        "a total that is somebody else's is written to",
        "linear_algebra/contract.py",
        "total = added(total, more) if i else total + more",
        "total = added(total, more)",
        "operations/test_thresholds.py::TestKernels",
    ),
    Fault(
        "a large factor is the squares of sums over positions",
        "linear_algebra/contract.py",
        "(a * b).sum((0, -1))",
        "(a.sum(-1) * b.sum(-1)).sum(0)",
        "reductions/test_diagonal_factors.py",
    ),
]
