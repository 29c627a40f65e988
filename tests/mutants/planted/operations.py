"""Faults in the rules of operations."""

from tests.mutants.fault import Fault

FIRST = "testing/test_laws_hold.py statistics/test_first_order.py per_sample/test_clipped_grad.py"

FAULTS = [
    # Sketches
    Fault(
        "a sketch of a convolution forgets its dilation",
        "operations/convolutions.py",
        "None, stride, padding, dilation, groups)",
        "None, stride, padding, 1, groups)",
        "statistics/test_sketched_grad.py::TestFactors",
    ),
    # Per-sample gradients
    Fault(
        "each share of a convolution is that of the first sample",
        "operations/convolutions.py",
        "zip(cotangent[0].split(1), one_by_one(part), strict=True)",
        "zip(cotangent[0].split(1), one_by_one(part)[:1] * len(cotangent[0]), strict=True)",
        "operations/test_weighted_sums.py::test_shares_by_themselves_are_those_of_the_loop " + FIRST,
    ),
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
        "weights of a sum by a convolution's own backward pass are left out",
        "operations/factors/recipe.py",
        "if weights is not None:\n            cotangent",
        "if weights is None:\n            cotangent",
        "operations/test_weighted_sums.py",
    ),
    Fault(
        "uneven padding of a sum by a convolution's own backward pass counts as even",
        "operations/convolutions.py",
        " if all(a == b >= 0 for a, b in pads) else None",
        "",
        "operations/test_weighted_sums.py",
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
    # Sparsity
    Fault(
        "labels outlive their memory",
        "operations/receptive_fields/regions.py",
        "if key in self and self[key].memory is reference:",
        "if False:",
        "sparsity/test_structure_memory.py::test_labels_of_dead_memory_are_dropped sparsity operations/test_labels.py",
    ),
    Fault(
        "labels are the same along a dimension that is not expanded",
        "operations/receptive_fields/regions.py",
        "if dim and size > 1 and stride == 0:",
        "if dim and size > 1:",
        "operations/test_labels.py::test_what_an_entry_depends_on_lies_in_its_box operations/test_labels.py sparsity",
    ),
]
