"""Which entries a probe looks at."""

import pytest
import torch

from invfunc.recomputation import probe
from tests.strategies import Numbers

SHAPES = [(32, 64, 8, 8), (16, 16, 16, 16), (64, 512), (8, 128, 96), (100, 100), (4096,)]


class TestPlaces:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_are_in_all_parts(self, shape):
        """Half of the samples, of the channels, of the rows ... is enough, also where strides divide each other."""
        x = torch.zeros(shape)
        for axis, size in enumerate(shape):
            for half in (range(size // 2), range(size // 2, size), range(0, size, 2), range(1, size, 2)):
                looked = probe.Probe((x,))
                assert looked.errors((x.index_fill(axis, torch.tensor(list(half)), 1.0),))[0]

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_are_others_each_time(self, layout):
        x = torch.arange(1000.0).view(50, 20)
        x = x.t() if layout == "transposed" else x
        for place in range(0, 1000, 37):
            other = x.clone()
            other[divmod(place, x.shape[1])] = -1.0
            assert any(probe.Probe((x,)).errors((other,))[0] for _ in range(100))


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.mT, lambda t: t[:, ::2], lambda t: t[:, :1].expand(8, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool])
def test_a_probe_sees_changes(layout, dtype):
    t = 10 * Numbers()(8, 6)
    t = t > 0 if dtype is torch.bool else t.to(dtype)
    seen = probe.Probe([layout(t)])
    (same,) = seen.errors([layout(t).clone()])
    (changed,) = seen.errors([layout(t.flip(0).roll(1, 1))])
    assert same == 0 and changed > 0
