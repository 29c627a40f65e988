"""Many steps of a training as one node: the same as a block a step, and each where one node cannot do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from invfunc import chain, invertible_checkpoint, repeated, reversible_adam, reversible_sgd, tree
from invfunc.errors import ModifiedError, RangeError, ReplayError
from invfunc.recomputation.noted import block_of
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

OPTIMISERS = {"sgd": reversible_sgd, "adam": reversible_adam}
of_each = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
STEPS = 9


def loss(w: dict, each: dict, x: torch.Tensor) -> torch.Tensor:
    hidden = F.silu(F.layer_norm(x @ w["a"], (3,)) * each["c"]) @ w["b"]
    return (hidden * w["a"].sum()).square().mean() + each["c"] * w["b"].square().sum()


class Given:
    """What a training needs, with a gradient or not."""

    def __init__(self, steps: int = STEPS, needs: bool = True) -> None:
        rand = Numbers(0)
        self.params = {"a": rand(4, 3), "b": rand(3, 2)}
        self.each = {"c": rand(steps).sigmoid(), "lr": 0.05 * rand(steps).sigmoid()}
        self.x = rand(5, 4)
        self.all = tree.map_tensors(lambda t: t.requires_grad_(needs), [self.params, self.each, self.x])

    def gradients(self, train: Callable[..., Any], **options: Any) -> Any:
        given = tree.tensors(self.all)
        last = train(self.params, self.each, self.x)
        value = size(last)
        return torch.autograd.grad(value, given, allow_unused=True, materialize_grads=True, **options)


def size(of: Any) -> torch.Tensor:
    return torch.stack([t.square().sum() for t in tree.tensors(of)]).sum()


def rate(each: dict, *rest: Any) -> torch.Tensor:
    return each["lr"]


def by_span(step: Any) -> Callable:
    return lambda params, each, x: repeated(step)(step.start(params), each, x).params


def by_steps(step: Any) -> Callable:
    """By plain autograd, that keeps all states."""

    def train(params: Any, each: Any, *rest: Any) -> Any:
        state = step.start(params)
        for i in range(len(tree.tensors(each)[0])):
            state = step(state, tree.map_tensors(lambda t, i=i: t[i], each), *rest)
        return state.params

    return train


def nodes(of: torch.Tensor) -> list[str]:
    """The blocks on the way from a tensor to its start, by the names of their nodes."""
    found, node = [], of.grad_fn
    while node is not None:
        if "Node" in node.name():
            found.append(node.name())
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return found


def together(state: Any) -> bool:
    """Whether steps were done by one node, behind a block."""
    return len(nodes(state.weights)) == 2


class TestOneNode:
    @of_each
    @pytest.mark.parametrize("check", ["warn", "error", "off"])
    def test_gives_what_a_block_a_step_gives(self, make, check):
        given, step = Given(), make(loss, lr=rate)
        block = invertible_checkpoint(step, check=check)
        state = repeated(block)(step.start(given.params), given.each, given.x)
        assert together(state)
        one = step.start(given.params)
        for i in range(STEPS):
            one = block(one, {name: t[i] for name, t in given.each.items()}, given.x)
        assert len(nodes(one.weights)) == STEPS
        assert all(torch.equal(a, b) for a, b in zip(tree.tensors(state), tree.tensors(one), strict=True))
        assert_trees_close(given.gradients(by_span(step)), given.gradients(by_steps(step)), 1e-12)

    def test_of_a_chain(self):
        given, step = Given(4), reversible_sgd(loss, lr=0.1)
        each = [{name: t[i] for name, t in given.each.items()} for i in range(4)]
        state = chain(*[step] * 4)(step.start(given.params), each, given.x)
        assert together(state)
        mixed = chain(step, step, reversible_sgd(loss, lr=0.2), step)(step.start(given.params), each, given.x)
        assert len(nodes(mixed.weights)) == 4

    @of_each
    def test_gives_second_derivatives(self, make):
        given, step = Given(4), make(loss, lr=rate)

        def second(train: Callable) -> Any:
            first = given.gradients(train, create_graph=True)
            return torch.autograd.grad(size(first), tree.tensors(given.all))

        assert_trees_close(second(by_span(step)), second(by_steps(step)), 1e-10)

    def test_goes_backwards_twice_and_through_several_calls(self):
        given, step = Given(), reversible_adam(loss, lr=rate)
        halves = [tree.map_tensors(lambda t, part=part: t[part], given.each) for part in (slice(4), slice(4, None))]

        def train(params: Any, each: Any, x: torch.Tensor) -> Any:
            state = step.start(params)
            for half in halves:
                state = repeated(step)(state, half, x)
            return state.params

        value = size(train(given.params, given.each, given.x))
        leaves = tree.tensors(given.all)
        first = torch.autograd.grad(value, leaves, retain_graph=True)
        assert_trees_close(first, torch.autograd.grad(value, leaves), 0)
        assert_trees_close(first, given.gradients(by_steps(step)), 1e-12)

    def test_only_where_something_needs_a_gradient(self):
        given, step = Given(needs=False), reversible_sgd(loss, lr=rate)
        assert repeated(step)(step.start(given.params), given.each, given.x).weights.grad_fn is None

    def test_gives_the_state_before_it_back_without_a_gradient(self):
        """Which a block asks for that shares what it gets with others."""
        given, step = Given(), reversible_sgd(loss, lr=rate)
        state = repeated(step)(step.start(given.params), given.each, given.x)
        span = block_of(state.weights)
        assert span is not None
        before = [source() for source in span._xs]
        assert all(slot is not None and slot.find() is None for slot in before[:2])
        span.invert()
        one = step(step.start(given.params), {name: t[0] for name, t in given.each.items()}, given.x)
        found = [slot.find() for slot in before if slot is not None]
        assert all(a is not None and torch.equal(a, b) for a, b in zip(found, tree.tensors(one), strict=True))


def losing(more: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    """`(c * (w * g(c)).square()).sum()`, where g does more than to compute below 0.5."""

    def loss(w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (c * (more(w) if c < 0.5 else w).square()).sum()

    return loss


START = torch.linspace(-1, 1, 6).double()


class TestABlockAStep:
    """Where the loss does more than to compute: before it, and behind it, steps are together."""

    @pytest.mark.parametrize("first, number", [(0.1, 6), (0.9, 5)])
    def test_of_random_numbers(self, first, number):
        step = reversible_sgd(losing(lambda w: F.dropout(w, 0.5)), lr=0.1)
        cs = torch.tensor([first, 0.8, 0.7, 0.2, 0.9, 0.8, 0.7]).double().requires_grad_()
        torch.manual_seed(0)
        state = repeated(step)(step.start(START), cs)
        drawn = torch.rand(())
        assert len(nodes(state.weights)) == number
        found = torch.autograd.grad(state.params.square().sum(), cs)
        torch.manual_seed(0)
        wanted = torch.autograd.grad(by_steps(step)(START, cs).square().sum(), cs)
        assert torch.equal(drawn, torch.rand(()))
        assert_trees_close(found, wanted, 1e-12)

    def test_of_a_tensor_that_needs_a_gradient_and_is_closed_over(self):
        scale = torch.tensor(0.7).double().requires_grad_()
        step = reversible_sgd(losing(lambda w: w * scale), lr=0.1)
        cs = torch.tensor([0.9, 0.8, 0.7, 0.2, 0.9]).double().requires_grad_()
        found = torch.autograd.grad(repeated(step)(step.start(START), cs).params.square().sum(), (cs, scale))
        wanted = torch.autograd.grad(by_steps(step)(START, cs).square().sum(), (cs, scale))
        assert_trees_close(found, wanted, 1e-12)

    def test_refuses_a_state_that_is_read_first_and_written_later(self):
        """As a learning rate may; a loss may not within torch.func."""
        count = torch.ones(())
        step = reversible_sgd(losing(torch.sin), lr=lambda c: 0.1 / (count.add_(1) if c < 0.5 else count))
        cs = torch.tensor([0.9, 0.8, 0.2]).double().requires_grad_()
        with pytest.raises(ReplayError, match="writes into a tensor that it only read in the step before"):
            repeated(step)(step.start(START), cs)

    def test_of_a_module_that_counts_its_calls(self):
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.calls = 0

            def forward(self, w: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return w * self.calls

        module = Counting()
        step, cs = reversible_sgd(losing(module), lr=0.01), torch.tensor([0.9, 0.8, 0.2, 0.3, 0.2]).double()
        found = torch.autograd.grad(repeated(step)(step.start(START), cs.requires_grad_()).params.sum(), cs)
        assert module.calls == 3
        module.calls = 0
        assert_trees_close(found, torch.autograd.grad(by_steps(step)(START, cs).sum(), cs), 1e-12)

    @pytest.mark.parametrize("options", [{"check": True}, {"keep": True}, {"min_bytes": 10_000}])
    def test_of_options_that_one_node_has_not(self, options):
        step, cs = reversible_sgd(losing(torch.sin), lr=0.1), torch.full((5,), 0.9).double().requires_grad_()
        block = invertible_checkpoint(step, **options)
        state = repeated(block)(step.start(START), cs)
        assert len(nodes(state.weights)) == (0 if "min_bytes" in options else 5)
        anchored = repeated(step, anchor_every=2)(step.start(START), cs)
        assert len(nodes(anchored.weights)) > 2

    def test_within_torch_func(self):
        step, cs = reversible_sgd(losing(torch.sin), lr=0.1), torch.full((4,), 0.9).double()

        def value(cs: torch.Tensor) -> torch.Tensor:
            return repeated(step)(step.start(START), cs).params.square().sum()

        assert_trees_close(torch.autograd.grad(value(cs.requires_grad_()), cs)[0], grad(value)(cs.detach()), 1e-12)


class TestErrors:
    @of_each
    def test_of_what_was_replaced_or_written_since(self, make):
        data = {"x": torch.ones(6).double()}
        step, cs = make(lambda w, c: (c * data["x"] * w.sin()).sum(), lr=0.1), torch.full((7,), 0.9).double()

        def last() -> torch.Tensor:
            return repeated(step)(step.start(START), cs.requires_grad_()).params.sum()

        value, then = last(), data["x"]
        data["x"] = then + 1e-9
        with pytest.raises(ReplayError, match="the loss, or the learning rate, reads another tensor"):
            value.backward()
        data["x"] = then
        value = last()
        then.add_(1)
        with pytest.raises(ModifiedError, match="a tensor that the loss closes over has been modified"):
            value.backward()

    @of_each
    @pytest.mark.parametrize("change", ["replaced", "written"])
    def test_of_what_only_the_gradient_reads(self, make, change):
        """A tensor behind a weight of 0 changes nothing of the state that comes back, and some steps alone read it."""
        data = {"early": torch.ones(6).double(), "late": torch.ones(6).double()}
        step = make(lambda w, p: ((w - 1) ** 2).sum() / 2 + p[0] * (data[p[1]] * w).sum(), lr=0.1)
        cs = torch.zeros(7).double().requires_grad_()
        value = repeated(step)(step.start(START), [(c, "late" if k == 4 else "early") for k, c in enumerate(cs)])
        if change == "replaced":
            data["late"] = torch.full((6,), 3.0).double()
        else:
            data["late"].fill_(3)
        with pytest.raises((ModifiedError, ReplayError), match="modified by an inplace|reads another tensor"):
            value.params.sum().backward()

    def test_name_the_block(self):
        step = reversible_sgd(lambda w, c: (c * w).sum(), lr=1.0)
        cs = torch.tensor([1.0, 1.0, 1e4]).double().requires_grad_()
        with pytest.raises(RangeError, match=r"^invertible_checkpoint\(reversible_sgd\(.*\)\)\(x, ...\): .* leave the"):
            repeated(step)(step.start(START), cs)
