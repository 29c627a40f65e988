"""Faults in modules as functions."""

from tests.mutants.fault import Fault

FUNCTIONAL = "functional"

FAULTS = [
    Fault(
        "a tied parameter is replaced in its first place alone",
        "functional/functional.py",
        "return {**given, **{place: given[first] for place, first in self._places.items() if first in given}}",
        "return given",
        "functional/test_functional_strays.py::TestTiedParameters " + FUNCTIONAL,
    ),
    Fault(
        "buffers of the module are written",
        "functional/functional.py",
        "replaced = {id(b): b.clone() for",
        "replaced = {id(b): b for",
        "functional/test_functional.py::TestIsTheModuleAtOtherParameters::test_gradient " + FUNCTIONAL,
    ),
    Fault(
        "layers that the first call puts into a list stay copies",
        "functional/functional.py",
        "        put_back(module_copy, repr(self))\n",
        "",
        "functional/test_functional_filled.py::test_each_call_has_its_own_parameters " + FUNCTIONAL,
    ),
    Fault(
        "what was computed from parameters is read by the next call",
        "functional/functional.py",
        "kept=kept(parts, self._computed.get(mode))",
        "kept=kept(parts, None)",
        "functional/test_functional_cached.py::TestWhatIsKeptByHand::test_by_a_call_of_f "
        + FUNCTIONAL
        + " functional/test_functional_cached.py",
    ),
]
