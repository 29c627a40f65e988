"""Faults in per-sample gradients."""

from tests.mutants.fault import Fault

FIRST = "testing/test_laws_hold.py statistics/test_first_order.py per_sample/test_clipped_grad.py"
CROSSED = "operations/test_thresholds.py"
KFAC = "reductions/test_kfac.py reductions/test_kfac_exact.py reductions/test_kfac_lengths.py"
PEELED = "loss/test_peeled.py"
LOW_RANK = "statistics/test_predictive_covariance.py::TestLowRank"

FAULTS = [
    # What crosses a threshold of size
    Fault(
        "sums of squares are taken in float32 where there is no float64",
        "per_sample/factor.py",
        "direct and cancel(first) and has_float64(first[0][1].device)",
        "direct and cancel(first)",
        "_torch/test_precision.py",
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
        "products between halves of the positions count once",
        "per_sample/norms.py",
        "times[count // 2 :] = 2",
        "times[count // 2 + 1 :] = 2",
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
        "cotangents are centred where they are",
        "per_sample/factor.py",
        "tiled, fresh = self._tiled(parts, first), len(first) > 1",
        "tiled, fresh = self._tiled(parts, first), True",
        FIRST,
    ),
    Fault(
        "kept shares are squared where they are",
        "per_sample/factor.py",
        "fresh=len(terms) > 1 and not small",
        "fresh=len(terms) > 1",
        "per_sample/test_norms.py",
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
    # Predictive covariances
    Fault(
        "the variances of the parameters do not count",
        "per_sample/covariances.py",
        "widened([*pair, given])",
        "widened(pair)",
        "statistics/test_predictive_covariance.py::TestCovariance",
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
        "shifted moments forget the shift",
        "per_sample/squares.py",
        "return total + n * shift, centred",
        "return total, centred",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] " + FIRST + " " + CROSSED,
    ),
    Fault(
        "samples that do not touch a row do not count in its variance",
        "per_sample/factor.py",
        "(share - mean).square() + (n - k) / k * mean.square()",
        "(share - mean).square()",
        "per_sample/test_tables.py operations/test_layers.py::test_every_path_equals_the_loop[Embedding] "
        + FIRST
        + " operations/test_rules.py",
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
    # The noise of gradients
    Fault(
        "shares that are formed for norms are summed in one block only",
        "per_sample/factor.py",
        "return self._shaped(summed(sums), 0), joined([*norms])",
        "return self._shaped(sums[0], 0), joined([*norms])",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop[lowest-positions] " + FIRST + " " + CROSSED,
    ),
    # Losses
    Fault("a variance is divided by m", "per_sample/lots.py", " * (m / (m - 1))", "", PEELED),
    Fault(
        "exact columns have a variance",
        "per_sample/lots.py",
        "v >= (0 if lot.exact is None else lot.exact[part])",
        "v >= (0 if lot.exact is None else 0 * lot.exact[part])",
        PEELED,
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
    Fault(
        "squares cell by cell are those of many samples at once",
        "per_sample/factor.py",
        "self.budget // thresholds.SHARES if self.recipe.cells else ",
        "",
        "sparsity/test_structure_memory.py per_sample",
    ),
    # Eigenpairs, and covariances of low rank
    Fault(
        "vectors of a covariance are not those of the entries that are read",
        "per_sample/gradients.py",
        "summed(projected(f, self._read(f, along)) for f in self.factors)",
        "summed(projected(f, along.reshape(*f.use.param.shape, -1)) for f in self.factors)",
        LOW_RANK,
    ),
]
