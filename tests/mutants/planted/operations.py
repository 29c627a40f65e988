"""Faults in the rules of operations."""

from tests.mutants.fault import Fault

FAULTS = [
    # Sketches
    # Per-sample gradients
    # Operations
    Fault(
        "a mean of bags counts their padding",
        "operations/lookup.py",
        "total / padding.logical_not().sum(1).clamp(min=1)",
        "total / padding.shape[1]",
        "operations/test_rules.py::test_every_path_equals_the_loop_layers[EmbeddingBag] operations",
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
        "what a recurrence sends back has no path to its gates",
        "operations/recurrences.py",
        "sent = _Linked.apply(count + 1, *sent, *gates)",
        "sent = sent",
        "operations/test_recurrences.py::test_a_derivative_in_f_is_seen operations/test_recurrences.py",
    ),
    Fault(
        "a batch norm of one sample keeps torch's wrong derivative",
        "operations/norms.py",
        "return func is F.instance_norm or 1 in (input.shape[0], *input.shape[2:])",
        "return False",
        "operations/test_twice_differentiable.py::test_what_is_normalised_may_lie_in_memory_in_any_order operations",
    ),
    # Samples that change places
    # Sparsity
]
