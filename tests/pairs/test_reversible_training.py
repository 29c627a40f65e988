"""Training that runs backwards: to the last bit, and with the gradient of plain autograd."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap

from invfunc import chain, invert, repeated, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, RangeError
from invfunc.pairs import Grid, reversible_adam, reversible_sgd
from invfunc.pairs.exact import Decay
from invfunc.testing import assert_trees_close, laws
from tests.strategies import Numbers

GRID = Grid(44, torch.float64)
N, INPUTS, WIDTH, CLASSES, BATCH = 30, 4, 5, 3, 6
OPTIMISERS = {"sgd": reversible_sgd, "adam": reversible_adam}
of_each = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)


def rate(each: dict, *rest: Any) -> torch.Tensor:
    return each["lr"]


def loss(params: dict, each: dict, data_weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    i = each["batch"]
    hidden = torch.tanh(x[i] @ params["first"] + params["bias"])
    return (data_weights[i] * F.cross_entropy(hidden @ params["last"], y[i], reduction="none")).mean()


class Problem:
    """A small classifier, the batches and learning rates of its training, and weights of its data."""

    def __init__(self, steps: int, seed: int = 0, lr: float = 0.1) -> None:
        rand, generator = Numbers(seed), torch.Generator().manual_seed(seed)
        self.x, self.y = rand(N, INPUTS), torch.randint(CLASSES, (N,), generator=generator)
        self.params = {"first": rand(INPUTS, WIDTH), "bias": rand(WIDTH), "last": rand(WIDTH, CLASSES)}
        self.each = {
            "batch": torch.randint(N, (steps, BATCH), generator=generator),
            "lr": lr * (1 + rand(steps).sigmoid()),
        }
        self.data_weights = 1 + rand(N).sigmoid()

    def steps(self) -> list[dict]:
        return [{name: t[i] for name, t in self.each.items()} for i in range(len(self.each["lr"]))]

    def rest(self, data_weights: torch.Tensor | None = None) -> tuple:
        return self.data_weights if data_weights is None else data_weights, self.x, self.y

    def gradients(self, train: Callable[[dict, dict, torch.Tensor], dict]) -> Any:
        """Gradients of a validation loss in the start, the learning rates and the weights of the data."""
        given = (self.params, self.each["lr"], self.data_weights)
        params, lr, data_weights = leaves = tree.map_tensors(lambda t: t.clone().requires_grad_(), given)
        last = train(params, {**self.each, "lr": lr}, data_weights)
        value = loss(last, {"batch": torch.arange(N)}, torch.ones(N).double(), self.x, self.y)
        found, form = tree.separate(leaves)
        return form.join(torch.autograd.grad(value, found))

    def backwards(self, step: Any) -> Any:
        return self.gradients(lambda p, each, c: repeated(step)(step.start(p), each, *self.rest(c)).params)

    def kept(self, step: Any) -> Any:
        """By plain autograd, which keeps all states, of the steps on the grid."""

        def train(params: dict, each: dict, c: torch.Tensor) -> dict:
            state = step.start(params)
            for i in range(len(each["lr"])):
                state = step(state, {name: t[i] for name, t in each.items()}, *self.rest(c))
            return state.params

        return self.gradients(train)

    def unrounded(self, params: dict, each: dict, c: torch.Tensor) -> dict:
        """Gradient descent with momentum 0.9, without a grid."""
        v = {name: torch.zeros_like(p) for name, p in params.items()}
        for i in range(len(each["lr"])):
            one = {name: t[i] for name, t in each.items()}
            g = grad(loss)(params, one, *self.rest(c))
            v = {name: 0.9 * v[name] - one["lr"] * g[name] for name in v}
            params = {name: params[name] + v[name] for name in v}
        return params


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(s, t) for s, t in zip(tree.tensors(a), tree.tensors(b), strict=True))


@pytest.mark.quick
class TestDecay:
    @given(
        by=st.fractions(Fraction(1, 100), Fraction(99, 100), max_denominator=1000),
        units=st.lists(st.integers(1 - 2**53, 2**53 - 1), min_size=1, max_size=5),
        steps=st.integers(1, 20),
        gained=st.integers(-1000, 1000),
    )
    def test_is_undone_to_the_last_bit_and_off_by_less_than_a_unit(self, by, units, steps, gained):
        decay, unit = Decay.of("f()", "by", by), 2.0**-44
        x, gained = torch.tensor(units, dtype=torch.float64) * unit, torch.tensor(gained * unit).double()
        words, seen = (torch.zeros(len(units), dtype=torch.int64),), []
        for t in range(steps):
            seen.append((x, words))
            x, words = decay.forth(x, words, gained, t, GRID)
            for before, after in zip((seen[-1][0] / unit).tolist(), ((x - gained) / unit).tolist(), strict=True):
                assert abs(Fraction(after) - decay.by * Fraction(before)) < 1
        for t in reversed(range(steps)):
            x, words = decay.back(x, words, gained, t, GRID)
            assert same((x, words), seen[t])


class TestWayBack:
    @pytest.mark.slow
    @of_each
    def test_ends_at_the_start_to_the_last_bit_after_1000_steps(self, make):
        problem, step = Problem(1000), make(loss, lr=rate)
        start = state = step.start(problem.params)
        back = invert(step)
        with torch.no_grad():
            for one in problem.steps():
                state = step(state, one, *problem.rest())
            assert state.steps == 1000 and not torch.equal(state.weights, start.weights)
            bits = [sum((w + 1.0).log2().mean().item() for w in words) / 1000 for words in state.digits]
            for one in reversed(problem.steps()):
                state = back(state, one, *problem.rest())
        assert same(state, start) and state.steps == 0
        assert abs(bits[0] - math.log2(10 / 9)) < 0.01  # of an entry and step, as the digits that are lost

    def test_other_gradients_are_found(self):
        problem, step = Problem(40), reversible_sgd(loss, lr=rate)
        with torch.no_grad():
            last = repeated(step)(step.start(problem.params), problem.each, *problem.rest())
            other = problem.data_weights.clone()
            other[0] += 1e-9
            with pytest.raises(InverseError, match="on the way back were other ones"):
                invert(repeated(step))(last, problem.each, *problem.rest(other))


def adam(problem, of, eps):
    """Its steps for a loss, without a grid."""

    def unrounded(params: dict, each: dict, c: torch.Tensor) -> dict:
        m = {name: torch.zeros_like(p) for name, p in params.items()}
        s = dict(m)
        for i in range(len(each["lr"])):
            one = {name: t[i] for name, t in each.items()}
            g = grad(of)(params, one, *problem.rest(c))
            m = {k: 0.9 * m[k] + 0.1 * g[k] for k in m}
            s = {k: 0.999 * s[k] + 0.001 * g[k].square() for k in s}
            root = {k: (s[k] / (1 - 0.999 ** (i + 1))).sqrt() + eps for k in s}
            params = {k: params[k] - one["lr"] * m[k] / (1 - 0.9 ** (i + 1)) / root[k] for k in m}
        return params

    return unrounded


class TestGradient:
    def test_is_that_of_training_without_a_grid(self):
        problem = Problem(50)
        found = problem.backwards(reversible_sgd(loss, lr=rate, grid=Grid(48, torch.float64)))
        assert_trees_close(found, problem.gradients(problem.unrounded), 1e-10)

    @of_each
    def test_is_that_of_plain_autograd_through_the_same_steps(self, make):
        problem, step = Problem(50, seed=1), make(loss, lr=rate)
        assert_trees_close(problem.backwards(step), problem.kept(step), 1e-12)

    @of_each
    def test_of_second_order_and_through_several_calls(self, make):
        x, start = Numbers(0)(5, 3), Numbers(1)(3)
        step = make(lambda w, c: (c * torch.tanh(x @ w)).square().sum(), lr=0.1)

        def several(state: Any, cs: torch.Tensor) -> Any:
            return repeated(step)(repeated(step)(state, cs[:2]), cs[2:])

        def kept(state: Any, cs: torch.Tensor) -> Any:
            for c in cs:
                state = step(state, c)
            return state

        def slopes(train: Callable) -> Any:
            cs = torch.linspace(0.5, 1, 5).double().requires_grad_()
            value = train(step.start(start), cs).params.square().sum()
            (first,) = torch.autograd.grad(value, cs, create_graph=True)
            return first, *torch.autograd.grad(first.square().sum(), cs)

        assert_trees_close(slopes(several), slopes(kept), 1e-10)

    def test_of_adam_is_that_of_torchs_formula(self):
        problem, step = Problem(20, lr=0.01), reversible_adam(loss, lr=rate)

        assert_trees_close(problem.backwards(step), problem.gradients(adam(problem, loss, 1e-8)), 1e-5)
        weights = [torch.nn.Parameter(p.clone()) for p in problem.params.values()]
        optimizer = torch.optim.Adam(weights, lr=1.0)
        for one in problem.steps():
            optimizer.param_groups[0]["lr"] = one["lr"].item()
            optimizer.zero_grad()
            loss(dict(zip(problem.params, weights, strict=True)), one, *problem.rest()).backward()
            optimizer.step()
        last = repeated(step)(step.start(problem.params), problem.each, *problem.rest())
        assert_trees_close(list(last.params.values()), [w.detach() for w in weights], 1e-6)

    @of_each
    def test_where_a_weight_has_no_gradient_at_all(self, make):
        """The root of Adam has an infinite slope at 0."""
        mask = torch.tensor([1.0, 1.0, 0.0]).double()
        step = make(lambda w, c: (c * (w * mask).square()).sum(), lr=0.1)
        start = step.start(torch.ones(3).double())
        slope = grad(lambda cs: repeated(step)(start, cs).params.square().sum())(torch.ones(4).double())
        assert slope.isfinite().all() and slope.abs().min() > 0

    def test_evaluates_the_gradient_of_each_step_once(self):
        calls = []

        def counted(w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return (c * w.square()).sum()

        step, cs = reversible_sgd(counted, lr=0.1), torch.ones(7, requires_grad=True)
        train = repeated(step)
        train(step.start(torch.ones(3)), cs).params.sum().backward()  # by a node from its second call on
        calls.clear()
        last = train(step.start(torch.ones(3)), cs).params.sum()
        assert len(calls) == 7
        last.backward()
        assert len(calls) == 14

    @pytest.mark.parametrize("make", [partial(reversible_sgd, momentum=0.5), reversible_adam], ids=OPTIMISERS)
    def test_keeps_no_state_in_memory(self, make):
        size = 1237

        def whole(t: torch.Tensor) -> bool:
            return t.numel() == size and t.untyped_storage().nbytes() >= 4 * size  # not a zero that is expanded

        def alive(steps: int) -> int:
            step, cs = make(lambda w, c: (c * w.sin()).sum(), lr=0.1), torch.ones(steps, requires_grad=True)
            last = repeated(step)(step.start(torch.ones(size)), cs)
            gc.collect()
            found = {t.data_ptr() for t in gc.get_objects() if type(t) is torch.Tensor and whole(t)}
            last.params.sum().backward()
            return len(found)

        few, many = alive(5), alive(70)
        assert many <= few + 1  # a word of 63 bits

    def test_of_a_loss_that_draws_random_numbers(self):
        def dropped(w: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return (c * F.dropout(w, 0.5).square()).sum()

        step, start, cs = reversible_sgd(dropped, lr=0.1), torch.ones(20).double(), torch.ones(8).double()
        cs.requires_grad_()

        def slope(train: Callable) -> torch.Tensor:
            torch.manual_seed(0)
            return torch.autograd.grad(train(step.start(start), cs).params.square().sum(), cs)[0]

        def kept(state: Any, cs: torch.Tensor) -> Any:
            for c in cs:
                state = step(state, c)
            return state

        assert_trees_close(slope(repeated(step)), slope(kept), 1e-12)
        with pytest.raises(InverseError, match="random numbers have changed"), torch.no_grad():
            invert(repeated(step))(repeated(step)(step.start(start), cs), cs)


class TestComposes:
    @of_each
    def test_with_the_laws_of_pairs(self, make):
        rand = Numbers(0)
        x, c = rand(4, 3), rand(4).sigmoid()
        step = make(lambda w, c: (c * torch.tanh(x @ w)).sum(), lr=lambda c: 0.1 * c.mean())
        table = laws.check_pair(step, step.start(rand(3)), c)
        assert not table.failed

    @of_each
    def test_with_torch_func(self, make):
        step = make(lambda w, c: (c * w.square()).sum(), lr=0.1)
        start, cs = Numbers(0)(3), Numbers(1)(2, 4).sigmoid()

        def value(train: Callable, cs: torch.Tensor) -> torch.Tensor:
            return train(step.start(start), list(cs)).params.square().sum()

        def kept(state: Any, cs: list) -> Any:
            for c in cs:
                state = step(state, c)
            return state

        of = [partial(value, train) for train in (repeated(step), chain(*[step] * 4), kept)]
        first, second, wanted = (vmap(grad(f))(cs) for f in of)
        assert_trees_close((first, second), (wanted, wanted), 1e-12)
        assert_trees_close(grad(of[0])(cs[0]), wanted[0], 1e-12)
        v = Numbers(2)(4)
        assert_trees_close(jvp(of[0], (cs[0],), (v,))[1], wanted[0] @ v, 1e-12)


class TestErrors:
    def test_of_arguments(self):
        with pytest.raises(ArgumentTypeError, match=r"^reversible_sgd\(f\): f is of type int"):
            reversible_sgd(3, lr=0.1)  # pyright: ignore[reportArgumentType]: that is the point
        with pytest.raises(ArgumentTypeError, match=r"lr is of type Tensor.* a function of the arguments"):
            reversible_sgd(loss, lr=torch.ones(()))  # pyright: ignore[reportArgumentType]: that is the point
        with pytest.raises(ArgumentTypeError, match="grid is of type int, but has to be a Grid"):
            reversible_sgd(loss, lr=0.1, grid=44)  # pyright: ignore[reportArgumentType]: that is the point
        with pytest.raises(ArgumentError, match="eps has to be a number of at least 0"):
            reversible_adam(loss, lr=0.1, eps=-1.0)
        with pytest.raises(ArgumentError, match="betas has to be a pair"):
            reversible_adam(loss, lr=0.1, betas=0.9)  # pyright: ignore[reportArgumentType]: that is the point

    def test_of_starts_and_states(self):
        step = reversible_sgd(lambda w: w.sum(), lr=0.1)
        with pytest.raises(ArgumentTypeError, match=r"start\(params\): params\['n'\] is torch.int64, but has to be"):
            step.start({"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)})
        with pytest.raises(ArgumentError, match="no tensors in params"):
            step.start({})
        for state in (torch.ones(2), reversible_adam(loss, lr=0.1).start(torch.ones(2))):
            with pytest.raises(ArgumentTypeError, match=r"has to come from its start\(params\)"):
                step(state)

    @of_each
    @pytest.mark.parametrize("slope", [1e4, -1e300, float("nan"), float("inf")])
    def test_of_numbers_out_of_range(self, make, slope):
        step = make(lambda w: slope * w.sum(), lr=1.0)
        with pytest.raises(RangeError, match="leave the range"):
            step(step.start(torch.ones(2).double()))
