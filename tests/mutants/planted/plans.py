"""Faults in what a plan relies on."""

from tests.mutants.fault import Fault

COMPILED, READS, BATCHES = "plans/test_compiled.py", "plans/test_reads.py", "plans/test_batches.py"
PADDED, WITHIN = "plans/test_padded.py", "plans/test_within.py"

FAULTS = [
    Fault(
        "the numbers that a plan has read are not compared",
        "plans/plan.py",
        "if read and self._numbers(read) != self.expected:",
        "if False:",
        f"{READS}::test_numbers_that_are_read_are_never_those_of_another_call",
    ),
    Fault(
        "numbers of a list are not seen to be read",
        "plans/recorder.py",
        '    "tolist": slice(1),\n',
        "",
        f"{READS}::test_numbers_that_are_read_are_never_those_of_another_call",
    ),
    Fault(
        "what is written in place is a constant of a plan",
        "plans/recorder.py",
        "if used and not self._written.get(memory) and",
        "if used and",
        f"{READS}::TestResults {READS}",
    ),
    Fault(
        "checks without a result are left out of a plan",
        "plans/recorder.py",
        "target._schema.is_mutable or not target._schema.returns or",
        "target._schema.is_mutable or",
        "plans/test_modes.py::TestErrors plans/test_modes.py",
    ),
    Fault(
        "arguments that are closed over, too, are those of the first call",
        "plans/calls.py",
        "own = {id(x): x.detach() for x in call.tensors}",
        "own = {id(x): x for x in call.tensors}",
        f"{READS}::test_arguments_that_are_closed_over_too_are_told_apart",
    ),
    Fault(
        "which arguments share memory does not matter",
        "plans/calls.py",
        "_shared(tensors), tuple(map(_token, others))",
        "None, tuple(map(_token, others))",
        f"{READS}::TestArguments {READS}",
    ),
    Fault(
        "a tensor that is closed over may begin to want gradients",
        "plans/plan.py",
        "or signature(x) != own:",
        "or x.dtype != own[1]:",
        "plans/test_modes.py::TestModes plans/test_modes.py",
    ),
    Fault(
        "modes of modules are those of the first call",
        "plans/plan.py",
        "if [m.training for m in self.modules] != self.training:",
        "if False:",
        f"{READS}::test_tensors_and_modules_that_are_closed_over_are_those_of_now",
    ),
    Fault(
        "generators are not put back where f has done so",
        "plans/recorder.py",
        "if now == self.now:",
        "if now in self.states:",
        f"{READS}::TestRandomNumbers {READS}",
    ),
    Fault(
        "a call that is not as the plan has it draws twice",
        "plans/plan.py",
        "            set_states(before)\n",
        "            pass\n",
        f"{READS}::TestRandomNumbers {READS}",
    ),
    Fault(
        "each batch draws as the first one by a plan",
        "plans/batches.py",
        "tuple(d.source(n)) for d in",
        "tuple(replace(d, first=0).source(n)) for d in",
        f"{BATCHES}::TestWays {BATCHES}",
    ),
    Fault(
        "a batch by a plan does not know the phase before",
        "plans/batches.py",
        "                    part.know(own)\n",
        "                    pass\n",
        f"{BATCHES}::TestWays {BATCHES}",
    ),
    Fault(
        "padded samples have gradients",
        "plans/padded.py",
        "return found * mask.to(found.dtype)",
        "return found",
        f"{PADDED}::test_statistics_are_those_of_the_batch",
    ),
    Fault(
        "a mean over the samples counts the padded ones",
        "plans/padded.py",
        "scale = 1.0 if n == size else",
        "scale = 1.0 if True else",
        f"{PADDED}::test_statistics_are_those_of_the_batch",
    ),
    Fault(
        "padded samples are in the spread of the gradients",
        "plans/padded.py",
        "torch.addcmul(v * scale, s, s * share)",
        "(v * scale)",
        f"{PADDED}::test_statistics_are_those_of_the_batch",
    ),
    Fault(
        "a graph of torch.compile has a plan for another shape of the result",
        "plans/within.py",
        "if _sizes(found) != _RESULTS[place][1]:",
        "if False:",
        WITHIN,
    ),
    Fault(
        "a program asserts nothing of the numbers that it reads",
        "plans/within.py",
        'known = self.get_buffer(f"read_{i}")',
        "known = x",
        WITHIN,
    ),
]
