"""Faults in budgets and chunks."""

from tests.mutants.fault import Fault

FAULTS = [
    Fault(
        "a chunk that does not fit is taken",
        "budgeted.py",
        "            if self._peak(tried) <= self.room:",
        "            if True:",
        "budget/test_budget.py::TestSearch budget/test_budget.py",
    ),
    Fault(
        "results of the samples behind the measured ones do not count",
        "budgeted.py",
        "self._measured(size, few) + 2 * self.growth * (n - few)",
        "self._measured(size, few)",
        "budget/test_budget.py::TestSearch budget/test_budget.py",
    ),
    Fault(
        "a choice is kept for batches of any size",
        "budgeted.py",
        "if known is None or call.n > known.most or known.need > budget:",
        "if known is None or known.need > budget:",
        "test_chunked_memory.py::TestChoices test_chunked_memory.py",
    ),
    Fault(
        "a choice is kept for a smaller budget",
        "budgeted.py",
        "if known is None or call.n > known.most or known.need > budget:",
        "if known is None or call.n > known.most:",
        "test_chunked_memory.py::TestChoices test_chunked_memory.py",
    ),
    Fault(
        "a choice is kept whatever is differentiated",
        "budgeted.py",
        "x.layout, x.requires_grad",
        "x.layout",
        "test_chunked_memory.py::TestChoices test_chunked_memory.py",
    ),
    Fault(
        "random numbers that are drawn while a call is measured do not come again",
        "budgeted.py",
        "            set_states(before)",
        "            pass",
        "test_chunked_memory.py::TestResults test_chunked_memory.py",
    ),
    Fault(
        "what was freed counts as alive",
        "budget/peak.py",
        "        self.now -= size",
        "        pass",
        "budget/test_budget.py::TestPeak budget/test_budget.py",
    ),
]
