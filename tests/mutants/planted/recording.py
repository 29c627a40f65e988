"""Faults in what a run is seen to do."""

from tests.mutants.fault import Fault

REPEATED = "sparsity/test_structure_repeated.py"

FAULTS = [
    # Parameters that are repeated for the samples
    Fault(
        "what is repeated along tokens, too, counts as read once",
        "recording/uses.py",
        "        if stride <= reached:\n            return False",
        "        if stride < 0:\n            return False",
        REPEATED,
    ),
    Fault(
        "each sample has the repeated parameters of all",
        "recording/uses.py",
        "axis.regular and x.stride(axis.dim) == 0",
        "axis.regular and x.stride(axis.dim) < 0",
        f"{REPEATED}::test_no_sample_has_the_tokens_of_all",
    ),
    # Operations
    Fault(
        "steps are at once where the caller differentiates again",
        "recording/uses.py",
        "twice = self.scope.twice or self.scope.create_graph or",
        "twice = self.scope.twice or",
        "operations/test_recurrences.py::test_what_is_closed_over_is_differentiated operations/test_recurrences.py",
    ),
    # Arguments and results
    Fault(
        "shares that no parameter has are zeros",
        "recording/trace.py",
        "if not any(reaches(z, beneath, {}) for z in outputs):",
        "if not outputs:",
        "statistics/test_unreached.py::test_statistics",
    ),
    Fault(
        "a part of the batch is of its first axis",
        "recording/problem.py",
        "x[(slice(None),) * (dim % x.ndim) + (part,)]",
        "x[part]",
        "test_chunked.py::TestStatistics::test_options_stay_with_the_statistic test_chunked.py statistics evaluation",
    ),
    Fault(
        "a mean that leaves samples out is taken for that of all",
        "recording/trace.py",
        "        self.counted |= self.scaled and (result.found is BATCH_SUM or self.n == 1) and counts(call)\n",
        "",
        "test_chunked.py::TestChunksAlone::test_data_that_weigh_samples_are_seen_in_each_call test_chunked.py",
    ),
    Fault(
        "a negative sample counts from one place behind the last",
        "recording/problem.py",
        "return [i % n for i in places]",
        "return [i % (n + 1) for i in places]",
        "per_sample/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "per_sample/test_samples.py",
    ),
    Fault(
        "a mode that f leaves behind is the caller's",
        "recording/scope.py",
        "        self._stack.enter_context(torch.enable_grad())",
        "        torch.set_grad_enabled(True)",
        "evaluation/test_effects.py::TestLeavesAsTheyWere",
    ),
    Fault(
        "what an outer transform differentiates is detached",
        "recording/scope.py",
        "return x if self.wanted else x.detach()",
        "return x.detach()",
        "evaluation/test_differentiable.py::TestRandomNumbers::test_are_those_of_one_call "
        "evaluation testing/test_laws_hold.py",
    ),
    Fault(
        "a constant that requires grad does not make the result require it",
        "recording/scope.py",
        "            self.wanted = True\n",
        "            pass\n",
        "evaluation/test_composition.py::TestWhatIsDifferentiated::test_closed_over_module_parameters "
        "evaluation testing/test_laws_hold.py",
    ),
    Fault(
        "what is missing in one column is taken for another's",
        "recording/scope.py",
        "return [None if none else next(found) for none in missing]",
        "return [*found, *[None] * sum(missing)]",
        "evaluation/test_composition.py::test_layers_that_the_outputs_do_not_read "
        "evaluation/test_composition.py evaluation",
    ),
]
