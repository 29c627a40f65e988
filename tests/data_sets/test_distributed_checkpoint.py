"""distributed(streamed(t, checkpoint=, out=)): each process has a file of its own, and rows of its own."""

import pytest
import torch

import invfunc
from invfunc import distributed, streamed
from invfunc.errors import ArgumentError
from tests.data_sets.test_streamed import batches, data, losses  # noqa: F401
from tests.data_sets.test_streamed_checkpoint import Lost, breaking, same
from tests.many_processes import start
from tests.processes_resumed import all_of_it

pytestmark = pytest.mark.slow


def test_processes_go_on_as_if_nothing_had_happened(tmp_path):
    """Of three processes, one of which has no samples."""
    folder = tmp_path / "states"
    folder.mkdir()
    assert start(3, all_of_it, str(folder)) == [[], [], []]


def test_one_alone_has_the_file_of_the_first(data, tmp_path):  # noqa: F811
    params, *rest = data
    t, parts, file = invfunc.variance(losses), batches([2, 4], *rest), tmp_path / "state"
    with pytest.raises(Lost):
        distributed(streamed(t, checkpoint=file))(params, lambda: breaking(parts, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["state.0"]
    written = torch.load(tmp_path / "state.0")
    same(distributed(streamed(t, checkpoint=file))(params, parts), streamed(t)(params, parts))
    assert not list(tmp_path.iterdir())
    torch.save({**written, "identity": {**written["identity"], "the process": "0 of 2"}}, tmp_path / "state.0")
    with pytest.raises(ArgumentError, match="another value of the process: 0 of 2, and not 0 of 1"):
        distributed(streamed(t, checkpoint=file))(params, parts)
