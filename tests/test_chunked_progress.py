"""chunked(..., progress=True): a bar of exactly the passes that are made."""

import re
import sys

import pytest
import torch.nn.functional as F

import invfunc
from invfunc import chunked
from invfunc.errors import MissingExtraError
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import data, linear, losses  # noqa: F401
from tests.data_sets.test_streamed_feed import Terminal
from tests.strategies import seeded

ONE = {
    "outputs": (lambda: invfunc.diag_ggn(linear, F.cross_entropy), {"n": 2, "over": "outputs"}, 2),
    "samples": (lambda: invfunc.variance(losses), {"n": 4}, 4),
    "a size": (lambda: invfunc.variance(losses), {"chunk_size": 2}, 5),
    "more than there are": (lambda: invfunc.batch_grad(losses), {"n": 20}, 9),
    "params": (lambda: invfunc.diag_ggn(linear, F.cross_entropy), {"n": 2, "over": "params"}, 2),
    "twice": (lambda: invfunc.ekfac(linear, F.cross_entropy, fisher="exact"), {"n": 3, "over": "samples"}, 6),
    "several": (lambda: invfunc.together(invfunc.variance(losses), invfunc.sqrt_ggn(losses)), {"n": 2}, None),
}


def terminal(monkeypatch):
    """The last text that a terminal shows."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return lambda: found.getvalue().split("\r")[-1]


@pytest.mark.parametrize("called", ONE)
def test_it_ends_with_the_passes_that_were_made(called, data, monkeypatch):  # noqa: F811
    (make, options, passes), shown = ONE[called], terminal(monkeypatch)
    found = chunked(make(), **options, progress=True)(*data)
    title, done, total = re.match(r"(.*): 100%\|.*\| (\d+)/(\d+) \[", shown()).groups()
    assert title == repr(chunked(make(), **options)) and done == total
    assert passes is None or int(done) == passes
    assert int(done) == invfunc.explain(chunked(make(), **options))(*data).pullbacks
    assert_trees_close(found, chunked(make(), **options)(*data), 1e-12)


def test_none_is_shown_but_where_somebody_looks(data, capsys, monkeypatch):  # noqa: F811
    t = chunked(invfunc.variance(losses), 3, progress=True)
    t(*data)
    assert capsys.readouterr().err == ""
    shown = terminal(monkeypatch)
    invfunc.streamed(t)(data[0], [data[1:]])
    invfunc.explain(t)(*data)
    chunked(invfunc.variance(losses), 3)(*data)
    assert shown() == ""


def test_without_tqdm(data, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for t in (invfunc.ekfac(linear, F.cross_entropy, generator=seeded()), linear):
        with pytest.raises(MissingExtraError, match=r"^chunked\(.*tqdm is missing"):
            chunked(t, 2, progress=True)(*data[: 2 + (t is not linear)])
