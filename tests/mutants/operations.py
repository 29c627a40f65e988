"""Faults in single operations, in samples that change places, and in products and chunks."""

from tests.mutants.fault import Fault

OPERATIONS = [
    # Operations
    Fault(
        "the padding of a lookup is read",
        "operations/lookup.py",
        "return tokens.masked_fill(tokens == padding, count)",
        "return tokens",
        "operations/test_layers.py::test_every_path_equals_the_loop[Embedding] operations/test_rules.py operations",
    ),
    Fault(
        "a mean of bags counts their padding",
        "operations/lookup.py",
        "total / padding.logical_not().sum(1).clamp(min=1)",
        "total / padding.shape[1]",
        "operations/test_layers.py::test_every_path_equals_the_loop[EmbeddingBag] operations",
    ),
    Fault(
        "the reset gate leaves the hidden bias alone",
        "operations/cells.py",
        "n = torch.addcmul(x_n, r.sigmoid(), h_n).tanh()",
        "n = (x_n + h_n).tanh()",
        "operations/test_compositions.py::test_layers_equal_torch operations",
    ),
    Fault(
        "the slope of a reset gate leaves out what it scales",
        "operations/cells.py",
        "of_n * h_n * r * (1 - r)",
        "of_n * r * (1 - r)",
        "operations/test_compositions.py::test_layers_equal_torch operations",
    ),
    Fault(
        "what is sent back to the last state of a sequence that has ended is lost",
        "operations/recurrences.py",
        "else resized(carried, last, many)",
        "else resized(carried, tuple(torch.zeros_like(h) for h in last), many)",
        "operations/test_compositions.py::test_layers_of_packed_sequences_equal_torch operations",
    ),
    Fault(
        "steps are at once where the caller differentiates again",
        "recording/uses.py",
        "twice = self.scope.twice or self.scope.create_graph or",
        "twice = self.scope.twice or",
        "operations/test_recurrences.py::test_what_is_closed_over_is_differentiated operations/test_recurrences.py",
    ),
    Fault(
        "first states may be of other samples",
        "operations/recurrences.py",
        "if len(known) < len(others) or not all(",
        "if len(known) < len(others) and not all(",
        "operations/test_recurrences.py::test_states_of_other_samples_are_refused operations/test_recurrences.py",
    ),
    Fault(
        "what a recurrence sends back has no path to its gates",
        "operations/recurrences.py",
        "sent = _Linked.apply(count + 1, *sent, *gates)",
        "sent = sent",
        "operations/test_recurrences.py::test_a_derivative_in_f_is_seen operations/test_recurrences.py",
    ),
    Fault(
        "a transposed convolution does not mirror its kernel",
        "operations/convolutions.py",
        "*sizes, found.shape[-1]).flip(-2))]",
        "*sizes, found.shape[-1]))]",
        "operations/test_rules.py::test_transposed_convolution operations/test_rules.py",
    ),
    Fault(
        "patches of groups are those of one",
        "operations/convolutions.py",
        "if groups != 1 or any(s != 1 for s in stride):",
        "if any(s != 1 for s in stride):",
        "reductions/test_kfac_models.py::TestGroups operations reductions",
    ),
    Fault(
        "a batch norm of one sample keeps torch's wrong derivative",
        "operations/norms.py",
        "return func is F.instance_norm or 1 in (input.shape[0], *input.shape[2:])",
        "return False",
        "operations/test_norms_twice.py::test_what_is_normalised_may_lie_in_memory_in_any_order operations",
    ),
    Fault(
        "a part of a concatenation begins one place late",
        "operations/views.py",
        "start = sum(x.shape[dim] for x in tensors[: at[0]])",
        "start = sum(x.shape[dim] for x in tensors[: at[0] - 1])",
        "evaluation/test_models.py::test_every_path_equals_the_loop operations/test_rules.py",
    ),
    # Samples that change places
    Fault(
        "what one sample was written into is of several",
        "operations/batch_axis/samples.py",
        "if len(set(rows)) > 1 else Axis(None, rows=rows[:1])",
        "",
        "passes/test_written_within.py::test_shares_are_those_of_the_loop passes/test_written_within.py",
    ),
    Fault(
        "rows that changed places are not compared",
        "passes/certified.py",
        "if not trace.displaced or trace.n == 1:",
        "if True:",
        "passes/test_moved.py::TestRowsAreChecked::test_and_followed_where_places_were_wrong passes recording",
    ),
    Fault(
        "all rows are compared with one scale",
        "passes/certified.py",
        "scales = [sign * 2.0**k for k in range(-most, most) for sign in (1, -1)]",
        "scales = [2.0] * (4 * most)",
        "passes/test_moved.py::TestRowsAreChecked::test_and_followed_where_places_were_wrong passes recording",
    ),
    Fault(
        "another order of the rows is no evidence",
        "passes/evidence.py",
        "if a.shape != b.shape or not (_equal(a, b) or _equal(a.index_select(dim, places), b)):",
        "if a.shape != b.shape:",
        "recording/test_samples_lost.py::test_shares_are_those_of_the_loop_or_refused passes recording",
    ),
    Fault(
        "samples alone are not compared with the batch",
        "passes/alone.py",
        "elif not _same_slopes(found, wanted):",
        "elif False:",
        "recording/test_hidden.py::TestRefuses::test_samples_that_are_mixed passes recording",
    ),
    # Products, chunks, sparsity
    Fault(
        "the mean of ragged chunks weighs them alike",
        "chunked.py",
        "[x * (size / total) for x, size in zip(xs, sizes, strict=True)]",
        "[x / len(xs) for x, size in zip(xs, sizes, strict=True)]",
        "test_chunked.py::TestPlainFunctions::test_folds_are_a_prefix_of_the_output test_chunked.py",
    ),
    Fault(
        "an estimate tells the spread in place of the error of its mean",
        "products/estimate.py",
        "safe_root(s / (count * (count - 1)))",
        "safe_root(s / (count - 1))",
        "products/test_estimators.py::TestValues::test_are_the_mean_over_the_vectors_and_its_error "
        "products/test_estimators.py",
    ),
    Fault(
        "the part of a bottleneck is lost",
        "products/curvature.py",
        "found = [a if b is None else b if a is None else a + b",
        "found = [a if b is None else b if a is None else b",
        "products/test_product_splits.py::TestOutputs::test_with_others_on_the_way products evaluation",
    ),
    Fault(
        "columns whose boxes touch share a pass",
        "sparsity/colouring.py",
        "if end < start)",
        "if end <= start)",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "cells that are filled up read their last position again",
        "sparsity/cells.py",
        "        if filled:\n",
        "        if False:\n",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
]
