"""explain(streamed(t)): how often the loader is gone through, and what is done with its first batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import invfunc
from invfunc import explain, streamed
from invfunc.errors import ArgumentTypeError
from tests.data_sets.test_streamed import batches, data, linear, losses  # noqa: F401
from tests.strategies import seeded

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
