"""Faults in modules as functions."""

from tests.mutants.fault import Fault

FUNCTIONAL = "functional"

FAULTS = [
    Fault(
        "a tied parameter is replaced in its first place alone",
        "functional/functional.py",
        "for n in places[i].values() if value",
        "for n in [*places[i].values()][:1] if value",
        "functional/test_functional.py::TestTiedParameters " + FUNCTIONAL,
    ),
    Fault(
        "a module that is there twice has its tensors put back twice",
        "functional/functional.py",
        ".setdefault((id(module), last), name)",
        ".setdefault(name, name)",
        "functional/test_functional.py::TestTiedParameters " + FUNCTIONAL,
    ),
    Fault(
        "buffers of the module are written",
        "functional/functional.py",
        "values[id(x)] = x.clone()",
        "values[id(x)] = x",
        "functional/test_functional.py::TestIsTheModuleAtOtherParameters::test_the_module_is_as_before " + FUNCTIONAL,
    ),
    Fault(
        "checkpointed parts are evaluated again with the module's own parameters",
        "functional/functional.py",
        "if _checkpoints() > self.around:",
        "if False:",
        "functional/test_functional.py::TestCheckpointedParts " + FUNCTIONAL,
    ),
    Fault(
        "what was computed from parameters is read by the next call",
        "functional/functional.py",
        "if n not in _cached(type(module))",
        "if True",
        "functional/test_functional_cached.py " + FUNCTIONAL,
    ),
    Fault(
        "threads see each other's parameters",
        "functional/functional.py",
        "with _SWAPPING, parametrized_anew():",
        "with parametrized_anew():",
        "functional/test_functional_threads.py " + FUNCTIONAL,
    ),
]
