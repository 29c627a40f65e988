"""What fails while the structure of a function is looked for is told, and costs nothing but time."""

from unittest import mock

import pytest
import torch.nn.functional as F

from invfunc import diag_ggn
from invfunc.structure.labels import Labels
from invfunc.structure.look import Look, One
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers
from tests.structures import always


def convolved():
    rand = Numbers(3)
    args = ({"a": rand(2, 1, 3), "b": rand(1, 2, 3)}, rand(2, 1, 14), rand(2, 1, 10))
    return diag_ggn(lambda p, x: F.conv1d(F.conv1d(x, p["a"]).tanh(), p["b"]), F.mse_loss), args


@pytest.mark.quick
@pytest.mark.parametrize("where", [(Labels, "_follow"), (One, "layout"), (Look, "used")], ids=lambda w: w[1])
def test_after_a_fault_of_the_library_the_result_is_right(where):
    make, args = convolved()
    wanted = make(*args)

    def fails(*args, **kwargs):
        raise RuntimeError("planted")

    with always(), mock.patch.object(where[0], where[1], fails):
        assert_trees_close(make(*args), wanted, 1e-9, 0)
