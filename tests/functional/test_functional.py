"""`functional(model)`: a pure function of a module, whichever way modules reach each other and their parameters."""

import copy
import functools
import inspect
import io
import pickle
import sys
import threading
import time
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from invfunc import InvFuncWarning, batch_grad, functional
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-12


class Scaled(nn.Module):
    """A linear layer on another way to itself in each subclass."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("rate", torch.tensor(0.5))
        self.start()

    def start(self):
        """Attributes of a subclass."""

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


class Own(Scaled):
    def start(self):
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.ones(3))})
        self.twice = self.a

    def forward(self, x):
        return self.a(self.twice(x * self.weights[0])) @ self.weights[1] + self.named["shift"]


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


def frozen():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    return net


KINDS = {
    "attributes": Scaled,
    "containers": InAList,
    "of another": OfAnother,
    "methods": Methods,
    "parameter list, a module twice": Own,
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
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def made(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind().double()


def with_values(model, params):
    """A copy of the module whose own parameters have these values."""
    model = made(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params.get(name, p))
    return model


def numbers(params, seed=1):
    rand = Numbers(seed)
    return {name: rand(*p.shape) for name, p in params.items()}


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.mark.quick
@kinds
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


@pytest.mark.parametrize("kind", [Scaled, Own, hooked, KINDS["batch norm"], KINDS["parametrized"]])
def test_torch_compiles_it_without_a_break(kind):
    f, params = functional(made(kind))
    own, x = numbers(params), Numbers()(4, 3)
    torch.compiler.reset()
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert_trees_close(compiled(own, x), f(own, x), EXACT)


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


class TestTiedParameters:
    class Tied(Scaled):
        def start(self):
            self.b.weight = self.a.weight

    def test_stand_in_params_once_and_may_be_given_by_each_name(self):
        f, params = functional(made(self.Tied))
        assert "b.weight" not in params
        x, w = Numbers()(4, 3), Numbers(1)(3, 3)
        wanted = ((x @ w.T + params["a.bias"]).tanh() @ w.T + params["b.bias"]) * 0.5
        for names in (["a.weight"], ["b.weight"], ["a.weight", "b.weight"]):
            assert_trees_close(f(dict.fromkeys(names, w), x), wanted, EXACT)

    def test_have_one_value(self):
        f, params = functional(made(self.Tied))
        with pytest.raises(ArgumentError, match=r"'a.weight' and 'b.weight' are one parameter"):
            f({**params, "b.weight": torch.zeros(3, 3)}, Numbers()(4, 3))

    def test_of_a_module_that_is_there_twice_are_left_in_place(self):
        """`torch.func.functional_call` puts them back in the wrong order."""
        model = made(Own)
        f, params = functional(model)
        own = {name: 2 * p.detach() for name, p in model.named_parameters()}
        own |= {f"twice.{name}": own[f"a.{name}"] for name in ("weight", "bias")}
        before = dict(model.named_parameters(remove_duplicate=False))
        f(own, Numbers()(4, 3))
        now = dict(model.named_parameters(remove_duplicate=False))
        assert now.keys() == before.keys() and all(now[name] is p for name, p in before.items())


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False, wrap=lambda pair: pair):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.2), nn.Tanh()), nn.Linear(3, 3)
        self.reentrant, self.drop = reentrant, nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(x) * self.b.weight.sum()
        if self.reentrant is None:
            return self.b(self.a(x))
        return self.b(torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=self.reentrant))


@pytest.mark.quick
@pytest.mark.parametrize("reentrant", [False, True])
class TestCheckpointedParts:
    """`torch.utils.checkpoint` evaluates them again when the call is over."""

    def test_have_the_parameters_of_the_call(self, reentrant):
        found = []
        for kind in (reentrant, None):
            f, params = functional(made(lambda kind=kind: Checkpointed(kind)))
            own = numbers(params)
            for seed in (1, 2):  # the first call looks for such parts
                leaves = {name: p.clone().requires_grad_() for name, p in own.items()}
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    f(leaves, Numbers()(4, 3)).square().sum().backward()
                    found.append([*(p.grad for p in leaves.values()), torch.rand(1)])
        assert_trees_close(found[:2], found[2:], EXACT)

    def test_that_lead_past_the_copy_are_an_error(self, reentrant):
        model = made(lambda: Checkpointed(reentrant))
        forward, model.forward = model.forward, lambda x: forward(x)
        f, params = functional(model)
        with pytest.raises(ArgumentError, match=r"cannot be replaced, as a copy of the module reads it"):
            f({name: p.requires_grad_() for name, p in numbers(params).items()}, Numbers()(4, 3))


class TestKeptTensors:
    class Keeps(Scaled):
        def start(self):
            self.kept = [self.a.weight]

        def forward(self, x):
            return super().forward(x) @ self.kept[0]

    def test_are_an_error_where_others_are_given(self):
        f, params = functional(made(self.Keeps))
        for _ in range(2):
            with pytest.raises(ArgumentError, match=r"\(Keeps\): 'a.weight' cannot be replaced, as the module reads"):
                f(numbers(params), Numbers()(4, 3))

    def test_of_other_parameters_may_be_given_and_be_inputs(self):
        model = made(Scaled)
        f, _ = functional(model)
        a, b = model.a.weight, model.b.weight
        wanted = with_values(Scaled, {"a.weight": b, "b.weight": a})(a)
        assert_trees_close(f({"a.weight": b, "b.weight": a}, a), wanted, EXACT)

    def test_are_read_where_none_are(self):
        model, x = made(self.Keeps), Numbers()(4, 3)
        f, _ = functional(model)
        assert torch.equal(f(dict(model.named_parameters()), x), model(x))
        some = {"b.bias": model.b.bias + 1}
        assert_trees_close(f(some, x), model(x) + 0.5 * model.a.weight.sum(0), EXACT)


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
        with pytest.raises(ArgumentError, match=r"functional\(Linear\): params has 'heavy', which is not a parameter"):
            f({**params, "heavy": params["bias"]}, torch.ones(2, 3))

    def test_what_torch_jit_made(self):
        for model in (torch.jit.script(nn.Linear(3, 2)), nn.Sequential(torch.jit.script(nn.Linear(3, 2)))):
            with pytest.raises(ArgumentError, match="Give the module as it was before"):
                functional(model)

    def test_a_class_of_modules(self):
        with pytest.raises(ArgumentTypeError, match=r"functional\(Linear\(\.\.\.\)\)"):
            functional(nn.Linear)


# `functional(model)` in threads: each call has its own parameters.


@kinds
def test_in_threads(kind):
    """Calls of one function at different parameters, in threads that switch often."""
    f, params = functional(made(kind).eval())
    x, points = Numbers()(4, 3), [numbers(params, seed) for seed in range(3)]
    wanted = [f(p, x) for p in points]
    wrong, calls, interval = [], [], sys.getswitchinterval()
    end = time.perf_counter() + 0.1

    def work(p, expected):
        while time.perf_counter() < end and not wrong:
            calls.append(1)
            if not torch.equal(f(p, x), expected):
                wrong.append(expected)

    threads = [threading.Thread(target=work, args=job) for job in zip(points, wanted, strict=True)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and len(calls) > 20


# What a module computes once and keeps is computed of the parameters of each call.


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(Numbers()(3, 2))

    @cached_property
    def weight(self):
        return self.raw.exp()

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.mT


class Within(Cached):
    def __init__(self):
        super().__init__()
        self.part = Cached()

    def forward(self, x):
        return self.part(x) @ self.weight


each_kind = pytest.mark.parametrize("kind", [Cached, Within], ids=lambda kind: kind.__name__)
X = Numbers(1)(4, 3)


def others(params):
    return {name: p + 0.5 for name, p in params.items()}


def plain(kind, params):
    model = kind().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    return model(X).detach()


@each_kind
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "after a call of the module"])
def test_each_call_has_its_own_and_that_of_the_module_is_left_alone(kind, before):
    model = kind().double()
    if before:
        model(X)
    kept = vars(model).get("weight")
    f, params = functional(model)
    for given in (params, others(params), params):
        assert_trees_close(f(given, X), plain(kind, given), EXACT)
        assert_trees_close(torch.compile(f, backend="eager")(given, X), plain(kind, given), EXACT)
    assert vars(model).get("weight") is kept


@each_kind
def test_derivatives_reach_the_parameters(kind):
    f, params = functional(kind().double())

    def loss(params, x):
        return f(params, x).square().sum()

    first = torch.func.grad(loss)(params, X)
    assert all(g.any() for g in first.values())
    assert_trees_close(torch.func.grad(loss)(params, X), first, EXACT)
    assert_trees_close({k: g.sum(0) for k, g in batch_grad(loss)(params, X).items()}, first, EXACT)


class Keeping(nn.Module):
    """Keeps what it has computed from a parameter, as timm's attention does with its biases in eval mode."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias, self.cache = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), {}

    def forward(self, x):
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias.exp()
        return x * self.scale + self.cache["bias"]


@pytest.mark.parametrize("before", [False, True])
def test_a_parameter_of_which_something_is_kept_warns(before):
    """At the call that reads what is kept: its gradient is zero, as in plain autograd."""
    model = Keeping()
    if before:
        with torch.no_grad():
            model(torch.ones(2, 3))
    f, params = functional(model)

    def losses(p, x):
        return f(p, x).square().sum(1)

    if not before:
        assert batch_grad(losses)(params, torch.ones(2, 3))["bias"].all()
    with pytest.warns(
        InvFuncWarning, match="does not read 'bias', but a tensor that the module has kept in its 'cache'"
    ):
        assert not batch_grad(losses)(params, torch.ones(2, 3))["bias"].any()


def test_a_mode_of_its_own():
    """While the module trains: the weights and running statistics are those of today, and the module keeps its mode."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(8, 1, 4, 4), torch.randint(3, (8,))
    (f, params), (g, _) = functional(model, train=False), functional(model.eval(), train=True)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        each = batch_grad(lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none"))(params, x, y)
        optimizer.step()
        alone = copy.deepcopy(model).eval()
        assert torch.equal(f(params, x), alone(x)) and not torch.equal(f(params, x), model(x))
        assert model.training and each["1.weight"].shape == (8, 4)
    torch.manual_seed(1)
    trained = g(params, x)
    torch.manual_seed(1)
    assert torch.equal(trained, copy.deepcopy(model)(x)) and model[1].training
    assert torch.equal(torch.compile(f, backend="eager", fullgraph=True)(params, x), f(params, x))


def test_weights_that_torch_remembers():
    f, params = functional(made(lambda: parametrizations.orthogonal(nn.Linear(3, 3))))
    points, x = [params, numbers(params), numbers(params, 2)], Numbers()(4, 3)
    wanted = [f(p, x) for p in points]
    with parametrize.cached():
        found = [f(p, x) for p in points]
    assert_trees_close(found, wanted, EXACT)
