"""Users who check their types get those of today's code, and no complaint."""

import pytest

from tests import stub, typed_programs

PROGRAMS = {
    name: f for name, f in vars(typed_programs).items() if getattr(f, "__annotations__", None) == {"return": None}
}


def test_are_those_of_todays_code():
    """If not, `python -m tests.stub` brings the file up to date."""
    assert stub.PATH.read_text() == stub.made()


def test_a_result_is_named_for_each_statistic_once():
    named = [name for names in stub.GIVES.values() for name in names]
    assert len(named) == len({*named})


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_run(program):
    """Runs the programs; pyright checks their types."""
    program()
