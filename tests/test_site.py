"""The tables of the site are what the code does."""

import re

from invfunc.testing.laws import LAWS
from tests import coverage, where


def test_layers_and_quantities_are_those_of_todays_code():
    """If not, `python -m tests.coverage` brings the table up to date."""
    page = coverage.PAGE.read_text()
    assert page == coverage.rewritten(page)


def test_where_statistics_work_is_that_of_todays_code():
    """If not, `python -m tests.where` brings the table up to date."""
    page = where.PAGE.read_text()
    assert page == where.rewritten(page)


def test_the_laws_are_those_that_there_are():
    page = (coverage.SITE / "laws.md").read_text()
    listed = page.partition("<!-- laws: begin -->\n")[2].partition("<!-- laws: end -->")[0]
    names = [re.sub(r"\s+", " ", line).partition(": ")[2].rstrip(". ").split("; ") for line in listed.split("\n* ")]
    assert [name for of in names for name in of] == list(LAWS)
