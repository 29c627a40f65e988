"""The planted faults of `python -m tests.mutants` are changes to what stands today."""

import ast
import re

import pytest

from tests.mutants.fault import ROOT
from tests.mutants.planted import FAULTS

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_can_be_planted(fault):
    """Its text stands once in the file, what comes of it is Python, and its tests are there."""
    ast.parse(fault.planted((ROOT / "invfunc" / fault.file).read_text()))
    for word in fault.tests.split():
        path, *names = word.partition("[")[0].split("::")
        where = ROOT / "tests" / path
        assert where.exists() if not names else re.search(rf"(def|class) {names[-1]}\b", where.read_text())


def test_have_names_of_their_own():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS)
