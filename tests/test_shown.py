"""Output in a notebook: tables of the numbers in a result, and pictures."""

import re
import sys
from html import unescape
from unittest import mock

import matplotlib
import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import additive_coupling, chain, check_inverse, kfac
from invfunc.pairs import drift

matplotlib.use("agg")

X, Y = torch.rand(4, 6), torch.arange(4)


def f(params, x):
    return torch.tanh(x @ params["first <b>"]) @ params["second"]


def half(x, w):
    return torch.tanh(x @ w)


@pytest.fixture
def params():
    return {"first <b>": torch.rand(6, 5), "second": torch.rand(5, 4)}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def cells(shown):
    """The rows of a table, as texts."""
    rows = re.findall(r"<tr>(.*?)</tr>", shown._repr_html_())
    return [[unescape(x) for x in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)] for row in rows]


class TestTables:
    def test_of_an_inverse_have_both_errors_of_each_tensor(self):
        report = check_inverse(additive_coupling(half, half), (X[:, :3], X[:, 3:]), (torch.rand(3, 3),) * 2)
        assert [row[1] for row in cells(report)[1:]] == [*report.x, *report.y]
        assert f"{report.condition:.3g} times" in report._repr_html_()

    def test_of_factors_have_each(self, params, generator):
        found = kfac(f, F.cross_entropy, generator=generator)(params, X, Y)["second"]
        parts = zip(found.groups, found.factors, strict=True)
        assert [row[:2] for row in cells(found)[1:]] == [[f"dims {[*dims]}", str([*x.shape])] for dims, x in parts]


class TestPictures:
    def test_of_a_drift_have_its_errors_also_where_some_are_zero(self):
        third = invfunc.Invertible(lambda x, c: x / c, lambda y, c: y * c)
        found = drift(third, torch.rand(5), [3.0, 1.0, 7.0])
        ax = drift(third, torch.rand(5), [1.0, 2.0]).plot()
        assert found.plot(ax) is ax
        assert list(ax.lines[1].get_ydata()) == found and ax.get_xlabel() and ax.get_ylabel()

    def test_without_matplotlib_the_extra_is_named(self):
        with (
            mock.patch.dict(sys.modules, {"matplotlib.pyplot": None}),
            pytest.raises(invfunc.errors.MissingExtraError, match=r"invfunc\[notebooks\]"),
        ):
            drift(chain(additive_coupling(half, half)), (X[:, :3], X[:, 3:]), [(torch.rand(3, 3),) * 2]).plot()
