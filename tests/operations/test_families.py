"""What is known of an operation stands in one file."""

import runpy
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest

from invfunc import operations
from invfunc.operations import FAMILIES, operation
from invfunc.operations.operation import define, having

HOME = Path(operations.__file__).parent


@pytest.mark.quick
def test_each_operation_is_known_in_one_family():
    told = defaultdict(set)

    def noted(names, **facts):
        for name in names.split() if isinstance(names, str) else names:
            told[name].add(family.__name__)

    with mock.patch.object(operation, "define", noted), mock.patch.object(operation, "define_tagged"):
        for family in FAMILIES:
            runpy.run_path(family.__file__)
    assert {name: where for name, where in told.items() if len(where) > 1} == {}
    assert told.keys() == operation.OPERATIONS.keys()


@pytest.mark.quick
def test_every_file_of_a_family_is_read():
    files = {file.stem for file in HOME.glob("*.py") if "import define" in file.read_text()}
    assert {family.__name__.split(".")[-1] for family in FAMILIES} == files


@pytest.mark.quick
def test_a_fact_is_stated_once():
    with pytest.raises(ValueError, match="`embedding`: factor is stated twice"):
        define("embedding", factor=print)
    assert "embedding" in having("factor")
