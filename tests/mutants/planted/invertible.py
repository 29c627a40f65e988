"""Faults in blocks and chains."""

from tests.mutants.fault import Fault

FAULTS = [
    # Pairs and layers
    Fault(
        "an equilibrium is where both copies agree",
        "invertible/equilibrium.py",
        "moved = (after - y) / self.beta, (last - z) / self.beta, after - last",
        "moved = (after - last,)",
        "invertible/test_equilibrium.py::TestValue invertible/test_equilibrium.py",
    ),
    Fault(
        "an equilibrium is where nothing moves",
        "invertible/equilibrium.py",
        "moved = (after - y) / self.beta, (last - z) / self.beta, after - last",
        "moved = (after - y) / self.beta, (last - z) / self.beta",
        "invertible/test_equilibrium.py::TestValue invertible/test_equilibrium.py",
    ),
    Fault(
        "the copies of an equilibrium stay in the dtype of x",
        "invertible/equilibrium.py",
        'in_float64(t, "an equilibrium keeps two copies of its state")',
        "t",
        "invertible/test_equilibrium.py::TestGradient invertible/test_equilibrium.py",
    ),
    Fault(
        "the halves that left come back in the wrong order",
        "invertible/chain.py",
        "torch.cat([first, second], self.dim)",
        "torch.cat([second, first], self.dim)",
        "invertible/test_multiscale.py",
    ),
]
