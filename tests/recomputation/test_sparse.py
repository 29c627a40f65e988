"""Blocks of graph networks: sparse matrices that their functions read, as the adjacency matrix of a graph."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from invfunc import additive_coupling, hvp, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.invertible_same import squares
from tests.strategies import Numbers

LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
DENSE = Numbers(3)(5, 5).double() * (Numbers(4)(5, 5) > 0)


def adjacency(layout, number=1.0):
    with warnings.catch_warnings():  # torch says that they are in beta state
        warnings.simplefilter("ignore")
        return (DENSE * number).to_sparse(layout=layout)


def pair_of(how, adjacency, weight):
    """A coupling that reads the matrix, and the arguments that it takes."""
    if how == "argument":
        return (
            additive_coupling(lambda b, p, A: (A @ (b @ p)).tanh(), lambda a, p, A: a.sin()),
            (weight, None),
            adjacency,
        )
    module = nn.Module()
    module.register_buffer("A", adjacency)
    return additive_coupling(lambda b, p: (module.A @ (b @ p)).tanh(), lambda a, p: a.sin()), (weight, None)


def plain(call, x, w):
    """Two orders of plain autograd."""
    w = w.clone().requires_grad_()
    first = torch.autograd.grad(call(x, w), w, create_graph=True)
    return first, torch.autograd.grad(squares(first), w)


WAYS = {
    "plain": plain,
    "grad": lambda call, x, w: grad(call, (0, 1))(x, w),
    "grad of grad": lambda call, x, w: grad(lambda w: grad(call)(x, w).square().sum())(w),
    "hvp": lambda call, x, w: hvp(lambda w, x: call(x, w))(w, w.sin(), x),
}


class TestASparseMatrix:
    @pytest.mark.parametrize("how", ["argument", "buffer"])
    @pytest.mark.parametrize("number", [1.0, 0.0])
    @pytest.mark.parametrize(("layout", "way"), [(LAYOUTS[0], way) for way in WAYS] + [(x, "plain") for x in LAYOUTS])
    def test_is_read_as_without_blocks(self, layout, way, how, number):
        """torch.func itself takes those in COO format only. One of zeros has no values at all."""
        A = adjacency(layout, number)

        def found(wrap):
            def call(x, w):
                pair, *args = pair_of(how, A, w)
                block, state = wrap(pair), (x.sin(), x.cos())
                for _ in range(3):
                    state = block(state, *args)
                return squares(state)

            return WAYS[way](call, Numbers(1)(5, 4).double(), Numbers(2)(4, 4).double())

        assert_trees_close(found(invertible_checkpoint), found(lambda pair: pair), 1e-9)

    def test_of_a_module_may_have_its_parameters_put_in(self):
        class Net(nn.Module):
            def __init__(self, wrap):
                super().__init__()
                self.register_buffer("A", adjacency(torch.sparse_coo))
                self.layer = nn.Linear(4, 4).double()
                self.block = wrap(additive_coupling(lambda b: (self.A @ self.layer(b)).tanh(), torch.sin))

            def forward(self, x):
                return squares(self.block(self.block((x.sin(), x.cos()))))

        def found(wrap):
            net, x = Net(wrap), Numbers(1)(5, 4).double()
            params = {name: Numbers(7)(*p.shape).double() for name, p in net.named_parameters()}
            return grad(lambda params: functional_call(net, params, (x,)))(params)

        assert_trees_close(found(invertible_checkpoint), found(lambda pair: pair), 1e-9)
