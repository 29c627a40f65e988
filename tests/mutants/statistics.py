"""Faults in per-sample gradients, curvature and products."""

from tests.mutants.fault import Fault

FIRST = "testing/test_laws_hold.py statistics/test_first_order.py per_sample/test_clipped_grad.py"
CROSSED = "operations/test_thresholds.py"
LONG = CROSSED + "::TestKFactors " + CROSSED
KFAC = "reductions/test_kfac.py reductions/test_kfac_exact.py reductions/test_kfac_lengths.py"
PEELED = "loss/test_peeled.py"
EIGENPAIRS = "products/test_eigenpairs.py"
LOW_RANK = "statistics/test_predictive_covariance.py::TestLowRank"
NOISE = "statistics/test_noise_scale.py"
DRAWN = "loss/test_monte_carlo.py loss/test_monte_carlo_sample.py"

REPEATED = "sparsity/test_structure_repeated.py"

STATISTICS = [
    # Parameters that are repeated for the samples
    Fault(
        "one sample does not know what is repeated for several",
        "passes/by_rows.py",
        "entries=self.entries, repeated=self.repeated)",
        "entries=self.entries)",
        f"{REPEATED}::test_the_structure_is_seen",
    ),
    Fault(
        "what is repeated along tokens, too, counts as read once",
        "recording/uses.py",
        "        if stride <= reached:\n            return False",
        "        if stride < 0:\n            return False",
        REPEATED,
    ),
    Fault(
        "all repeated entries have one label",
        "sparsity/pattern.py",
        "(out, *(x for x in beside if x.shape == out.shape))",
        "(out,)",
        REPEATED,
    ),
    Fault(
        "each sample has the repeated parameters of all",
        "recording/uses.py",
        "axis.regular and x.stride(axis.dim) == 0",
        "axis.regular and x.stride(axis.dim) < 0",
        f"{REPEATED}::test_no_sample_has_the_tokens_of_all",
    ),
    # What crosses a threshold of size
    Fault(
        "checks at the end are forgotten",
        "_torch/values.py",
        "        _CHECKS.reset(token)\n    _look(checks)",
        "        _CHECKS.reset(token)",
        "statistics/test_diag_ggn.py::TestRefusals _torch",
    ),
    Fault(
        "a matrix that is read along its memory is not turned back",
        "linear_algebra/pairwise.py",
        "return x.mT if self.turned else x",
        "return x.reshape(x.mT.shape) if self.turned else x",
        "operations/test_thresholds.py per_sample",
    ),
    Fault(
        "sums that cancel are taken in float32 where there is no float64",
        "linear_algebra/contract.py",
        "    if wide and not exact:",
        "    if wide and not wide:",
        "_torch/test_precision.py",
    ),
    Fault(
        "sums of squares are taken in float32 where there is no float64",
        "per_sample/factor.py",
        "direct and cancel(first) and has_float64(first[0][1].device)",
        "direct and cancel(first)",
        "_torch/test_precision.py",
    ),
    Fault(
        "half of a symmetric product is not mirrored",
        "linear_algebra/contract.py",
        "found[:start, start:stop] = rows[:, :start].mT",
        "found[:start, start:stop] = 0",
        LONG + " operations/test_autocorrelation.py",
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
        "lambda x, y: conv1d_weight(",
        "lambda x, y: 2 * conv1d_weight(",
        LONG,
    ),
    Fault(
        "bfloat16 is not widened",
        "linear_algebra/contract.py",
        "low = (torch.float16, torch.bfloat16)",
        "low = ()",
        "per_sample/test_half_precision.py::TestSquaresOfSmallShares::test_make_norms per_sample",
    ),
    Fault(
        "norms are taken in float32 where their sums cancel",
        "per_sample/norms.py",
        "return None if anywhere(~(within & (bound <= most * norms))) else norms",
        "return None if anywhere(~within) else norms",
        "per_sample/test_norms.py",
    ),
    Fault(
        "norms are taken in float32 beyond its range",
        "per_sample/norms.py",
        "(within & (bound <= most * norms))",
        "(bound <= most * norms)",
        "per_sample/test_norms.py",
    ),
    Fault(
        "norms are taken in float32 where they are differentiated",
        "per_sample/norms.py",
        "return not moved and _cheaper",
        "return _cheaper",
        "per_sample/test_norms.py",
    ),
    Fault(
        "what is summed in one factor alone is bounded by it",
        "per_sample/norms.py",
        "if any(inner.count(c) == 1 for c in {*inner} - {*instance}) or not crosses(pair, output):",
        "if not crosses(pair, output):",
        "per_sample/test_norms.py",
    ),
    Fault(
        "kept shares are summed without their weights",
        "per_sample/factor.py",
        "found = shares.sum(0) if weights is None else torch.tensordot(weights.to(shares.dtype), shares, 1)",
        "found = shares.sum(0)",
        "per_sample/test_norms.py",
    ),
    Fault(
        "kept shares are squared where they are",
        "per_sample/factor.py",
        "fresh=len(terms) > 1 and not small",
        "fresh=len(terms) > 1",
        "per_sample/test_norms.py",
    ),
    Fault(
        "a sum over one tensor alone is left out of a product",
        "linear_algebra/pairwise.py",
        '[_reduced(f"{left}->{first}", x), _reduced(f"{right}->{second}", y)]',
        '[_reduced(f"{left}->{first}", x) * 2, _reduced(f"{right}->{second}", y)]',
        "per_sample/test_norms.py operations/test_thresholds.py",
    ),
    Fault(
        "each block of a weighted sum has the first weights",
        "per_sample/factor.py",
        "weights.split([length(part) for part in parts])",
        "[weights[: length(part)] for part in parts]",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] " + FIRST + " " + CROSSED,
    ),
    Fault(
        "blocks of samples are not mirrored in inner products",
        "per_sample/products.py",
        "rows[j][i].permute(2, 3, 0, 1)",
        "rows[j][i]",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] "
        "reductions/test_gram_jacobian.py " + CROSSED,
    ),
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
        "all blocks of samples have the sketches of the first",
        "per_sample/sketches.py",
        "length(part)) for part in others",
        "length(part)) for part in [first] * len(others)",
        "statistics/test_sketched_grad.py::TestFactors",
    ),
    Fault(
        "a sketch of one row of a table loses which rows are picked",
        "per_sample/sketches.py",
        "if picked and 0 not in ins:",
        "if picked and not ins:",
        "statistics/test_sketched_grad.py::TestFactors",
    ),
    Fault(
        "a label of rows and columns is taken for one of columns",
        "per_sample/sketches.py",
        "if set(ins) & set(outs):\n            return None",
        "outs = [d for d in outs if d not in ins]",
        "statistics/test_sketched_grad.py::TestFactors",
    ),
    Fault(
        "a sketch of a convolution forgets its dilation",
        "operations/convolutions.py",
        "None, stride, padding, dilation, groups)",
        "None, stride, padding, 1, groups)",
        "statistics/test_sketched_grad.py::TestFactors",
    ),
    Fault(
        "a mask is not scaled",
        "reductions/sketches.py",
        "math.sqrt(size / count)",
        "1.0",
        "statistics/test_sketched_grad.py::TestInnerProducts::test_of_masks_are_right_on_average",
    ),
    # Predictive covariances
    Fault(
        "the variances of the parameters do not count",
        "per_sample/covariances.py",
        "widened([*pair, given])",
        "widened(pair)",
        "statistics/test_predictive_covariance.py::TestCovariance",
    ),
    Fault(
        "factors of other dims than those of a layer are taken for its own",
        "reductions/eigenbasis.py",
        "if check and not joint and not _of(basis, layer):",
        "if False:",
        "statistics/test_predictive_covariance.py::TestFactors::test_of_groups_that_no_layer_has",
    ),
    Fault(
        "a covariance of weight and bias is taken for that of the weight",
        "reductions/predictive.py",
        "rotated(shares, basis, joint is not None, check=True)",
        "rotated(shares, basis, False)",
        "statistics/test_predictive_covariance.py::TestFactors",
    ),
    # Per-sample gradients
    Fault(
        "a share that is the cotangent is not copied",
        "per_sample/factor.py",
        "share = share.clone() if len(terms) == 1 and self.recipe.joins else share",
        "share = share",
        "test_reduced.py::test_it_may_write_to_what_it_is_given "
        "evaluation/test_memory_of_results.py per_sample evaluation statistics/test_first_order.py",
    ),
    Fault(
        "large shares are taken with the first rows of what is sent back",
        "per_sample/factor.py",
        "narrowed(terms, self.output[0], *rows)",
        "narrowed(terms, self.output[0], 0, rows[1] - rows[0])",
        "operations/test_weighted_sums.py::test_large_shares_by_some_rows_are_those_of_the_loop " + FIRST,
    ),
    Fault(
        "a total that is somebody else's is written to",
        "linear_algebra/contract.py",
        "total = added(total, more) if i else total + more",
        "total = added(total, more)",
        "operations/test_thresholds.py::TestKernels",
    ),
    Fault(
        "each share of a convolution is that of the first sample",
        "operations/convolutions.py",
        "zip(cotangent[0].split(1), one_by_one(part), strict=True)",
        "zip(cotangent[0].split(1), one_by_one(part)[:1] * len(cotangent[0]), strict=True)",
        "operations/test_weighted_sums.py::test_shares_by_themselves_are_those_of_the_loop " + FIRST,
    ),
    Fault(
        "shifted moments forget the shift",
        "per_sample/squares.py",
        "return total + n * shift, centred",
        "return total, centred",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] " + FIRST + " " + CROSSED,
    ),
    Fault(
        "samples that do not touch a row do not count in its variance",
        "per_sample/factor.py",
        "summed(squared) + (n - summed(visits)) * mean[:-1].square()",
        "summed(squared)",
        "operations/test_layers.py::test_every_path_equals_the_loop[Embedding] " + FIRST + " operations/test_rules.py",
    ),
    Fault(
        "what lands behind the last row is added to it",
        "per_sample/table.py",
        "return target.index_add(0, self.rows(part).flatten(), share.flatten(0, 1))[:-1]",
        "return target.index_add(0, self.rows(part).flatten().clamp(max=self.count - 1), share.flatten(0, 1))[:-1]",
        "operations/test_layers.py::test_every_path_equals_the_loop[EmbeddingBag] "
        + FIRST
        + " operations/test_rules.py",
    ),
    Fault(
        "entries that are read twice are squared apart",
        "per_sample/gradients.py",
        "return not anywhere(read > 1.5)",
        "return True",
        "operations/test_rules.py::test_every_path_equals_the_loop operations/test_rules.py statistics",
    ),
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
        "per_sample/test_clipped_grad.py::TestClipping::test_bounds_each_share_and_no_other " + FIRST,
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
    Fault(
        "shares that are formed for norms are summed in one block only",
        "per_sample/factor.py",
        "return self._shaped(summed(sums), 0), joined([*norms])",
        "return self._shaped(sums[0], 0), joined([*norms])",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] " + FIRST + " " + CROSSED,
    ),
    Fault(
        "samples that were chosen twice count once",
        "passes/second_order.py",
        "torch.bincount(chosen, minlength=n)",
        "torch.bincount(chosen, minlength=n).clamp(max=1)",
        "statistics/test_diag_hessian_composed.py::TestChunks::test_over_two_axes_and_of_some_samples "
        "per_sample/test_samples.py statistics",
    ),
    # Losses
    Fault(
        "a mean over the classes' weights divides by their number",
        "loss/hessian.py",
        "        size = drawn.sum()\n",
        "        size = valid.sum()\n",
        "loss/test_losses.py::test_a_mean_over_weighted_classes_is_that_of_its_formula "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "label smoothing forgets the classes' weights",
        "loss/hessian.py",
        "torch.where(valid, w.sum() * smoothing / classes, 0)",
        "torch.where(valid, smoothing, 0)",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "targets that are ignored count",
        "loss/hessian.py",
        "valid = target != ignore",
        "valid = target == target",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "what bends an nll_loss is not seen",
        "loss/hessian.py",
        "[node.next_functions[0][0]] for node in nodes_of([slope])",
        "[] for node in nodes_of([slope])",
        "statistics/test_diag_ggn.py::TestWrittenByHand statistics/test_diag_ggn.py",
    ),
    Fault(
        "a loss that is not convex is not told",
        "loss/hessian.py",
        "check(raw < -16 * torch.finfo(raw.dtype).eps * largest, lambda: ConvexityError(text))",
        "pass",
        "statistics/test_diag_ggn.py::TestRefusals::test_a_loss_that_is_not_convex loss statistics passes",
    ),
    Fault(
        "the last column of the softmax points elsewhere",
        "loss/square_root.py",
        "q * (unit - own * (q + last) / (1 + q[:, -1:]))",
        "q * (unit - own * (q + last) / (1 + q[:, :1]))",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "roots of eigenvalues are multiplied to the rows of the eigenvectors",
        "loss/square_root.py",
        "(vectors * values.clamp(min=0).sqrt().unsqueeze(1))",
        "(vectors * values.clamp(min=0).sqrt().unsqueeze(2))",
        "statistics/test_ggn_of_samples.py::test_the_products_of_a_root_are_the_matrix "
        "statistics/test_ggn_of_samples.py testing/test_laws_hold.py loss statistics reductions",
    ),
    Fault(
        "eigenvalues that round below zero have a root",
        "loss/square_root.py",
        "values.clamp(min=0).sqrt()",
        "values.sqrt()",
        "statistics/test_ggn_of_samples.py::test_the_products_of_a_root_are_the_matrix "
        "statistics/test_ggn_of_samples.py testing/test_laws_hold.py loss statistics reductions",
    ),
    Fault(
        "targets are drawn with too few columns in the scale",
        "loss/drawn.py",
        "safe_root(columns.diagonal) * count**-0.5",
        "safe_root(columns.diagonal)",
        "loss/test_monte_carlo.py::test_columns_average_to_the_hessian " + DRAWN,
    ),
    Fault(
        "a class takes its own sign twice",
        "loss/peeled.py",
        "p * (each.cumsum(2) - each)",
        "p * each.cumsum(2)",
        PEELED,
    ),
    Fault(
        "columns that are exact count as drawn ones",
        "loss/peeled.py",
        "share = (count - exact).clamp(min=1)",
        "share = (count - 0 * exact).clamp(min=1)",
        PEELED,
    ),
    Fault("a variance is divided by m", "per_sample/lots.py", " * (m / (m - 1))", "", PEELED),
    Fault(
        "exact columns have a variance",
        "per_sample/lots.py",
        "v >= (0 if lot.exact is None else lot.exact[part])",
        "v >= (0 if lot.exact is None else 0 * lot.exact[part])",
        PEELED,
    ),
    Fault(
        "a trace is that of the largest parameter",
        "reductions/estimate.py",
        "return norms + others, {lot",
        "return torch.maximum(norms, others), {lot",
        PEELED,
    ),
    Fault(
        "classes are drawn from the first of them alone",
        "loss/drawn.py",
        "target = (below <= number).sum(2)",
        "target = 0 * (below <= number).sum(2)",
        "loss/test_monte_carlo.py::test_columns_average_to_the_hessian " + DRAWN,
    ),
    Fault(
        "a sure prediction has noise",
        "loss/drawn.py",
        "none = variance <= 0\n    noise",
        "none = variance < 0\n    noise",
        "loss/test_diag_ggn_extremes.py::TestExtremes::test_what_is_drawn_of_a_sure_prediction_is_what_there_is_of_it "
        + DRAWN
        + " per_sample/test_nan.py loss",
    ),
    # Curvature
    Fault(
        "the Hessian of a call is taken for its gradient",
        "passes/second_order.py",
        "nonlinear = {i: s for i, s in zip(values, found, strict=True) if s is not None and reaches(s, nodes, {})}",
        "nonlinear = {i: s for i, s in zip(values, found, strict=True) if s is None}",
        "statistics/test_diag_hessian.py::test_of_any_network statistics/test_diag_hessian.py",
    ),
    Fault(
        "a parameter that is read again counts as read once",
        "passes/second_order.py",
        "if len(uses[i]) == 1 or not _downstream(run.params[i], uses[i])",
        "if True",
        "statistics/test_diag_hessian.py::test_of_any_layer "
        "statistics/test_diag_hessian.py statistics/test_diag_hessian_composed.py",
    ),
    Fault(
        "KFRA averages over one sample too many",
        "passes/kfra.py",
        "return matrix * (d.mT @ d) / len(d)",
        "return matrix * (d.mT @ d) / (len(d) + 1)",
        "reductions/test_kfac_exact.py::TestExactness::test_of_one_sample reductions",
    ),
    Fault(
        "autocast is not what it was where a call runs again",
        "passes/second_order.py",
        "torch.autocast(device, step.autocast) if step.autocast is not None else nullcontext()",
        "nullcontext()",
        "statistics/test_diag_hessian.py::test_under_autocast_what_bends_is_run_again_in_the_same_precision "
        "per_sample/test_half_precision.py statistics",
    ),
    # Kronecker factors
    Fault(
        "a joint bias counts at samples that are missing",
        "per_sample/operands.py",
        "ones if self.use.axis.rows is None else self._real(part).reshape(ones.shape)",
        "ones",
        "reductions/test_kfac_lengths.py::test_are_of_the_positions_that_are_there " + KFAC,
    ),
    Fault(
        "averages over positions divide by those of the longest sample",
        "reductions/kronecker_factors.py",
        "if len(set(counts)) == 1:",
        "if counts:",
        "reductions/test_kfac_lengths.py::test_are_of_the_positions_that_are_there " + KFAC,
    ),
    Fault(
        "positions do not divide A",
        "reductions/kronecker_factors.py",
        "a = found.a / (inputs or known.n)",
        "a = found.a / known.n",
        "reductions/test_kfac.py::test_every_layer " + KFAC,
    ),
    Fault(
        "B of a product of two columns is not symmetric",
        "reductions/kronecker_factors.py",
        "return b if same else (b + b.mT) / 2",
        "return b",
        "reductions/test_kfac.py::test_b_is_symmetric_to_the_last_bit reductions/test_kfac.py",
    ),
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
    Fault(
        "products of positions that cancel are added up in single precision",
        "per_sample/sides.py",
        "wide = cancel(pair) and crosses(terms, output)",
        "wide = False",
        "statistics/test_kfoc.py::test_positions_that_cancel_leave_the_digits_of_single_precision",
    ),
    Fault(
        "products of positions that cancel are added up where there is no float64",
        "per_sample/sides.py",
        "if wide and not has_float64(terms[0][1].device):",
        "if not terms:",
        "_torch/test_precision.py",
    ),
    Fault(
        "factors of shares have the same positions on both sides",
        "per_sample/sides.py",
        'inner = sorted({c for labels, _ in terms for c in labels} - set("VN" + between))',
        "inner = sorted(set(output) - set(between))",
        "statistics/test_kfoc.py",
    ),
    # Eigenpairs, and covariances of low rank
    Fault(
        "the small matrix is decomposed in single precision",
        "products/sample_space.py",
        "doubled(gram.reshape(v * n, v * n))",
        "gram.reshape(v * n, v * n)",
        EIGENPAIRS + "::TestSolve::test_is_as_right_as_its_condition_in_single_precision",
    ),
    Fault(
        "eigenvalues that are rounding have eigenvectors",
        "products/sample_space.py",
        "16 * eps * noise",
        "0 * eps * noise",
        EIGENPAIRS + "::TestPairs",
    ),
    Fault(
        "what lies outside of the samples is not damped",
        "products/sample_space.py",
        "others * self._damping(damping).log()",
        "others * 0",
        EIGENPAIRS + "::TestPairs",
    ),
    Fault(
        "f is run again with other random numbers",
        "products/eigenpairs.py",
        "            set_states(states)  # f is run again\n",
        "",
        EIGENPAIRS + "::TestRuns",
    ),
    Fault(
        "products of samples in blocks are those within each",
        "evaluation/engine.py",
        "averaged or thin or pairs",
        "averaged or thin",
        EIGENPAIRS,
    ),
    Fault(
        "vectors of a covariance have no weights",
        "reductions/predictive.py",
        "weighted = along if weights is None else along * weights.to(along)",
        "weighted = along",
        LOW_RANK,
    ),
    Fault(
        "vectors of a covariance are not those of the entries that are read",
        "per_sample/gradients.py",
        "summed(projected(f, self._read(f, along)) for f in self.factors)",
        "summed(projected(f, along.reshape(*f.use.param.shape, -1)) for f in self.factors)",
        LOW_RANK,
    ),
]
