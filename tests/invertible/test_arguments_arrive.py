"""Nothing that a caller passes is dropped: further arguments reach every part of every composite, or are an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    functional,
    invert,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
    with_log_det,
)
from invfunc.errors import ArgumentError, InverseError
from invfunc.pairs import (
    Grid,
    bdia,
    equilibrium,
    fixed_point,
    from_module,
    leapfrog,
    momentum,
    multiscale,
    reversible_adam,
    reversible_sgd,
    reversible_step,
    runge_kutta,
    state_first,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N = 3
X, HALVES = Numbers(1)(N, 8), (Numbers(1)(N, 4), Numbers(2)(N, 4))
CARRIED, ON_GRID = (X, Numbers(3)(N)), Grid().enter(HALVES)
BY, MASK = Numbers(3)(N, 1), Numbers(4)(N, 1)


class Spy(nn.Module):
    """A part that notes of each call whether the further positional argument and the keyword argument are there."""

    def __init__(self, spies: list[Spy], two: bool = False) -> None:
        super().__init__()
        self.weight, self.two, self.seen = nn.Parameter(Numbers(len(spies))() / 2), two, list[tuple[bool, bool]]()
        spies.append(self)

    def forward(self, x: torch.Tensor, by: Any = None, *, mask: Any = None) -> Any:
        y = torch.tanh(x * self.weight) + self.noted(by, mask)
        return (y, y) if self.two else y

    def noted(self, by: Any, mask: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.seen.append((by is not None, mask is not None))
        return (0 if by is None else by) + (0 if mask is None else 2 * mask)


class Flow(Spy):
    """One that has an inverse, as libraries of flows write them."""

    def forward(self, x: torch.Tensor, by: Any = None, *, mask: Any = None) -> Any:
        return x * self.weight + self.noted(by, mask), self.weight.abs().log() * x.shape[1]

    def inverse(self, y: torch.Tensor, by: Any = None, *, mask: Any = None) -> Any:
        return (y - self.noted(by, mask)) / self.weight, -self.weight.abs().log() * y.shape[1]


def additive(spies: list[Spy]) -> Invertible:
    return additive_coupling(Spy(spies), Spy(spies), split_dim=-1)


def affine(spies: list[Spy]) -> Invertible:
    return affine_coupling(Spy(spies, two=True), Spy(spies, two=True), split_dim=-1)


def timed(spies: list[Spy]) -> Invertible:
    part = Spy(spies)
    return reversible_step(runge_kutta(lambda x, t, *args, **kwargs: part(x, *args, **kwargs), "heun"))


WAYS: dict[str, tuple[Callable[[list[Spy]], Invertible], Any, Any]] = {
    "additive_coupling": (additive, X, None),
    "additive_coupling, exact": (lambda s: additive_coupling(Spy(s), Spy(s), exact=True), ON_GRID, None),
    "affine_coupling": (affine, X, (None, None)),
    "momentum": (lambda s: momentum(Spy(s)), HALVES, None),
    "leapfrog": (lambda s: leapfrog(Spy(s), 0.1), HALVES, None),
    "fixed_point": (lambda s: fixed_point(Spy(s)), HALVES, None),
    "reversible_step of runge_kutta": (timed, HALVES, (0.0, 1.0)),
    "bdia": (lambda s: bdia(Spy(s)), ON_GRID, (True,)),
    "from_module": (lambda s: from_module(Flow(s)), X, None),
    "chain": (lambda s: chain(additive(s), from_module(Flow(s))), X, None),
    "chain, a list of None": (lambda s: chain(additive(s), affine(s)), X, [None] * 2),
    "chain, some None": (lambda s: chain(additive(s), affine(s)), X, [(None, None), None]),
    "chain that hides": (lambda s: chain(bdia(Spy(s)), momentum(Spy(s))), ON_GRID, [(False,), None]),
    "chain of chains": (
        lambda s: chain(chain(additive(s)), repeated(affine(s)), anchor_every=1),
        X,
        [None, [None] * 2],
    ),
    "repeated": (lambda s: repeated(additive(s)), X, [None] * 3),
    "multiscale": (lambda s: multiscale(additive(s), chain(affine(s), affine(s))), X, None),
    "with_log_det": (lambda s: with_log_det(affine(s)), CARRIED, None),
    "with_log_det of a chain": (lambda s: with_log_det(chain(affine(s), from_module(Flow(s)))), CARRIED, None),
    "with_log_det of scales": (lambda s: with_log_det(multiscale(affine(s), additive(s))), CARRIED, None),
    "invert": (lambda s: invert(affine(s)), X, None),
    "invert of a chain": (lambda s: invert(chain(additive(s), affine(s))), X, [None] * 2),
    "invert of with_log_det": (lambda s: invert(with_log_det(chain(affine(s), additive(s)))), CARRIED, None),
}
GIVEN = {"positional": ((BY,), {}), "keyword": ((), {"mask": MASK}), "both": ((BY,), {"mask": MASK})}


def squares(y: Any) -> torch.Tensor:
    return torch.stack([t.double().square().sum() for t in tree.tensors(y)]).sum()


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", WAYS)
class TestFurtherArguments:
    def test_reach_every_part_on_every_way(self, name, given):
        """Forth and back, in plain autograd and inside of torch.func, whose gradients are those of the plain pair."""
        make, x, params = WAYS[name]
        spies, (args, kwargs) = list[Spy](), GIVEN[given]
        pair = make(spies)
        block = invertible_checkpoint(pair)

        def arrived() -> bool:
            seen = [[*spy.seen] for spy in spies]
            for spy in spies:
                spy.seen.clear()
            return all(calls and {*calls} == {(bool(args), bool(kwargs))} for calls in seen)

        def gradients(f: Any) -> Any:
            leaves = tree.map_tensors(lambda t: t.clone().requires_grad_(), (x, args, kwargs))
            own = [spy.weight for spy in spies]
            loss = squares(f(leaves[0], params, *leaves[1], **leaves[2]))
            found = torch.autograd.grad(loss, [*tree.tensors(leaves), *own])
            assert arrived()
            return found

        wanted = gradients(pair)
        assert_trees_close(gradients(block), wanted, 1e-6)
        inside = grad(lambda all: squares(block(all[0], params, *all[1], **all[2])))((x, args, kwargs))
        assert arrived()
        assert_trees_close(tree.tensors(inside), list(wanted[: -len(spies)]), 1e-6)
        if not pair.hidden:
            assert_trees_close(invert(pair)(pair(x, params, *args, **kwargs), params, *args, **kwargs), x, 1e-6)
            assert arrived()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain, some None", "chain of chains", "multiscale"])
def test_further_arguments_reach_every_part_within_torch_compile(name):
    torch._dynamo.reset()
    make, x, params = WAYS[name]
    net = make([])
    leaves = tree.map_tensors(lambda t: t.clone().requires_grad_(), (x, *GIVEN["both"]))

    def loss(x: Any, args: Any, kwargs: Any) -> torch.Tensor:
        return squares(net(x, params, *args, **kwargs))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wanted, found = (torch.autograd.grad(f(*leaves), tree.tensors(leaves)) for f in (loss, compiled))
    assert_trees_close(found, wanted, 1e-8)


class TestChain:
    def test_an_error_names_the_block_that_does_not_take_them_and_the_way_out(self):
        net = chain(additive([]), layers.leaky_relu(0.5))
        back = invert(net)
        for call in (net, invertible_checkpoint(net), chain(net), back):
            with pytest.raises(TypeError) as raised:
                call(X, None, BY)
            note = raised.value.__notes__[0]
            assert note.startswith(f"Block {0 if call is back else 1} of chain(")
            assert "leaky_relu" in note and "g(x, p, Tensor)" in note and "lambda x, p, mask: f(x)" in note
        with pytest.raises(TypeError) as raised:
            chain(torch.nn.Linear(4, 4)).module()(torch.ones(1, 4), None)
        assert "chain(Linear), Linear" in (note := raised.value.__notes__[0]) and "Leave out a None" in note
        relu = layers.leaky_relu(0.5)
        wrapped = Invertible(lambda x, p, mask: relu(x), lambda y, p, mask: relu.inverse(y))
        assert_trees_close(chain(additive([]), wrapped)(X, None, BY), relu(additive([])(X, None, BY)), 0)
        assert_trees_close(chain(relu, torch.sin)(X), relu(X).sin(), 0)  # without any, none are passed

    def test_options_of_its_blocks_are_kept_or_an_error(self):
        norm = invertible_checkpoint(layers.batch_norm(), has_aux=True)
        for make in (chain, repeated):
            with pytest.raises(ArgumentError, match=r"has_aux=True.*invertible_checkpoint\(chain\(...\), has_aux=True"):
                make(norm)
        wrong = Invertible(lambda x: 2 * x, lambda y: y, log_det=lambda x: x[:, 0], name="wrong")
        block = invertible_checkpoint(wrong, check=True)
        for made, x in (
            (chain(block), X),
            (multiscale(block), X),
            (invert(block), X),
            (with_log_det(block), CARRIED),
            (invert(chain(block)), X),
        ):
            with pytest.raises(InverseError, match="with an error of"):
                made(tree.map_tensors(lambda t: t.clone().requires_grad_(), x))


class TestTraining:
    @pytest.mark.parametrize("make", [reversible_sgd, reversible_adam])
    def test_steps_whose_entries_are_none_get_them_too(self, make):
        """The first is a block, all others are one node."""
        step = make(lambda w, p, data, *, by: ((w - data).square() * by).sum(), lr=0.1)

        def one_by_one(state, params, data, by):
            for p in params:
                state = step(state, p, data, by=by)
            return state

        found = []
        for train in (repeated(step), chain(*[step] * 9), one_by_one):
            w, data, by = leaves = [t.clone().requires_grad_() for t in (X[0], X[1], X[2].square())]
            last = train(step.start(w), [None] * 9, data, by=by).params
            found.append(torch.autograd.grad(last.sum(), leaves))
        assert_trees_close(found[:2], [found[2]] * 2, 1e-9)


class TestEquilibrium:
    def test_of_a_module_is_that_of_a_function_of_its_inputs(self):
        cell = Spy([])
        f, params = functional(cell)
        wanted = equilibrium(lambda z, *args, **kwargs: cell(z, *args, **kwargs))(X, BY, mask=MASK)
        assert_trees_close(equilibrium(cell)(X, BY, mask=MASK), wanted, 0)
        assert_trees_close(equilibrium(state_first(f))(X, params, BY, mask=MASK), wanted, 1e-12)
        by = BY.clone().requires_grad_()
        (own,) = torch.autograd.grad(equilibrium(cell)(X, by).value.sum(), cell.weight)
        passed = grad(lambda p: equilibrium(state_first(f))(X, p, BY).value.sum())(params)["weight"]
        assert_trees_close(own, passed, 1e-10)
        with pytest.raises(TypeError, match="positional arguments"):
            equilibrium(cell)(X, None, BY)
