"""`functional(model)` where something leads past every copy of the module: seen on the first run, right or an error."""

import gc
import threading
import types
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from invfunc import ArgumentError, batch_grad, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT, made, numbers, with_values
from tests.strategies import Numbers


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer):
        self.layer = layer


@dataclass(slots=True)
class SlottedData:
    layer: nn.Module


LAYERS, BY_LAYER = [], weakref.WeakKeyDictionary()


class Through(nn.Module):
    """The first layer is found where no copy is looked for."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.start()

    def start(self):
        """What a subclass keeps."""

    def first(self):
        return self.a

    def forward(self, x):
        return self.b(self.first()(x).tanh())


class InSlots(Through):
    def start(self):
        self.holder = Slotted(self.a)

    def first(self):
        return self.holder.layer


class InSlottedData(InSlots):
    def start(self):
        self.holder = SlottedData(self.a)


class InAProxy(Through):
    def start(self):
        self.layers = types.MappingProxyType({"first": self.a})

    def first(self):
        return self.layers["first"]


class InAGlobalList(Through):
    def start(self):
        LAYERS[:] = [self.a]

    def first(self):
        return LAYERS[0]


class OfTheClass(Through):
    only: nn.Module

    def start(self):
        OfTheClass.only = self

    def first(self):
        return OfTheClass.only.a


class Weakly(Through):
    def start(self):
        object.__setattr__(self, "above", weakref.proxy(self))

    def first(self):
        return self.above.a


class OwnSlots(Through):
    __slots__ = ("factor",)

    def start(self):
        object.__setattr__(self, "factor", 2.0)

    def forward(self, x):
        return super().forward(x) * self.factor


class KeyedByLayer(Through):
    def start(self):
        BY_LAYER[self.a] = 2.0
        self.a.register_forward_hook(lambda layer, args, out: out * BY_LAYER[layer])


class Caught(InAGlobalList):
    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x


class Many(Through):
    """More things than anyone looks through."""

    def start(self):
        self.table = {i: [i] for i in range(5000)}
        self.table["first"] = [self.a]

    def first(self):
        return self.table["first"][0]


KINDS = [InSlots, InSlottedData, InAProxy, InAGlobalList, OfTheClass, Weakly, OwnSlots, KeyedByLayer, Caught, Many]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
class TestIsTheModuleAtOtherParameters:
    def test_value_and_gradient(self, kind):
        x, c = Numbers()(4, 3), Numbers(9)(4, 3)
        point = numbers(functional(made(kind))[1])
        plain = with_values(kind, point)
        wanted = plain(x)
        gradients = torch.autograd.grad((wanted * c).sum(), list(plain.parameters()))
        f, params = functional(made(kind))
        before = {name: p.clone() for name, p in params.items()}
        for _ in range(2):
            assert_trees_close(f(point, x), wanted.detach(), EXACT)
            found = torch.func.grad(lambda p: (f(p, x) * c).sum())(point)
            assert_trees_close([found[name] for name, _ in plain.named_parameters()], list(gradients), EXACT)
        assert_trees_close(params, before, 0)

    def test_shares(self, kind):
        x = Numbers()(4, 3)
        f, params = functional(made(kind))
        point = numbers(params)
        found = batch_grad(lambda p, x: f(p, x).square().sum(1))(point, x)
        for n in range(4):
            alone = torch.func.grad(lambda p, n=n: f(p, x[n : n + 1]).square().sum())(point)
            assert_trees_close({name: g[n] for name, g in found.items()}, alone, EXACT)


@pytest.mark.quick
def test_random_numbers_are_drawn_once():
    class Dropped(InAGlobalList):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x) + torch.randn(3))

    f, params = functional(made(Dropped))
    point, x, found = numbers(params), Numbers()(4, 3), []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(3)
            found += [f(point, x), torch.rand(1)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.quick
def test_an_error_of_the_caller_is_raised_as_it_is_and_proves_nothing():
    f, params = functional(made(Through))
    point, x = numbers(params), Numbers()(4, 3)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f(point)
    f(point, x)
    said = []

    def work():
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a copy is as good as before
            said.append(f(point, x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(said) == 1


@pytest.mark.quick
class TestWhatCannotBeReplaced:
    def test_is_named(self):
        class Keeps(Through):
            def start(self):
                self.kept = types.MappingProxyType({"w": self.a.weight})

            def forward(self, x):
                return super().forward(x) @ self.kept["w"]

        f, params = functional(made(Keeps))
        with pytest.raises(ArgumentError, match="'a.weight' cannot be replaced"):
            f(numbers(params), Numbers()(4, 3))
        assert f({"b.bias": torch.zeros(3).double()}, Numbers()(4, 3)).shape == (4, 3)

    def test_a_checkpointed_part(self):
        """What is computed again when the parameters are no longer there."""

        class Again(InAGlobalList):
            def forward(self, x):
                return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

        f, params = functional(made(Again))
        own = {name: p.requires_grad_() for name, p in numbers(params).items()}
        with pytest.raises(ArgumentError, match="checkpoint f as a whole"):
            f(own, Numbers()(4, 3))
        f, params = functional(made(InAGlobalList))
        whole = torch.utils.checkpoint.checkpoint(f, own, Numbers()(4, 3), use_reentrant=False).square().sum()
        plain = f(own, Numbers()(4, 3)).square().sum()
        leaves = list(own.values())
        assert_trees_close(torch.autograd.grad(whole, leaves), torch.autograd.grad(plain, leaves), EXACT)


@pytest.mark.quick
class TestTiedParameters:
    class Tied(Through):
        def start(self):
            self.b.weight = self.a.weight

    def test_with_two_values(self):
        f, params = functional(made(self.Tied))
        point = numbers(params)
        with pytest.raises(ArgumentError, match=r"'b.weight', for one parameter of the module, 'a.weight'"):
            f({**point, "b.weight": torch.zeros(3, 3)}, Numbers()(4, 3))
        given = {**point, "b.weight": point["a.weight"]}
        assert torch.equal(f(given, Numbers()(4, 3)), f(point, Numbers()(4, 3)))

    @pytest.mark.parametrize("name", ["a.weight", "b.weight"])
    def test_that_are_frozen_where_the_module_cannot_be_copied(self, name):
        class Frozen(InAGlobalList):
            def start(self):
                super().start()
                self.b.weight = self.a.weight
                self.a.weight.requires_grad_(False)

        f, params = functional(made(Frozen))
        assert "a.weight" not in params and "b.weight" not in params
        w, x = Numbers()(3, 3), Numbers(1)(4, 3)
        wanted = (x @ w.T + params["a.bias"]).tanh() @ w.T + params["b.bias"]
        assert_trees_close(f({name: w}, x), wanted, EXACT)


@pytest.mark.quick
class TestFromCallToCall:
    def test_what_a_call_leaves_is_let_go_by_the_next(self):
        class Last(Through):
            def forward(self, x):
                self.last = super().forward(x)
                return self.last

        f, params = functional(made(Last))
        seen = [weakref.ref(f(numbers(params), Numbers()(4, 3))) for _ in range(5)]
        gc.collect()
        assert sum(r() is not None for r in seen) <= 2

    def test_an_object_that_comes_to_lead_to_the_module(self):
        class Chosen(Through):
            def start(self):
                self.choice = Slotless()

            def first(self):
                return self.choice.layer or self.b

        f, params = functional(model := made(Chosen))
        point, x = numbers(params), Numbers()(4, 3)
        f(point, x)
        model.choice.layer = model.a
        assert torch.equal(f(point, x), functional(made(Through))[0](point, x))

    def test_an_object_that_keeps_a_parameter_that_was_left_out(self):
        class Keeps(Through):
            def start(self):
                self.kept = types.SimpleNamespace(w=self.a.weight)

            def forward(self, x):
                return super().forward(x) @ self.kept.w

        f, params = functional(made(Keeps))
        point, x = numbers(params), Numbers()(4, 3)
        f({"b.bias": point["b.bias"]}, x)
        assert_trees_close(f(point, x), functional(made(Through))[0](point, x) @ point["a.weight"], EXACT)

    def test_attributes_that_a_helper_sets_for_itself(self):
        class Watcher:
            def __init__(self, model):
                self.model, self.out, self.count, self.outs = model, None, 0, []
                model.a.register_forward_hook(self.keep)

            def keep(self, layer, args, out):
                self.out, self.count = out, self.count + 1
                self.outs.append(out)

        watcher = Watcher(model := made(Through))
        f, params = functional(model)
        point, x = numbers(params), Numbers()(4, 3)
        f(point, x), f(point, x)
        assert watcher.model is model and watcher.count == 2 and watcher.out is watcher.outs[1]
        assert_trees_close(watcher.out, x @ point["a.weight"].T + point["a.bias"], EXACT)

    def test_weights_that_torch_remembers(self):
        f, params = functional(made(lambda: parametrizations.orthogonal(nn.Linear(3, 3))))
        points, x = [params, numbers(params), numbers(params, 2)], Numbers()(4, 3)
        wanted = [f(p, x) for p in points]
        with parametrize.cached():
            found = [f(p, x) for p in points]
        assert_trees_close(found, wanted, EXACT)


class Slotless:
    layer = None
