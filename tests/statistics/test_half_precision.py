"""float16 and bfloat16: sums, squares and probabilities are those of float32, however a parameter is read."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
READ = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T.contiguous().T,
    "computed": lambda w: w.exp(),  # at 0, where its derivative is 1
    "twice": lambda w: (w + w) / 2,
}
TINY = 2.0**-13
"""Its square is 0 in float16, that of the norm of thousands of them is not."""


@pytest.mark.parametrize("read", READ)
@HALF
class TestSquaresOfSmallShares:
    def of(self, statistic, read, dtype, n=3):
        def f(w, x):
            return (x @ READ[read](w)).sum(1)

        w, x = torch.zeros(256, 64, dtype=dtype), torch.full((n, 256), TINY, dtype=dtype)
        return statistic(f)(w, x)

    def test_make_norms(self, read, dtype):
        square = torch.tensor(256 * 64 * TINY**2)
        assert_trees_close(self.of(invfunc.batch_l2_grad, read, dtype), square.expand(3), 0.02)
        assert_trees_close(self.of(invfunc.gram, read, dtype), square.expand(3, 3), 0.02)

    def test_clip(self, read, dtype):
        found, norms = self.of(lambda f: invfunc.clipped_grad(f, 1e-3), read, dtype)
        assert_trees_close(norms, torch.full((3,), 128 * TINY), 0.02)
        assert_trees_close(found, torch.full((256, 64), 3 * 1e-3 / 128), 0.02)

    def test_make_a_trace(self, read, dtype):
        def trace(f):
            return invfunc.ggn_trace(lambda w, x: f(w, x)[:, None], lambda z, y: (z - y).square().sum() / 2)

        found = self.of(lambda f: lambda w, x: trace(f)(w, x, x[:, :1]), read, dtype)
        assert_trees_close(found, torch.tensor(3 * 256 * 64 * TINY**2), 0.02)


@HALF
@pytest.mark.parametrize("logit", [-8.0, -6.0, 6.0, 8.0])
def test_drawn_columns_of_rare_outcomes_average_to_the_hessian(dtype, logit):
    def f(b, x):
        return b + 0 * x

    args = torch.tensor([logit], dtype=dtype), torch.zeros(50, 1, dtype=dtype), torch.zeros(50, 1, dtype=dtype)
    p = torch.tensor(logit).double().sigmoid()
    generator = torch.Generator().manual_seed(0)
    found = invfunc.diag_ggn(f, F.binary_cross_entropy_with_logits, mc_samples=2000, generator=generator)(*args)
    assert_trees_close(found, (p * (1 - p)).reshape(1), 0.5)


@HALF
@pytest.mark.parametrize("between", [torch.tanh, lambda h: h.softmax(-1)], ids=["elementwise", "general"])
def test_a_chain_is_that_of_float32(dtype, between):
    """KFRA of rounded numbers is that of these numbers in float32, up to the rounding of its pullbacks."""

    def f(p, x, y):
        return F.cross_entropy(between(x @ p["w"]) @ p["v"], y)

    params, x, y = {"w": Numbers()(4, 5), "v": Numbers(1)(5, 3)}, Numbers(2)(6, 4), Numbers(3).below(3, 6)
    low = tree.map_tensors(lambda z: z.to(dtype), (params, x))
    found, wanted = (kfra(f)(*of, y) for of in (low, tree.map_tensors(lambda z: z.float(), low)))
    for name, block in found.items():
        assert all(x.dtype == dtype for x in block.factors)
        assert_trees_close([x.float() for x in block.factors], [*wanted[name].factors], 0.03)
