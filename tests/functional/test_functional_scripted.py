"""`functional(model)` of what torch.jit made, whole or in part: values and derivatives of what was scripted."""

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from invfunc import functional, tree
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

X = Numbers(0)(4, 3)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.count.add_(1)
        return self.b(self.a(x).tanh() * self.a(x).sigmoid())


MAKERS = {
    "scripted": torch.jit.script,
    "traced": lambda m: torch.jit.trace(m.eval(), X),
    "a part": lambda m: nn.Sequential(torch.jit.script(m), nn.Tanh()),
}
DERIVATIVES = {
    "none": lambda f: f,
    "first": grad,
    "forward over reverse": hessian,
    "reverse over reverse": lambda f: jacrev(jacrev(f)),
    "forward over forward": lambda f: jacfwd(jacfwd(f)),
    "third": lambda f: grad(lambda p: waves(grad(lambda p: waves(grad(f)(p)))(p))),
    "reverse over gradient": lambda f: lambda p: twice(f, p),
}


def waves(values):
    return torch.stack([v.sin().sum() for v in values.values()]).sum()


def twice(f, params):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    return torch.autograd.grad([waves(grad(f)(leaves))], list(leaves.values()))


def parts(maker):
    """The functional module, one that is as it was written, and parameters; after calls in which torch optimises."""
    torch.manual_seed(0)
    plain = Gated().double()
    made = MAKERS[maker](plain)
    for _ in range(3):
        made(X).sum().backward()
    f, params = functional(made)
    written = plain if maker != "a part" else nn.Sequential(plain, nn.Tanh())
    return made, f, functional(written.eval())[0], {name: p + Numbers(1)(*p.shape) for name, p in params.items()}


@pytest.mark.parametrize("maker", MAKERS)
class TestWhatTorchJitMade:
    @pytest.mark.parametrize("derivative", DERIVATIVES)
    def test_is_the_module_at_other_parameters(self, maker, derivative):
        _, f, plain, params = parts(maker)
        of = DERIVATIVES[derivative]
        for _ in range(2):
            found, wanted = (of(lambda p, h=h: h(p, X).square().sum())(params) for h in (f, plain))
            assert_trees_close(tree.leaves(found), tree.leaves(wanted), 1e-9)

    def test_sample_by_sample(self, maker):
        _, f, plain, params = parts(maker)
        found, wanted = (
            vmap(grad(lambda p, x, h=h: h(p, x[None]).square().sum()), (None, 0))(params, X) for h in (f, plain)
        )
        assert_trees_close(tree.leaves(found), tree.leaves(wanted), 1e-9)

    def test_is_as_before(self, maker):
        made, f, _, params = parts(maker)
        before = {name: t.clone() for name, t in made.state_dict().items()}
        grad(lambda p: f(p, X).sum())(params)
        assert_trees_close(dict(made.state_dict()), before, 0)
        assert all(p is q for p, q in zip(made.parameters(), made.parameters(), strict=True))
        assert torch._C._get_graph_executor_optimize()


def test_a_frozen_one_has_no_parameters():
    frozen = torch.jit.freeze(torch.jit.script(nn.Linear(3, 2).double().eval()))
    f, params = functional(frozen)
    assert params == {}
    assert torch.equal(f(params, X), frozen(X))
