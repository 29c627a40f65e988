"""Modules that reach each other and their parameters in any way, for the laws of `functional`."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

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
