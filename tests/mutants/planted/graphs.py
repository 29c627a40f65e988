"""Faults in the node that a chain is in a graph of torch.compile."""

from tests.mutants.fault import Fault

WITHIN = "invertible/test_within_compile.py"

FAULTS = [
    Fault(
        "blocks that draw random numbers are evaluated again",
        "invertible/within.py",
        "if draws(func, args, kwargs):",
        "if False:",
        f"{WITHIN}::TestWhatCannotBeEvaluatedAgain {WITHIN}",
    ),
    Fault(
        "attention never draws in blocks and plans",
        "plans/operators.py",
        "kwargs.get(_DROPOUT, 0.0)) != 0",
        "kwargs.get(_DROPOUT, 0.0)) is None",
        "plans/test_modes.py",
    ),
    Fault(
        "blocks that write into what they close over are evaluated again",
        "invertible/within.py",
        "elif any(storage_of(x) in self._given",
        "elif all(storage_of(x) in self._given",
        f"{WITHIN}::TestWhatCannotBeEvaluatedAgain {WITHIN}",
    ),
    Fault(
        "what a block keeps of x is taken for what the block before it keeps",
        "invertible/within.py",
        "kept = {i: self.kept.pop() for i in sorted(block.kept, reverse=True)}",
        "kept = {i: self.kept.pop(0) for i in sorted(block.kept)}",
        f"{WITHIN}::TestIsWhatItIsOutside {WITHIN}",
    ),
    Fault(
        "the gradient of what several blocks read is that of one",
        "invertible/within.py",
        "found[node] = found[node] + slope if node in found else slope",
        "found[node] = slope",
        f"{WITHIN}::TestIsWhatItIsOutside {WITHIN}",
    ),
    Fault(
        "autocast is left behind where blocks are evaluated again",
        "invertible/within.py",
        "if enabled != torch.is_autocast_enabled(kind):",
        "if False:",
        f"{WITHIN}::TestIsWhatItIsOutside {WITHIN}",
    ),
    Fault(
        "an x that does not come back is not told of",
        "invertible/within.py",
        '        tell(block, float(error), precision, "x", torch.get_default_dtype())',
        "        pass",
        f"{WITHIN}::TestInverses {WITHIN}",
    ),
    Fault(
        "a chain within a graph keeps x of each block",
        "invertible/within.py",
        "if g.keep is True or found or not g.has_inverse",
        "if True",
        f"{WITHIN}::TestSavesMemory {WITHIN}",
    ),
]
