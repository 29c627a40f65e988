"""Modules that torch has wrapped for several processes: DistributedDataParallel and fully_shard."""

import pytest

from invfunc.testing import assert_trees_close
from tests.many_processes import start
from tests.sharded_modules import WAYS, WIDTH, N, Reversible, as_it_is, told_of_modules
from tests.strategies import Numbers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two():
    """Reports of two processes: on invertible blocks, on functions of modules, and on errors."""
    return start(2, told_of_modules)


class TestInvertibleBlocks:
    @pytest.mark.parametrize("way", WAYS)
    def test_gradients_are_those_of_one_process(self, two, way):
        net = Reversible(2, as_it_is)
        net(Numbers(1)(2 * N, 2 * WIDTH)).backward()
        for found, _, _ in two:
            assert_trees_close(found[way], {name: p.grad for name, p in net.named_parameters()}, 1e-9)

    @pytest.mark.parametrize("way", ["the model", "each block", "each pair"])
    def test_blocks_without_a_part_in_the_loss_are_inverted_all_the_same(self, two, way):
        net = Reversible(3, as_it_is, without=2)
        net(Numbers(1)(2 * N, 2 * WIDTH)).backward()
        wanted = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        for found, _, _ in two:
            assert_trees_close({name: found[way, "without"][name] for name in wanted}, wanted, 1e-9)

    @pytest.mark.parametrize("way", WAYS)
    def test_memory_does_not_grow_with_depth(self, two, way):
        for found, _, _ in two:
            (few, many), (shallow, deep) = found[way, "as_it_is"], found[way, "invertible_checkpoint"]
            assert many >= 2 * few and deep <= 1.05 * shallow


class TestFunctional:
    def test_it_is_that_of_the_plain_module(self, two):
        assert [wrong for _, wrong, _ in two] == [[], []]

    def test_what_the_module_computes_otherwise_is_an_error(self, two):
        first, second = (said for _, _, said in two)
        assert first == second
        assert "Call its `reshard()` first" in first["gathered"]
        assert "compute in torch.bfloat16, by its mp_policy" in first["another precision"]
        assert "FSDPClassifier compute in torch.float32" in first["another precision of outputs"]
        assert "params has no 'head.bias'" in first["frozen"] and "p.full_tensor()" in first["frozen"]
        assert "cannot be replaced, as a copy of the module reads it" in first["kept outside"]
        assert not first["sums in another precision"]
