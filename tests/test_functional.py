"""`functional(model)`: a pure function of a module, which is the same in threads, in copies and for any way in which
modules reach each other and their parameters."""

import copy
import functools
import inspect
import io
import pickle
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from invfunc import ArgumentError, ArgumentTypeError, batch_grad, diag_ggn, functional
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Scaled(nn.Module):
    """A linear layer on another way to itself in each subclass."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("rate", torch.tensor(0.5))
        self.start()

    def start(self):
        """What a subclass keeps."""

    def forward(self, x):
        """One layer after the other."""
        return self.b(self.a(x).tanh()) * self.rate


class InAList(Scaled):
    def start(self):
        self.path, self.by_name = [self.a, torch.tanh], {"last": (self.b, 2.0)}

    def forward(self, x):
        for part in self.path:
            x = part(x)
        layer, factor = self.by_name["last"]
        return layer(x) * factor


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.of = [embedding]

    def forward(self, x):
        return F.linear(x, self.of[0].weight)


class OfAnother(Scaled):
    def start(self):
        self.hidden = [Head(self.a)]

    def forward(self, x):
        return self.hidden[0](self.a(x))


class Methods(Scaled):
    def start(self):
        self.act, self.partly = self.last, functools.partial(self.last, scale=3.0)
        self.forward = functools.partial(Methods.through, self)

    def last(self, x, scale=1.0):
        return self.b(x) * scale

    def through(self, x):
        return self.act(self.a(x)) + self.partly(x)


class Closures(Scaled):
    def start(self):
        def again(x, depth=2):
            return x if depth == 0 else again(self.a(x).tanh(), depth - 1)

        weight = self.b.weight
        self.act, self.times = again, lambda x, w=weight: x @ w.T + F.linear(x, weight)

    def forward(self, x):
        return self.times(self.act(x))


class Helper:
    def __init__(self, owner):
        self.owner, self.scale = owner, 2.0

    def __call__(self, x):
        return self.owner.b(self.owner.a(x)) * self.scale


class Helped(Scaled):
    def start(self):
        self.helper, self.parent = Helper(self), weakref.ref(self)

    def forward(self, x):
        return self.helper(x) + self.parent().a(x)


class Far(Helper):
    def __init__(self, owner):
        self.next, self.scale = Helper(owner), 2.0

    def __call__(self, x):
        return self.next(x).sin()


class FarAway(Scaled):
    """What leads to the module is not copied: the parameters are put into the module itself."""

    def start(self):
        self.helper = Far(self)

    def forward(self, x):
        return self.helper(x)


class ByName(Scaled):
    def forward(self, x):
        return BY_NAME.b(self.a(x))


BY_NAME = ByName()


class Own(Scaled):
    def start(self):
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.ones(3))})
        self.again = [self.weights[1]]
        self.twice = self.a

    def forward(self, x):
        return self.twice(x * self.weights[0]) @ self.again[0] + self.named["shift"]


def hooked():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
    net[2].register_forward_hook(lambda module, args, out: out + net[0](out))
    return net


def recurrent(kind):
    class First(kind):
        def forward(self, x):
            return super().forward(x[:, None])[0][:, 0]

    return First(3, 3, num_layers=2)


def scripted():
    return nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Tanh())


def frozen():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    return net


KINDS = {
    "attributes": Scaled,
    "containers": InAList,
    "of another": OfAnother,
    "methods": Methods,
    "closures": Closures,
    "objects": Helped,
    "parameter list": Own,
    "hooks": hooked,
    "frozen": frozen,
    "parametrized": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh()),
    "spectral norm, eval": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 3))).eval(),
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Tanh()),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "attention": lambda: nn.TransformerEncoderLayer(3, 1, 2, dropout=0.0),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
}
IN_PLACE = {"far objects": FarAway, "global name": lambda: BY_NAME, "scripted part": scripted}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
all_kinds = pytest.mark.parametrize("kind", [*KINDS.values(), *IN_PLACE.values()], ids=[*KINDS, *IN_PLACE])


def made(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def with_values(model, params):
    """What the module gives that has these values itself."""
    model = made(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params.get(name, p))
    return model


def numbers(params, seed=1):
    rand = Numbers(seed)
    return {name: rand(*p.shape) for name, p in params.items()}


@all_kinds
class TestIsTheModuleAtOtherParameters:
    def test_value(self, kind):
        f, params = functional(made(kind))
        x, own = Numbers()(4, 3), numbers(params)
        assert_trees_close(f(own, x), with_values(kind, own)(x).detach(), EXACT)

    def test_gradient(self, kind):
        f, params = functional(made(kind))
        x, own = Numbers()(4, 3), numbers(params)
        model = with_values(kind, own)
        leaves = [dict(model.named_parameters())[name] for name in own]
        wanted = torch.autograd.grad(model(x).square().sum(), leaves, materialize_grads=True)
        found = torch.func.grad(lambda p: f(p, x).square().sum())(own)
        assert_trees_close(found, dict(zip(own, wanted, strict=True)), 1e-10)

    def test_the_module_is_as_before(self, kind):
        model = made(kind)
        f, params = functional(model)
        x = Numbers()(4, 3)
        model.eval()
        before, state = model(x), {name: (v.clone(), v._version) for name, v in model.state_dict().items()}
        f(numbers(params), x)
        model.train()
        f(numbers(params), x)
        model.eval()
        assert {name: v._version for name, v in model.state_dict().items()} == {n: v for n, (_, v) in state.items()}
        assert torch.equal(model(x), before)


@kinds
def test_in_threads(kind):
    """Calls of one function at different parameters, and of the module itself, in threads that switch often."""
    model = made(kind)
    f, params = functional(model)
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    model.eval()
    wanted, plain = [f(p, x) for p in points], model(x).detach()
    wrong, calls, interval = [], [], sys.getswitchinterval()
    end = time.perf_counter() + 0.25

    def work(run, expected):
        while time.perf_counter() < end and not wrong:
            calls.append(1)
            if not torch.equal(run(), expected):
                wrong.append(expected)

    jobs = [(lambda p=p: f(p, x), z) for p, z in zip(points, wanted, strict=True)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        work(lambda: model(x).detach(), plain)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and len(calls) > 50


@pytest.mark.parametrize("kind", IN_PLACE.values(), ids=IN_PLACE)
def test_calls_wait_for_each_other_where_the_module_cannot_be_copied(kind):
    f, params = functional(made(kind))
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    wanted, wrong = [f(p, x) for p in points], []

    def work(p, expected):
        for _ in range(100):
            if not torch.equal(f(p, x), expected):
                wrong.append(p)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work, args=job) for job in zip(points, wanted, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert any("other threads must not call the module" in str(w.message) for w in said)


def test_statistics_in_threads():
    model = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    f, params = functional(model)
    x, y = Numbers()(5, 3), Numbers(1)(5, 2)
    statistics = [batch_grad(lambda p, x, y: (f(p, x) - y).square().sum(1)), diag_ggn(f, F.mse_loss)] * 2
    points = [numbers(params, seed) for seed in range(4)]
    wanted = [t(p, x, y) for t, p in zip(statistics, points, strict=True)]
    plain, found, running = model(x).detach(), [[] for _ in points], [True]

    def work(place):
        for _ in range(40):
            found[place].append(statistics[place](points[place], x, y))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        running.append(torch.equal(model(x), plain))
    assert all(running)
    for results, expected in zip(found, wanted, strict=True):
        assert len(results) == 40
        for result in results:
            assert_trees_close(result, expected, EXACT)


class TestCopies:
    @pytest.mark.parametrize("kind", [k for name, k in KINDS.items() if name != "weight_norm"])  # its modules do not
    def test_deep_copies_have_a_module_of_their_own(self, kind):
        f, params = functional(made(kind))
        x = Numbers()(4, 3)
        expected = f(params, x)
        other = copy.deepcopy(f)
        assert_trees_close(other(params, x), expected, EXACT)
        assert inspect.signature(other) == inspect.signature(f) and other.__name__ == f.__name__

    @pytest.mark.parametrize("kind", [Scaled, InAList, OfAnother, Own, hooked], ids=lambda k: k.__name__)
    def test_pickle_as_the_module_does(self, kind):
        model = made(kind)
        f, params = functional(model)
        try:
            pickle.dumps(model)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            with pytest.raises(type(error)):
                pickle.dumps(f)
            return
        x = Numbers()(4, 3)
        assert_trees_close(pickle.loads(pickle.dumps(f))(params, x), f(params, x), EXACT)
        stored = io.BytesIO()
        torch.save(f, stored)
        stored.seek(0)
        assert_trees_close(torch.load(stored, weights_only=False)(params, x), f(params, x), EXACT)


class Counting(nn.Module):
    """Keeps what it needs for its loss, and makes a layer when it is first called."""

    def __init__(self):
        super().__init__()
        self.layer, self.divergence, self.seen = nn.Linear(3, 3), None, []

    def forward(self, x):
        if not hasattr(self, "head"):
            self.head = nn.Linear(3, 2).double()
        self.divergence = self.layer.weight.square().sum()
        self.seen.append(len(x))
        self.current = self.layer
        return self.head(self.layer(x))


class TestWhatIsLeftOnTheModule:
    def test_attributes_that_forward_sets_can_be_read_afterwards(self):
        model = made(Counting)
        f, params = functional(model)
        own, x = numbers(params), Numbers()(4, 3)
        first = f(own, x)
        assert torch.equal(model.divergence, own["layer.weight"].square().sum())
        assert torch.equal(f(own, x), first) and model.current is model.layer and model.seen == [4, 4]

        def loss(p, x):
            return f(p, x).square().sum(1).mean() + model.divergence

        found, plain = torch.func.grad(loss)(own, x), torch.func.grad(lambda p: f(p, x).square().sum(1).mean())(own)
        assert_trees_close(found["layer.weight"], plain["layer.weight"] + 2 * own["layer.weight"], 1e-10)

    def test_in_another_thread_a_warning_says_that_they_are_not_kept(self):
        model = made(Counting)
        f, params = functional(model)
        x = Numbers()(4, 3)
        f(params, x)
        kept, said = model.divergence, []

        def work():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                f(numbers(params), x)
                f(numbers(params), x)
            said.extend(str(w.message) for w in caught)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert model.divergence is kept and len(said) == 1 and "'divergence'" in said[0]

    def test_what_hooks_put_there_for_the_call_is_not(self):
        model = made(lambda: nn.utils.weight_norm(nn.Linear(3, 3)))
        before = model.weight
        f, params = functional(model)
        f(numbers(params), Numbers()(4, 3))
        assert model.weight is before

    def test_a_recomputed_part_is_that_of_the_call(self):
        """`torch.utils.checkpoint` evaluates again when the call is over."""

        class Recomputed(Scaled):
            def forward(self, x):
                return torch.utils.checkpoint.checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False)

        f, params = functional(made(Recomputed))
        own = {name: p.requires_grad_() for name, p in numbers(params).items()}
        x = Numbers()(4, 3)
        found = torch.autograd.grad(f(own, x).square().sum(), [own["a.weight"], own["a.bias"]])
        plain = torch.tanh(F.linear(x, own["a.weight"], own["a.bias"])).square().sum()
        assert_trees_close(found, torch.autograd.grad(plain, [own["a.weight"], own["a.bias"]]), EXACT)


class TestAtTheCall:
    def test_mode_and_hooks_and_layers_are_those_of_the_module(self):
        model = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.9), nn.BatchNorm1d(3)))
        f, params = functional(model)
        x = Numbers()(4, 3)
        running = model[2].running_mean.clone()
        torch.manual_seed(1)
        f(params, x)
        assert torch.equal(model[2].running_mean, running)
        model.eval()
        assert_trees_close(f(params, x), model(x).detach(), EXACT)
        handle = model[0].register_forward_hook(lambda module, args, out: 2 * out)
        assert_trees_close(f(params, x), model(x).detach(), EXACT)
        handle.remove()
        model[0].weight = nn.Parameter(torch.zeros(3, 3, dtype=x.dtype))
        assert_trees_close(f({**params, "0.bias": 0 * params["0.bias"]}, x), with_zero_bias(model, params, x), EXACT)

    def test_parameters_that_are_left_out_are_the_modules(self):
        model = made(Scaled)
        f, params = functional(model)
        x, own = Numbers()(4, 3), numbers(params)
        some = {"a.weight": own["a.weight"]}
        expected = with_values(Scaled, some)(x).detach()
        assert_trees_close(f(some, x), expected, EXACT)
        assert_trees_close(f({**dict.fromkeys(params), **some}, x), expected, EXACT)
        buffers = {**own, "rate": torch.tensor(3.0, dtype=x.dtype)}
        assert_trees_close(f(buffers, x), 6 * f(own, x), EXACT)


def with_zero_bias(model, params, x):
    return model[2](x @ params["0.weight"].T).detach()


class TestSignature:
    def test_is_that_of_forward(self):
        class Masked(nn.Module):
            def forward(self, tokens, mask=None, *, scale: float = 1.0):
                return tokens

        f, _ = functional(Masked())
        assert str(inspect.signature(f)) == "(params, /, tokens, mask=None, *, scale: float = 1.0)"
        assert f.__name__ == "Masked" and repr(f) == "functional(Masked)"

    def test_names_the_arguments_in_errors(self):
        f, params = functional(nn.Bilinear(2, 3, 1))
        with pytest.raises(ArgumentError, match=r"input1 has 4 samples but input2 has 3"):
            batch_grad(f)(params, torch.ones(4, 2), torch.ones(3, 3))

    def test_a_parameter_of_forward_may_be_called_params(self):
        class Module(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 3)

            def forward(self, x, params=1.0):
                return self.layer(x) * params

        f, p = functional(Module())
        x = torch.ones(2, 3)
        assert torch.equal(f(p, x, params=2.0), 2 * f(p, x))
        assert list(inspect.signature(f).parameters) == ["module_params", "x", "params"]

    def test_another_method(self):
        class Coder(nn.Sequential):
            def encode(self, x, times=1):
                return self[0](x) * times

        model = made(lambda: Coder(nn.Linear(3, 2), nn.Linear(2, 3)))
        f, params = functional(model.encode)
        x, own = Numbers()(4, 3), numbers(params)
        assert str(inspect.signature(f)) == "(params, /, x, times=1)" and f.__name__ == "Coder.encode"
        assert_trees_close(f(own, x, times=2), 2 * F.linear(x, own["0.weight"], own["0.bias"]), EXACT)
        assert_trees_close(copy.deepcopy(f)(own, x), f(own, x), EXACT)


class TestErrors:
    @pytest.mark.parametrize("wrong", [list, tuple, iter], ids=["list", "tuple", "iterator"])
    def test_a_list_of_parameters(self, wrong):
        model = nn.Linear(3, 2)
        f, _ = functional(model)
        with pytest.raises(ArgumentTypeError, match=r"has to be the dict .* dict\(model.named_parameters\(\)\)"):
            f(wrong(model.parameters()), torch.ones(2, 3))
        f(dict(model.named_parameters()), torch.ones(2, 3))

    def test_an_unknown_name(self):
        f, params = functional(nn.Linear(3, 2))
        with pytest.raises(ArgumentError, match=r"functional\(Linear\): params has 'heavy', which is no parameter"):
            f({**params, "heavy": params["bias"]}, torch.ones(2, 3))

    def test_a_class_of_modules(self):
        with pytest.raises(ArgumentTypeError, match=r"functional\(Linear\(\.\.\.\)\)"):
            functional(nn.Linear)
