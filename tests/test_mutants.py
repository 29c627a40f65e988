"""The planted faults of `python -m tests.mutants` are changes to what stands today."""

import ast
import re

import pytest

from tests.mutants.fault import ROOT
from tests.mutants.planted import FAULTS, THROUGH, by_file

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


def test_stand_in_the_file_of_their_folder():
    for name, faults in by_file().items():
        if name not in THROUGH:
            wrong = {fault.name: fault.file for fault in faults if file_of(fault) != name}
            assert not wrong, name


def file_of(fault):
    """The name of the file that a fault belongs in."""
    if fault.file in ("budgeted.py", "_alike.py"):
        return "budget"
    return fault.package if "/" in fault.file else "at_the_top"
