"""Faults in what is computed again in calls that are not watched."""

from tests.mutants.fault import Fault

AGAIN = "recomputation invertible"
REFUSALS = "recomputation/test_straight_refusals.py"
STRAIGHT = "recomputation/test_straight_modules.py"
LATER = "recomputation/test_straight_later.py"
SERIES = "recomputation/test_series.py"

FAULTS = [
    # What may not be taken for known
    Fault(
        "a transform that has ended is taken for the one around",
        "recomputation/straight_nodes.py",
        "if has_ended(ctx.saved_tensors[0]):",
        "if False:",
        REFUSALS,
    ),
    Fault(
        "what is no tensor in y is that of another call",
        "recomputation/straight_learning.py",
        "if len(y.places) < len(y.others):",
        "if False:",
        REFUSALS,
    ),
    # Calls that are not watched
    Fault(
        "what was computed again for an unwatched call keeps itself alive",
        "recomputation/straight_hooks.py",
        "            saved.clear()  # the graph holds its hooks, and would hold itself by them\n",
        "            pass\n",
        "recomputation/test_straight_later.py::TestBlocks::test_let_go_of_what_was_computed_again " + AGAIN,
    ),
    Fault(
        "arguments that are no tensors are not compared",
        "recomputation/straight.py",
        "            if not all(leaves[i] is other or _equal(leaves[i], other) for i, other in self._others):\n",
        "            if False:\n",
        f"{LATER}::TestLater::test_an_argument_that_is_no_tensor {LATER}",
    ),
    Fault(
        "an inverse that was not looked at is not watched",
        "recomputation/straight.py",
        "return self.look.seen and self.look.harmless",
        "return True",
        "recomputation/test_straight.py::test_an_inverse_that_draws_is_always_watched recomputation/test_straight.py",
    ),
    Fault(
        "a further argument that was written is not told where a call is not watched",
        "recomputation/straight_hooks.py",
        "        if versions(self._rest) != self._versions:\n",
        "        if False:\n",
        f"{LATER}::TestLater::test_an_argument_that_is_written {LATER}",
    ),
    Fault(
        "an x that does not come back is not told where a call is not watched",
        "recomputation/straight_hooks.py",
        "                tell = self.give_back(xs)\n",
        "                self.give_back(xs)\n",
        "recomputation/test_straight_later.py::TestLater::test_an_inverse_that_is_none_for_large_numbers " + AGAIN,
    ),
    Fault(
        "a step at a level of torch.func is that of any level",
        "recomputation/straight_nodes.py",
        "        return plain if len(plain) == len(tensors) and only_level() == self.level else None\n",
        "        return plain if len(plain) == len(tensors) else None\n",
        "recomputation/test_straight.py::TestGradients::test_of_transforms recomputation/test_straight.py",
    ),
    Fault(
        "closed-over tensors may have other forms",
        "recomputation/straight.py",
        "return same and look_like(closed, self.closed, names)",
        "return same",
        f"{STRAIGHT}::test_a_form_that_decides_whether_it_draws",
    ),
    Fault(
        "a node is not watched whose functions close over tensors",
        "recomputation/straight.py",
        "        if node and self._purity.has_tensors:  # which a node is given as arguments\n",
        "        if False:\n",
        f"{STRAIGHT}::TestAlwaysWatched {STRAIGHT}",
    ),
    # Calls one after the other
    Fault(
        "what a series gives out is not held",
        "recomputation/straight_hooks.py",
        "held=True",
        "held=False",
        f"{SERIES} {AGAIN}",
    ),
    Fault(
        "what a block reads is taken for what the next one reads",
        "recomputation/straight_found.py",
        "        if not same or self._report.block.pair is not block.pair:\n",
        "        if self._known is None:\n",
        SERIES,
    ),
    Fault(
        "an error of a later block of a series is nobody's",
        "recomputation/straight_calls.py",
        "    except Exception:\n        return False\n",
        "    except Exception:\n        raise\n",
        f"{SERIES}::TestWrong {SERIES}",
    ),
    Fault(
        "calls of a form whose first one is never inverted are watched for ever",
        "recomputation/straight_learning.py",
        "        call.look = None if alike.look.seen else alike.look",
        "        call.look = None",
        f"{SERIES}::test_is_known_where_the_first_x_is_held {SERIES}",
    ),
]
