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
        "recomputation/test_grad_mode.py::test_the_backward_pass_may_be_in_inference_mode",
    ),
]
