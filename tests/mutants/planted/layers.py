"""Faults in layers of flows."""

from tests.mutants.fault import Fault

LAYERS = "layers"

FAULTS = [
    Fault(
        "the log-determinant of a normalisation leaves its weight out",
        "layers/channels.py",
        "(logs if weight is None else logs + weight.abs().log())",
        "logs",
        "layers/test_invertible_layers.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + LAYERS,
    ),
    Fault(
        "going back through a normalisation takes the root of the variance alone",
        "layers/channels.py",
        "return (x * (var + eps).sqrt() + mean).to(y.dtype)",
        "return (x * var.sqrt() + mean).to(y.dtype)",
        "layers/test_invertible_layers.py::TestInverse::test_restores_x " + LAYERS,
    ),
    Fault(
        "an actnorm starts from the variance in place of its root",
        "layers/channels.py",
        "-(var + self.eps).log() / 2",
        "-(var + self.eps).log()",
        "layers/test_invertible_layers_details.py::TestStart " + LAYERS,
    ),
    Fault(
        "the log-determinant of a leaky ReLU counts zeros as above",
        "layers/channels.py",
        "wide(x).le(0)",
        "wide(x).lt(0)",
        "layers/test_invertible_layers_details.py::TestAgreement::test_those_without_parameters " + LAYERS,
    ),
    Fault(
        "a wavelet swaps two of its channels",
        "layers/shapes.py",
        "p, q, r, s = a + b, c + d,",
        "p, q, r, s = c + d, a + b,",
        "layers/test_invertible_layers_details.py::TestAgreement::test_haar " + LAYERS,
    ),
    Fault(
        "patches count twice in a log-determinant",
        "layers/linear.py",
        "patches * log_abs_det(weight.flatten(1))",
        "2 * patches * log_abs_det(weight.flatten(1))",
        "layers/test_invertible_layers.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + LAYERS,
    ),
    Fault(
        "a rotation is a reflection",
        "layers/common.py",
        "return -torch.linalg.householder_product(",
        "return torch.linalg.householder_product(",
        "layers/test_invertible_layers_details.py::TestRotation::test_is_the_product_of_the_reflections " + LAYERS,
    ),
    Fault(
        "a log-determinant of half precision stays there",
        "layers/common.py",
        "dtype=torch.promote_types(first.dtype, torch.float32))",
        "dtype=first.dtype)",
        "layers/test_invertible_layers_details.py::TestHalfPrecision::test_log_determinants_are_float32 " + LAYERS,
    ),
    Fault(
        "autocast rounds what a layer computes",
        "layers/common.py",
        "with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():",
        "with nullcontext():",
        "blocks/test_precision.py::TestUnderAutocast::test_layers_compute_in_full_precision " + LAYERS,
    ),
]
