"""streamed: where batches are moved, and the bar that shows how many have come."""

import io
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import invfunc
from invfunc import streamed
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import Feed, batches_of
from tests.data_sets.test_streamed import batches, data, losses  # noqa: F401

PRODUCT = invfunc.hvp(losses)


def square(params, x):
    return (x @ params["w"]).square()


class TestDevice:
    @pytest.mark.parametrize("device, goal", [("cpu", "cpu"), (torch.device("meta"), "meta"), (None, "meta")])
    def test_batches_go_to_that_of_the_first_parameter_or_another(self, device, goal):
        params, seen = {"a": torch.ones(3, device="meta"), "b": torch.ones(3)}, []

        def visit(args, n):
            seen.append((args[1].device.type, n))
            return len(args[1])

        batches_of([torch.ones(4, 3), torch.ones(1, 3)], params, 0, Feed.of(device, ""))(visit, enumerate)
        assert seen == [(goal, 0), (goal, 4)]

    @pytest.mark.parametrize("t", [invfunc.variance(losses), PRODUCT], ids=["statistic", "product"])
    def test_one_without_parameters_is_refused_before_the_first_batch(self, data, t):  # noqa: F811
        parts = iter(batches([2], *data[1:]))
        v = (data[0],) * (t is PRODUCT)
        with pytest.raises(ArgumentError, match=r"device='meta'.* parameters, which are on cpu.*Move the parameters"):
            streamed(t, device="meta")(data[0], *v, parts)
        assert len(list(parts)) == 2

    @pytest.mark.parametrize("device", ["gpu", 1.5])
    def test_what_is_none(self, device):
        with pytest.raises(ArgumentError, match=r"streamed\(t, device=.*no device"):
            streamed(invfunc.variance(losses), device=device)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(7, 3))


class TestProgress:
    @pytest.mark.parametrize("kind", ["loader", "stream", "function"])
    def test_samples_a_second_and_what_is_left(self, kind, monkeypatch):
        monkeypatch.setattr(sys, "stderr", Terminal())
        data_set = torch.ones(7, 3) if kind == "loader" else Stream()
        loader = DataLoader(data_set, batch_size=2)
        t = streamed(invfunc.sum_grad_squared(square), progress=True)
        t({"w": torch.ones(3)}, loader if kind != "function" else lambda: iter(loader))
        shown = sys.stderr.getvalue().split("\r")[-1]
        assert shown.startswith("streamed(sum_grad_squared(square)): ") and " samples/s]" in shown
        assert ("4/4 [" in shown) == (kind == "loader") and "4batch" in shown.replace("4/4", "4batch")
