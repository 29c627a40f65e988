"""Faults in blocks and chains."""

from tests.mutants.fault import Fault

SPAN = "invertible/test_span.py"

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
        "invertible/multiscale.py",
        "torch.cat([first, second], self.dim)",
        "torch.cat([second, first], self.dim)",
        "invertible/test_multiscale.py",
    ),
    # Training run backwards
    Fault(
        "a state that has not come back to the last bit before many steps is taken",
        "invertible/span.py",
        "largest(self._probe.errors(xs)) != 0",
        "largest(self._probe.errors(xs)) < 0",
        f"{SPAN}::TestErrors::test_of_what_was_replaced_or_written_since {SPAN}",
    ),
    Fault(
        "one node does steps that draw random numbers",
        "invertible/span.py",
        "if self._start.later() is not self._start:",
        "if False:",
        f"{SPAN}::TestABlockAStep::test_of_random_numbers {SPAN}",
    ),
    Fault(
        "one node does steps that close over what needs a gradient",
        "invertible/span.py",
        "if any(t.requires_grad for t in tree.tensors(found)):",
        "if False:",
        f"{SPAN}::TestABlockAStep::test_of_a_tensor_that_needs_a_gradient_and_is_closed_over {SPAN}",
    ),
    Fault(
        "a second derivative of many steps goes on behind them as well",
        "invertible/span.py",
        "([t.view_as(t) for t in ts] for ts in (ghosts, rest))",
        "(list(ts) for ts in (ghosts, rest))",
        f"{SPAN}::TestOneNode::test_gives_second_derivatives {SPAN}",
    ),
    # Calls that are not watched
    Fault(
        "a step back does not look at what it reads from outside",
        "invertible/span.py",
        "        if not all_among(outside.seen(tree.tensors(own)), self._seen[k]):\n",
        "        if False:\n",
        SPAN,
    ),
]
