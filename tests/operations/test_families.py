"""What is known of an operation stands in one file."""

import ast
import runpy
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest

from invfunc import operations
from invfunc.operations import operation
from invfunc.operations.operation import define
from tests.stated_common import having

FAMILIES = [f for f in sorted(Path(operations.__file__).parent.glob("*.py")) if "import define" in f.read_text()]


@pytest.mark.quick
def test_each_operation_is_known_in_one_family():
    told = defaultdict(set)

    def noted(names, **facts):
        for name in names.split() if isinstance(names, str) else names:
            told[name].add(family.stem)

    with mock.patch.object(operation, "define", noted), mock.patch.object(operation, "define_tagged"):
        for family in FAMILIES:
            runpy.run_path(str(family))
    assert {name: where for name, where in told.items() if len(where) > 1} == {}
    assert told.keys() == operation.OPERATIONS.keys()


@pytest.mark.quick
def test_every_file_of_a_family_is_read():
    (imports,) = (n for n in ast.parse(Path(operations.__file__).read_text()).body if isinstance(n, ast.ImportFrom))
    assert [name.name for name in imports.names] == [family.stem for family in FAMILIES]


@pytest.mark.quick
def test_a_fact_is_stated_once():
    with pytest.raises(ValueError, match="`embedding`: factor is stated twice"):
        define("embedding", factor=print)
    assert "embedding" in having("factor")
