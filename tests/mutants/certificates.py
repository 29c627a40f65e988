"""Which planted faults `certified` finds on drawn problems alone, with no other test."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.mutants.fault import Fault, Say

NUMERIC = ("contract.py", "evaluation", "loss", "operations", "passes", "per_sample", "plan.py", "products")
NUMERIC += ("recording/problem.py", "reductions", "sparsity")
"""Where numbers of statistics are computed."""
WITHOUT = ("passes/kfra.py", "products/estimate", "products/linear_operator.py", "products/positive.py")
WITHOUT += ("reductions/eigenbasis.py", "reductions/kronecker_factors.py", "reductions/nearest.py")
"""What is in there, but of no result that `certified` takes: K-factors, estimates, products that are made positive."""
OF_FACTORS = {
    "half of a symmetric product is not mirrored",
    "long sums of products are doubled",
    "products as the gradient of a convolution are doubled",
    "a joint bias counts at samples that are missing",
    "patches of groups are those of one",
}
"""Faults in files of other results too, but on the way of K-factors alone."""
EXAMPLES, SECONDS = 4000, 120
"""Functions that a fault is looked for on, at most, and the time of the processor for that."""
SOUND = Fault("no fault at all", "contract.py", "def contract(", "def contract(", "")
"""What is not to be found: where it is, the drawn functions give false alarms, and no count says anything."""


def numeric(fault: Fault) -> bool:
    """Whether a fault is in the numeric path, of results that `certified` takes."""
    other = fault.file.startswith(WITHOUT) or fault.name in OF_FACTORS
    return fault.file.startswith(NUMERIC) and not other


def search(fault: Fault, say: Say) -> tuple[str, str]:
    """Certify statistics of drawn functions until one is wrong."""
    from invfunc.errors import CertificateError
    from tests.mutants.drawn import certificates

    until, tried = time.process_time() + SECONDS, 0

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(st.data())
    def look(data: Any) -> None:
        nonlocal tried
        call, called = certificates(data)
        if time.process_time() > until:
            raise TimeoutError
        tried += 1
        say(called)
        _certify(call)

    try:
        look()
    except CertificateError as error:
        return "found", str(error)[:100]
    except TimeoutError:
        pass
    return "survived", f"{tried} problems"


def _certify(call: Callable[[], Any]) -> None:
    """What fails otherwise is told to the user as it is, but not by a certificate."""
    from invfunc.errors import CertificateError

    try:
        call()
    except CertificateError:
        raise
    except Exception:
        return
