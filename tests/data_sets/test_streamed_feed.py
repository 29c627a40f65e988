"""streamed: where batches are moved, and the bar that shows how many have come."""

import io
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import invfunc
from invfunc import explain, streamed
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Feed, batches_of
from tests.data_sets.test_streamed import (  # noqa: F401
    batches,
    data,
    linear,
    losses,
)
from tests.strategies import seeded

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


# explain(streamed(t)): how often the loader is gone through, and what is done with its first batch

STATISTICS = {
    "variance": lambda: invfunc.variance(losses),
    "diag_ggn": lambda: invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2),
    "drawn": lambda: invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=2, generator=seeded()),
    "together": lambda: invfunc.together(invfunc.batch_grad(losses), invfunc.diag_hessian(losses)),
    "reduced": lambda: invfunc.reduced(invfunc.batch_grad(losses), torch.sum),
    "ekfac": lambda: invfunc.ekfac(linear, F.cross_entropy, generator=seeded()),
}


@pytest.mark.parametrize("called", STATISTICS)
def test_it_is_that_of_the_first_batch(called, data):  # noqa: F811
    params, *rest = data
    t, parts = STATISTICS[called](), batches([0, 2, 5], *rest)
    found, alone = explain(streamed(t))(params, parts), explain(t)(params, *parts[1])
    sweeps = 2 if called == "ekfac" else 1
    assert found == replace(alone, name=repr(streamed(t)), sweeps=sweeps, batches=4)
    first, second, *others = str(found).splitlines()
    assert first == f"{streamed(t)!r}: {found.why}" and others == str(alone).splitlines()[1:]
    assert second == f"  {['1 sweep', '2 sweeps'][sweeps - 1]} over 4 batches; for the first batch, in all:"


def test_nothing_is_drawn_and_nothing_is_taken_away(data):  # noqa: F811
    params, *rest = data
    generator = seeded()
    t = streamed(invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=1, generator=generator))
    loader = DataLoader(TensorDataset(*rest), batch_size=4, shuffle=True)
    before = torch.get_rng_state(), generator.get_state()
    assert explain(t)(params, loader).batches == 3
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(generator.get_state(), before[1])
    once = iter(batches([3], *rest))
    with pytest.raises(ArgumentTypeError, match=r"^explain\(streamed\(.*gives its batches once"):
        explain(t)(params, once)
    assert len(list(once)) == 2
