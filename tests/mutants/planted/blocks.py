"""Faults in the engine of invertible blocks."""

from tests.mutants.fault import Fault

AGAIN = "blocks invertible"
WRITTEN = "blocks/test_written_since.py"
STATE = "blocks/test_state.py"
PROBE = "blocks/test_probe.py"
HELD = "invertible/test_held.py"

FAULTS = [
    # What was written since
    Fault(
        "a closed-over tensor that was written is taken as it was",
        "blocks/surroundings.py",
        "if now != then and id(t) not in own:",
        "if False:",
        f"blocks/test_modules.py {WRITTEN}",
    ),
    Fault(
        "an argument that was written is taken as it was",
        "blocks/link.py",
        "if functorch.versions(self._tensors) != self._versions:",
        "if False:",
        f"{WRITTEN} {AGAIN}",
    ),
    Fault(
        "an output that was written is taken as it was",
        "blocks/link.py",
        "if version(value) != self.version:",
        "if False:",
        f"{WRITTEN} {AGAIN}",
    ),
    # What is replayed
    Fault(
        "other random numbers are drawn where f runs once more",
        "blocks/surroundings.py",
        "        set_states(zip(generators, states, strict=True))\n",
        "        pass\n",
        "blocks/test_replay.py::TestRandomNumbers::test_are_drawn_once " + AGAIN,
    ),
    Fault(
        "generators go on from what was drawn again",
        "blocks/surroundings.py",
        "        set_states(zip(generators, before, strict=True))\n",
        "        pass\n",
        "blocks/test_replay.py::TestRandomNumbers::test_are_drawn_once " + AGAIN,
    ),
    Fault(
        "generators that f closes over are not replayed",
        "blocks/surroundings.py",
        "found += each.generators\n",
        "pass\n",
        "blocks/test_replay.py::TestGenerators",
    ),
    Fault(
        "buffers are written once more",
        "blocks/surroundings.py",
        "                module._buffers.update(self.closed.written_by(module))\n",
        "                pass\n",
        f"blocks/test_modules.py {STATE}",
    ),
    Fault(
        "buffers are those of the backward pass",
        "blocks/surroundings.py",
        "[copies[at].clone() for _, _, _, copies, _ in self.buffers]",
        "[b.clone() for _, _, b, _, _ in self.buffers]",
        f"{STATE} {AGAIN}",
    ),
    Fault(
        "training flags are those of the backward pass",
        "blocks/surroundings.py",
        "if module.training != then:",
        "if False:",
        f"blocks/test_modules.py {STATE}",
    ),
    Fault(
        "autocast is that of the backward pass",
        "blocks/surroundings.py",
        "for kind, on, dtype in self.casts or _casts():",
        "for kind, on, dtype in ():",
        "invertible/test_checkpoint.py::TestTraining blocks/test_precision.py",
    ),
    Fault(
        "submodules that were replaced are not found",
        "blocks/surroundings.py",
        "return replaced or any(",
        "return any(",
        "blocks/test_modules.py::test_submodules_that_are_replaced_are_those_of_the_next_call",
    ),
    # What is compared
    Fault(
        "tensors that autograd saves may be others in the second evaluation",
        "blocks/run.py",
        "if (like := [*map(_LIKE, found)]) != wanted:",
        "if len(like := [*map(_LIKE, found)]) != len(wanted):",
        "invertible/test_errors.py::TestChanges " + AGAIN,
    ),
    Fault(
        "fewer tensors may be saved in the second evaluation",
        "blocks/run.py",
        "if (like := [*map(_LIKE, found)]) != wanted:",
        "if (like := [*map(_LIKE, found)]) != wanted[: len(like)]:",
        "invertible/test_errors.py::TestChanges " + AGAIN,
    ),
    Fault(
        "entries of x are not compared",
        "blocks/looks.py",
        "off = (now.entries - self.entries).abs()",
        "off = (self.entries - self.entries).abs()",
        f"{PROBE} {AGAIN}",
    ),
    Fault(
        "sums of x are not compared",
        "blocks/looks.py",
        "((now.total - self.total).abs() / count**0.5)",
        "((self.total - self.total).abs() / count**0.5)",
        f"{PROBE}::TestWrongEntries",
    ),
    Fault(
        "x is laid out in memory as the inverse gives it",
        "blocks/link.py",
        "if self.stride is None or came.stride() == self.stride or",
        "if True or",
        "blocks/test_programs.py::test_tensors_lie_in_memory_as_they_did",
    ),
    # What is in memory
    Fault(
        "what keep= names is computed by the inverse",
        "blocks/link.py",
        "            if i in self.kept:\n",
        "            if False:\n",
        "blocks/test_tensors.py invertible/test_errors.py",
    ),
    Fault(
        "parameters are not gathered for a block without a part in the loss",
        "blocks/link.py",
        "with gathered_again(group):",
        "with gathered_again(()):",
        "test_sharded_modules.py::TestInvertibleBlocks",
    ),
    Fault(
        "what a function of autograd gives is taken for the state that it was given",
        "blocks/link.py",
        "(handed and not slot.of_memory(tensor))",
        "False",
        "invertible/test_handed_on.py " + AGAIN,
    ),
    Fault(
        "what anchors keep is told as held by somebody",
        "blocks/run.py",
        "            note_kept(xs, link.kept)\n",
        "            pass\n",
        HELD,
    ),
    Fault(
        "a block keeps what it can give back",
        "blocks/link.py",
        "                slot.drop()\n\n    def output",
        "\n    def output",
        "invertible/test_memory.py",
    ),
    Fault(
        "what is in the memory of the first x is told as held by somebody",
        "blocks/held.py",
        "if first[at].block is not None and",
        "if",
        "invertible/test_held.py",
    ),
]
