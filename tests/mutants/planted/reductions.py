"""Faults in what is made of per-sample gradients."""

from tests.mutants.fault import Fault

FIRST = "testing/test_laws_hold.py statistics/test_first_order.py"
KFAC = "reductions/test_kfac.py reductions/test_kfac_exact.py reductions/test_kfac_models.py"
PEELED = "loss/test_peeled.py"
NOISE = "statistics/test_noise_scale.py"

FAULTS = [
    # Sketches
    Fault(
        "all parameters have the same random matrices",
        "reductions/sketches.py",
        "manual_seed(self.key + place)",
        "manual_seed(self.key)",
        "statistics/test_sketched_grad.py::TestMatrices::test_differ_between_parameters_of_one_shape",
    ),
    Fault(
        "random signs are too small",
        "reductions/sketches.py",
        "div_(math.sqrt(count))",
        "div_(count)",
        "statistics/test_sketched_grad.py::TestInnerProducts::test_are_right_on_average_with_the_stated_deviation",
    ),
    Fault(
        "a mask is not scaled",
        "reductions/sketches.py",
        "math.sqrt(size / count)",
        "1.0",
        "statistics/test_sketched_grad.py::TestInnerProducts::test_of_masks_are_right_on_average",
    ),
    # Predictive covariances
    # Per-sample gradients
    Fault(
        "variances are merged without the distance of the means",
        "reductions/gradients.py",
        "centred + more + apart.square() * (m * n / (m + n))",
        "centred + more",
        "test_chunked.py::TestStatistics::test_first_order_statistics_keep_the_scale_of_the_loss "
        + FIRST
        + " test_chunked.py",
    ),
    Fault(
        "the correction of a variance is dropped",
        "reductions/gradients.py",
        "found.n - self.correction",
        "found.n",
        "statistics/test_first_order.py::TestVariance::test_is_the_variance_of_the_shares " + FIRST,
    ),
    Fault(
        "small gradients are scaled up to max_norm",
        "reductions/gradients.py",
        ".clamp(min=1).reciprocal()",
        ".reciprocal()",
        "statistics/test_first_order.py::TestClipping::test_bounds_each_share_and_no_other " + FIRST,
    ),
    # The noise of gradients
    Fault(
        "the noise of a gradient is not taken off its square",
        "reductions/noise.py",
        "(of_sum - of_shares) / pairs,",
        "of_sum / pairs,",
        NOISE + "::TestParts::test_are_unbiased " + NOISE,
    ),
    Fault(
        "the trace of a covariance is biased",
        "reductions/noise.py",
        "found.n * (found.n - 1)",
        "found.n**2",
        NOISE + "::TestParts::test_are_unbiased " + NOISE,
    ),
    Fault(
        "parameters in no group have norms",
        "reductions/noise.py",
        """if self.group(shares.name(shares.place).removeprefix("params")) is None:""",
        """if False:""",
        NOISE + "::TestComposed::test_norms_are_those_of_the_parameters_that_count " + NOISE,
    ),
    Fault(
        "squares of a gradient are rounded before they are added up",
        "reductions/noise.py",
        "return doubled(rows.square().sum(-1)).sum(), state[1]",
        "return doubled(rows.square().sum(-1)).sum().to(found.dtype), state[1]",
        NOISE + "::TestRounding " + NOISE,
    ),
    # Losses
    Fault(
        "a trace is that of the largest parameter",
        "reductions/estimate.py",
        "return norms + others, {lot",
        "return torch.maximum(norms, others), {lot",
        PEELED,
    ),
    # Kronecker factors
    Fault(
        "positions do not divide A",
        "reductions/kronecker_factors.py",
        "a = found.a / (inputs or known.n)",
        "a = found.a / known.n",
        "reductions/test_kfac.py::test_every_layer " + KFAC,
    ),
    Fault(
        "the nearest product has the sides of its factors exchanged",
        "reductions/sides.py",
        "return (matrix, other) if self.first else (other, matrix)",
        "return (matrix, other) if not self.first else (other, matrix)",
        "statistics/test_kfoc.py",
    ),
    Fault(
        "a sweep forgets the matrix of the one before",
        "reductions/sides.py",
        "other = self.known.get(shares.place)",
        "other = None if self.phase == 2 else self.known.get(shares.place)",
        "statistics/test_kfoc.py",
    ),
    Fault(
        "Shampoo's factors are divided by a norm in place of their trace",
        "reductions/sides.py",
        "return matrix, other / _trace(matrix)",
        "return matrix, other / torch.linalg.matrix_norm(matrix)",
        "statistics/test_kfoc.py",
    ),
    # Eigenpairs, and covariances of low rank
    Fault(
        "the small matrix is of products in single precision",
        "reductions/squares.py",
        "shares.products(exact=True)",
        "doubled(shares.products())",
        "linear_algebra/test_ill_conditioned.py::TestEigenpairs",
    ),
    # Arguments and results
    Fault(
        "columns of several outputs are split at their samples",
        "reductions/squares.py",
        "state[0].movedim(0, 1).split(sizes, 1)",
        "state[0].movedim(0, 1).split(sizes[::-1], 1)",
        "reductions/test_gram.py::TestJacobian::test_of_a_tree_of_outputs_is_a_tree_of_these "
        "reductions/test_gram.py evaluation",
    ),
    Fault(
        "samples of a square root are joined along its columns",
        "reductions/quantity.py",
        "whole.narrow(axis, start, x.shape[axis])",
        "whole.narrow(axis if x.shape[0] < start + x.shape[axis] else 0, start, x.shape[axis])",
        "reductions/test_gram.py::TestOfModels::test_does_not_depend_on_chunks "
        "statistics/test_diag_ggn.py reductions test_chunked.py",
    ),
    Fault(
        "blocks of samples are merged in the wrong order",
        "reductions/gradients.py",
        'return (*a, *b) if over == "samples" else (joined(list(a)) + joined(list(b)),)',
        'return (*b, *a) if over == "samples" else (joined(list(a)) + joined(list(b)),)',
        "data_sets/test_streamed.py",
    ),
    # Sparsity
    Fault(
        "Kronecker factors share passes though positions are summed first",
        "reductions/kronecker_factors.py",
        '"positions" if sharing == "expand" else "narrow"',
        '"positions"',
        "structure/test_kfac.py::test_it_is_that_of_all_columns structure",
    ),
    # Kronecker factors
    Fault(
        "the nearest product weighs its terms alike",
        "reductions/nearest.py",
        "zip(cs, fs, strict=True)]) for cs, fs in ((x, first), (y, last))]",
        "zip(cs, fs, strict=True)]) for cs, fs in ((x, first), (y.mean().expand(len(y)), last))]",
        "reductions/test_kfac_models.py::TestRoles::test_have_the_product_that_is_nearest_to_the_sum reductions",
    ),
    Fault(
        "a variance is divided by m",
        "reductions/lots.py",
        " * (m / (m - 1))",
        "",
        "loss/test_peeled.py",
    ),
    Fault(
        "exact columns have a variance",
        "reductions/lots.py",
        "v >= (0 if lot.exact is None else lot.exact[part])",
        "v >= (0 if lot.exact is None else 0 * lot.exact[part])",
        "loss/test_peeled.py",
    ),
]
