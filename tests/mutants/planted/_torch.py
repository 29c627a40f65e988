"""Faults in what is private in torch."""

from tests.mutants.fault import Fault

FAULTS = [
    # What crosses a threshold of size
    Fault(
        "checks at the end are forgotten",
        "_torch/values.py",
        "        _CHECKS.reset(token)\n    _look(checks)",
        "        _CHECKS.reset(token)",
        "statistics/test_diag_ggn.py::TestRefusals _torch",
    ),
    # Inside of torch.func, and of other modes
    Fault(
        "what is computed again is that of inference mode",
        "_torch/functorch.py",
        " or transforming() or torch.is_inference_mode_enabled()",
        " or transforming()",
        "blocks/test_grad_mode.py::test_the_backward_pass_may_be_in_inference_mode",
    ),
    Fault(
        "torch.func refuses the hooks of blocks",
        "_torch/functorch.py",
        "        _autograd._saved_tensors_hooks_enable()\n",
        "        pass\n",
        "blocks/test_chains.py invertible/test_memory.py invertible/test_composition.py",
    ),
    Fault(
        "a level of torch.func that has ended is taken for one that runs",
        "_torch/functorch.py",
        "return self._mark is not None and not _C.is_dead_tensor_wrapper(self._mark)",
        "return self._mark is not None",
        "blocks/test_replay.py::TestTransformsOfTheGradient blocks invertible",
    ),
    Fault(
        "hooks of blocks are compiled with their parts",
        "_torch/functorch.py",
        "    _eval_frame.set_code_exec_strategy(fn.__code__, skip)\n",
        "",
        "invertible/test_compiled.py::test_hooks_of_blocks_are_not_compiled_with_their_parts",
    ),
]
