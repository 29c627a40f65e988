"""Faults in backward passes."""

from tests.mutants.fault import Fault

REPEATED = "sparsity/test_structure_repeated.py"

FAULTS = [
    # Parameters that are repeated for the samples
    Fault(
        "one sample does not know what is repeated for several",
        "passes/by_rows.py",
        "entries=self.entries, repeated=self.repeated)",
        "entries=self.entries)",
        f"{REPEATED}::test_the_structure_is_seen",
    ),
    # Columns that are reduced as they arrive
    Fault(
        "cotangents of all operations are kept until the last one",
        "passes/pullback.py",
        "if not any(use.site == site for uses in waiting.values() for use in uses):",
        "if not sites:",
        "passes/test_streamed.py::test_cotangents_of_few_operations_are_there_at_once",
    ),
    Fault(
        "a parameter is reduced again where a derivative has no rule for batches",
        "passes/pullback.py",
        "folded(i, waiting.pop(i))",
        "folded(i, waiting[i])",
        "passes/test_streamed.py::test_what_has_no_rule_for_batches_is_pulled_back_column_by_column",
    ),
    Fault(
        "an error of what reduces a parameter is taken for that of a derivative without a rule",
        "passes/pullback.py",
        "if broken or isinstance",
        "if isinstance",
        "passes/test_streamed.py::test_errors_of_what_reduces_them_are_raised",
    ),
    # Samples that change places
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
]
