"""Blocks as modules: they register the parameters of their parts, once, under the names of the parts."""

import copy
import pickle

import pytest
import torch
from torch import nn

import invfunc
from invfunc import additive_coupling, affine_coupling, chain, invertible_checkpoint
from invfunc.pairs import momentum
from tests.process_group import alone


class Attend(nn.Linear):
    def forward(self, x, mask=None):
        y = super().forward(x)
        return y if mask is None else y * mask


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.w.exp()

    def inverse(self, y):
        return y / self.w.exp()


def part():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Dropout(0.2))


def halved():
    module = Halved()
    return invertible_checkpoint(module, module.inverse)


MADE = {
    "pair": (lambda: additive_coupling(part(), part(), split_dim=1), {"F", "G"}),
    "block": (lambda: invertible_checkpoint(additive_coupling(part(), part(), split_dim=1)), {"F", "G"}),
    "chain": (lambda: chain(*[additive_coupling(part(), part(), split_dim=1) for _ in range(3)]), {"0", "1", "2"}),
    "functions": (halved, {"f"}),
}


@pytest.mark.parametrize("name", MADE)
class TestModule:
    def test_registers_its_parts(self, name):
        made, names = MADE[name]
        module = made().module()
        assert {path.split(".")[0] for path, _ in module.named_parameters()} == names
        assert len({*map(id, module.parameters())}) == len([*module.parameters()])

    def test_trains_as_any_module(self, name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), MADE[name][0]().module(), nn.Linear(4, 1))
        other, x = copy.deepcopy(net), torch.randn(6, 3)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        before = [p.detach().clone() for p in net.parameters()]
        for _ in range(2):
            optimiser.zero_grad()
            net(x).square().mean().backward()
            optimiser.step()
        assert all(not torch.equal(p, then) for p, then in zip(net.parameters(), before, strict=True) if p.ndim > 1)
        assert all(torch.equal(p, then) for p, then in zip(other.parameters(), before, strict=True))
        other.load_state_dict(net.state_dict())
        net.eval(), other.eval()
        assert not any(m.training for m in net.modules())
        assert torch.equal(net(x), other(x))
        assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))
        assert next(net.double().parameters()).dtype == torch.float64 and net(x.double()).dtype == torch.float64

    def test_trains_in_distributed_data_parallel(self, name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), MADE[name][0]().module(), nn.Linear(4, 1))
        twin, x = copy.deepcopy(net), torch.randn(6, 3)
        with alone():
            for model in (nn.parallel.DistributedDataParallel(net), twin):
                torch.manual_seed(1)  # of the dropout
                model(x).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None and torch.equal(p.grad, q.grad)

    def test_gradients_are_those_of_the_pair(self, name):
        block = MADE[name][0]()
        module, x = block.module().eval(), torch.randn(6, 4)
        found = torch.autograd.grad(module(x).sin().sum(), [*module.parameters()])
        wanted = torch.autograd.grad(getattr(block, "pair", block)(x).sin().sum(), [*module.parameters()])
        torch.testing.assert_close(found, wanted)


def test_further_arguments_reach_the_parts():
    x, mask = torch.randn(3, 4), torch.zeros(2)
    for block in (additive_coupling(Attend(2, 2), Attend(2, 2), split_dim=1), momentum(Attend(4, 4))):
        module, state = chain(block).module(), x if "additive" in repr(block) else (x, torch.zeros(3, 4))
        if "momentum" in repr(block):
            mask = torch.zeros(4)
        assert torch.equal(torch.cat([*module(state, mask)]), torch.cat([*module(state, mask=mask)]))
        assert not torch.equal(torch.cat([*module(state, mask)]), torch.cat([*module(state)]))


def test_of_repeated_is_given_how_often():
    module, x = (
        invfunc.repeated(additive_coupling(nn.Linear(2, 2), nn.Linear(2, 2), split_dim=1)).module(),
        torch.ones(3, 4),
    )
    assert torch.equal(module(module(x, [None]), [None] * 2), module(x, [None] * 3))


def test_without_modules_is_an_error():
    layer = nn.Linear(2, 2)
    with pytest.raises(invfunc.errors.ArgumentError, match="it has no modules to register"):
        affine_coupling(lambda b: layer(b).chunk(2, 1), torch.sin).module()
