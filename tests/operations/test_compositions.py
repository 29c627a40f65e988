"""Decompositions of torch's fused functions equal them: values, gradients and random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.overrides import TorchFunctionMode

from invfunc import batch_grad, batch_l2_grad, functional, gram, tree, variance
from invfunc.operations.operation import OPERATIONS
from invfunc.operations.recurrent import Steps, steps_at_once
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.operations.test_rules import having
from tests.rows import generic
from tests.strategies import SIZES, Numbers

EXACT = {torch.float64: 1e-12, torch.float32: 1e-4}
LAYERS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn_tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "lstm_cell": (nn.LSTMCell, {}),
    "gru_cell": (nn.GRUCell, {}),
    "rnn_tanh_cell": (nn.RNNCell, {"nonlinearity": "tanh"}),
    "rnn_relu_cell": (nn.RNNCell, {"nonlinearity": "relu"}),
}
OPTIONS = st.tuples(st.integers(1, 2), st.booleans())
MODES = ["sum", "weighted", "mean", "max"]
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


COMPOSITIONS = {name: OPERATIONS[name].composed for name in having("composed")}


class WrittenOut(TorchFunctionMode):
    """Calls of the functions that have a composition run as that."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in COMPOSITIONS:
            self.called.append(name)
        return COMPOSITIONS.get(name, func)(*args, **(kwargs or {}))


class AtOnce(WrittenOut):
    """The same with recurrent layers at all time steps at once, as they run where first derivatives are taken."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in LAYERS:
            return super().__torch_function__(func, types, args, kwargs)
        rows = not isinstance(args[3], bool)
        layers = steps_at_once(func.__name__, args, ())
        w_hh = args[3 if rows else 2][1]
        assert (layers is None) == (func.__name__ == "lstm" and 4 * w_hh.shape[1] < len(w_hh))  # of a projection
        self.called.append(func.__name__)
        return (layers or COMPOSITIONS[func.__name__])(*args)


@dataclass
class Calls:
    """`f(*args)`; the floating-point tensors among the arguments are differentiated."""

    called: str
    f: Any
    args: Any

    def __repr__(self) -> str:
        return self.called

    def outcome(self, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, torch.Tensor]:
        """Values, gradients in a direction, and the state of the generator."""
        args = tree.map_tensors(
            lambda x: x.clone().requires_grad_(x.is_floating_point()), moved(self.args, dtype, device)
        )
        torch.manual_seed(1)
        values = self.f(*args)
        state, rand = torch.get_rng_state(), Numbers(2)
        total = sum((z * rand(*z.shape).to(z)).sum() for z in tree.tensors(values))
        slopes = torch.autograd.grad(total, [x for x in tree.tensors(args) if x.requires_grad])
        return tree.map_tensors(torch.Tensor.detach, values), slopes, state

    def assert_equals_torch(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        with torch.random.fork_rng():
            with torch.backends.cudnn.flags(enabled=name not in LAYERS):  # it has gradients in training mode alone
                values, slopes, state = self.outcome(device, dtype)
            for way in (WrittenOut, AtOnce) if name in LAYERS else (WrittenOut,):
                with way() as mode:
                    found, found_slopes, found_state = self.outcome(device, dtype)
                assert mode.called == [name]
                assert_trees_close(found, values, EXACT[dtype])
                assert_trees_close(found_slopes, slopes, EXACT[dtype])
                assert torch.equal(found_state, state)


def with_weights(module: nn.Module, rand: Numbers) -> tuple[Any, dict[str, torch.Tensor]]:
    """A module as a function of its weights too, and weights for it."""
    weights = {name: rand(*p.shape) for name, p in module.named_parameters()}
    return lambda weights, *args: torch.func.functional_call(module, weights, args), weights


@st.composite
def layers(draw, name: str) -> Calls:
    """A recurrent module with drawn options, batched or not, with initial states or without."""
    rand, (make, options) = Numbers(), LAYERS[name]
    steps, n, width, hidden = draw(SIZES), draw(SIZES), draw(SIZES), draw(st.integers(2, 4))
    number, two, first, unbatched = draw(st.integers(1, 3)), *(draw(st.booleans()) for _ in range(3))
    options = options | {"num_layers": number, "bidirectional": two, "batch_first": first, "bias": draw(st.booleans())}
    options["dropout"] = draw(st.sampled_from([0.0, 0.4, 1.0])) if number > 1 else 0.0
    if name == "lstm":
        options["proj_size"] = draw(st.integers(0, hidden - 1))
    module = make(width, hidden, **options).train(draw(st.booleans()))
    f, weights = with_weights(module, rand)
    x = rand(steps, width) if unbatched else rand(*((n, steps) if first else (steps, n)), width)
    args: list[Any] = [weights, x]
    if draw(st.booleans()):
        batch = [number * (1 + two), *([] if unbatched else [n])]
        h, c = rand(*batch, options.get("proj_size") or hidden), rand(*batch, hidden)
        args.append((h, c) if name == "lstm" else h)
    return Calls(f"{module}, train={module.training}, {len(args)} arguments, {tuple(x.shape)}", f, args)


@st.composite
def packed(draw, name: str) -> Calls:
    """A recurrent module on sequences of different lengths, with initial states or without."""
    rand, (make, options) = Numbers(), LAYERS[name]
    lengths, width, number, two = draw(st.lists(SIZES, min_size=1, max_size=4)), draw(SIZES), *draw(OPTIONS)
    options = options | {"num_layers": number, "bidirectional": two, "dropout": 0.4 if number > 1 else 0.0}
    module = make(width, 3, **options).train(draw(st.booleans()))
    f, weights = with_weights(module, rand)
    data, sizes, *_ = pack_sequence([rand(length, width) for length in lengths], enforce_sorted=False)
    h = [rand(number * (1 + two), len(lengths), 3) for _ in range(draw(st.integers(0, 1)) * (1 + (name == "lstm")))]

    def call(weights: dict[str, torch.Tensor], data: torch.Tensor, *h: torch.Tensor) -> Any:
        found, last = f(weights, PackedSequence(data, sizes), *([h if name == "lstm" else h[0]] if h else []))
        return found.data, last

    return Calls(f"{module}, train={module.training}, {len(h)} states, {lengths}", call, [weights, data, *h])


@st.composite
def cells(draw, name: str) -> Calls:
    """A cell with drawn options, batched or not, with a state or without."""
    rand, (make, options) = Numbers(), CELLS[name]
    n, width, hidden = draw(st.lists(SIZES, max_size=1)), draw(SIZES), draw(SIZES)
    f, weights = with_weights(make(width, hidden, bias=draw(st.booleans()), **options), rand)
    args: list[Any] = [weights, rand(*n, width)]
    if draw(st.booleans()):
        args.append((rand(*n, hidden), rand(*n, hidden)) if name == "lstm_cell" else rand(*n, hidden))
    return Calls(f"{name} with {len(args)} arguments, hidden {hidden}, bias {len(weights) > 2}", f, args)


@st.composite
def bags(draw, mode: str) -> Calls:
    """Bags of few words with equal entries; one bag has nothing but the padding, where there is one."""
    rand, many = Numbers(draw(st.integers(0, 9))), draw(SIZES)
    words, padding = rand.below(many, draw(SIZES), draw(SIZES)), draw(st.none() | st.integers(-many, many - 1))
    if padding is not None:
        words = torch.cat([words, torch.full_like(words[:1], padding % many)])
    options = {"mode": "sum" if mode == "weighted" else mode, "padding_idx": padding}
    args = [words, rand.below(2, many, draw(SIZES)).double(), *([rand(*words.shape)] if mode == "weighted" else [])]

    def f(words: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        return F.embedding_bag(words, weight, per_sample_weights=scales, **options)

    return Calls(f"{mode} of bags, padding_idx={padding}, words {words.tolist()}", f, args)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=20)
@given(data=st.data())
def test_layers_equal_torch(name, data, device, dtype):
    """CUDA draws the masks of dropout in a sequence of its own."""
    if device.type == "cuda":
        calls = data.draw(layers(name).filter(lambda c: "dropout" not in c.called or "train=False" in c.called))
    else:
        calls = data.draw(layers(name))
    calls.assert_equals_torch(name, device, dtype)


@pytest.mark.parametrize("name", LAYERS)
@given(data=st.data())
def test_layers_of_packed_sequences_equal_torch(name, data, device, dtype):
    if device.type == "cpu":
        data.draw(packed(name)).assert_equals_torch(name, device, dtype)


@pytest.mark.parametrize("name", CELLS)
@given(data=st.data())
def test_cells_equal_torch(name, data, device, dtype):
    data.draw(cells(name)).assert_equals_torch(name, device, dtype)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20)
@given(data=st.data())
def test_bags_equal_torch(mode, data, device, dtype):
    data.draw(bags(mode)).assert_equals_torch("embedding_bag", device, dtype)


LABELS, LENGTHS = torch.tensor([2, 0, 1, 1]), torch.tensor([3, 3, 1])
ROWS = (Numbers()(2, 2), Numbers(1)(0, 2), Numbers(2)(3, 2))
OTHERS = {
    "_weight_norm": Calls("weight_norm", torch._weight_norm, (Numbers()(3, 2), Numbers(1)(3, 1))),
    "prelu": Calls("prelu", F.prelu, (Numbers()(4, 2, 3), Numbers(1)(2))),
    "cdist": Calls("cdist", torch.cdist, (Numbers()(2, 4, 3), Numbers(1)(2, 5, 3))),
    "pad_sequence": Calls("pad_sequence", lambda *rows: pad_sequence(rows, padding_value=2.0), ROWS),
    "_pack_padded_sequence": Calls(
        "pack", lambda x: pack_padded_sequence(x, LENGTHS, True).data, (Numbers()(3, 4, 2),)
    ),
    "_pad_packed_sequence": Calls(
        "pad", lambda x: pad_packed_sequence(PackedSequence(x, LENGTHS), False, 2.0, 4)[0], (Numbers()(7, 2),)
    ),
    "msort": Calls("msort", torch.msort, (Numbers()(4, 3),)),
    "scaled_dot_product_attention": Calls(
        "attention",
        partial(F.scaled_dot_product_attention, scale=0.7),
        (*(Numbers(i)(2, 3, 4, 2) for i in range(3)), Numbers(3)(3, 4, 4)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_equal_torch(name, device, dtype):
    if device.type == "cpu":
        OTHERS[name].assert_equals_torch(name, device, dtype)


def test_grouped_products_equal_torch(device):
    """Torch has none of float64, and leaves rows behind the last end as they are."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
    calls = Calls("grouped_mm", partial(F.grouped_mm, offs=ends), (Numbers()(5, 4), Numbers(1)(3, 4, 4)))
    if device.type == "cpu":
        calls.assert_equals_torch("_grouped_mm", device, torch.float32)


def test_every_composition_has_a_law():
    assert {*LAYERS, *CELLS, *OTHERS, "embedding_bag", "_grouped_mm", "bilinear"} == set(COMPOSITIONS)


WORDS, TABLE = torch.zeros(2, 3, dtype=torch.long), torch.ones(4, 2)


# Recurrent layers at all time steps at once: where they are, and that nothing else shows

TIGHT, N, STEPS, WIDTH, UNITS = 1e-10, 4, 3, 2, 3
KINDS = [nn.LSTM, nn.GRU, nn.RNN]
kinds = pytest.mark.parametrize("kind", KINDS)


def recurrent_layers(kind: type, **options):
    """A function of the weights of a layer, and weights for it."""
    f, params = functional(kind(WIDTH, UNITS, batch_first=True, **options).double())
    rand = Numbers()
    return f, {name: rand(*p.shape) / 2 for name, p in params.items()}


def energies(out) -> torch.Tensor:
    """A number of each sample that depends on all that a layer returns."""
    output, last = out
    parts = [
        output.square().sum((1, 2)),
        *(h.pow(3).sum((0, 2)) for h in (last if isinstance(last, tuple) else (last,))),
    ]
    return torch.stack(parts).sum(0)


def given_to(kind: type, h: torch.Tensor):
    return (h, h.cos()) if kind is nn.LSTM else h


def many(call) -> int:
    """Number of layers that a call computed at once."""
    with mock.patch.object(Steps, "run", autospec=True, side_effect=Steps.run) as run:
        call()
    return run.call_count


X = Numbers(1)(N, STEPS, WIDTH)
ENCODER = Numbers(2)(WIDTH, UNITS)


@st.composite
def problems(draw):
    """A layer of padded or packed sequences, with first states of the samples or zeros."""
    kind = draw(st.sampled_from(KINDS))
    options = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNN else {}
    options |= {
        "num_layers": draw(st.integers(1, 2)),
        "bidirectional": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    f, params = recurrent_layers(kind, **options)
    params = {"layer": params, "encoder": ENCODER}
    lengths, states = draw(st.lists(st.integers(1, STEPS), min_size=N, max_size=N)), draw(st.booleans())
    packed, count = draw(st.booleans()), options["num_layers"] * (1 + options["bidirectional"])

    def losses(p, x, of):
        h = [given_to(kind, (x[:, 0] @ p["encoder"]).expand(count, -1, -1))] if states else []
        if not packed:
            return energies(f(p["layer"], x, *h))
        out, last = f(p["layer"], pack_padded_sequence(x, of, batch_first=True, enforce_sorted=False), *h)
        return energies((pad_packed_sequence(out, batch_first=True)[0], last))

    return losses, params, torch.tensor(lengths)


STATISTICS = {"shares": batch_grad, "norms": batch_l2_grad, "variance": variance, "gram": gram}


@pytest.mark.parametrize("called", STATISTICS)
@settings(max_examples=6)
@given(problem=problems())
def test_statistics_are_those_of_one_step_after_the_other(called, problem):
    losses, params, of = problem
    for loss in (losses, lambda *args: losses(*args).sum()) if called != "gram" else (losses,):
        t = STATISTICS[called](loss)
        assert_trees_close(t(params, X, of), generic(t)(params, X, of), TIGHT)


@kinds
@pytest.mark.parametrize("before", [True, False])
def test_what_is_closed_over_is_differentiated(kind, before):
    """Behind the layer nothing that it has read depends on it; before it, steps are not at once."""
    f, params = recurrent_layers(kind)
    w = Numbers(4)(UNITS).requires_grad_()

    def losses(p, x):
        return (f(p, x * w[:WIDTH])[0] if before else f(p, x)[0] * w).sin().sum((1, 2))

    t = batch_l2_grad(losses)
    slopes = [torch.autograd.grad(sum(x.sum() for x in tree.tensors(s(params, X))), w)[0] for s in (t, generic(t))]
    assert_trees_close(*slopes, TIGHT)
    assert (many(lambda: t(params, X)) == 0) is before


@kinds
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_derivative_in_f_is_seen(kind):
    """It depends on the recurrent weights by the states alone."""
    f, params = recurrent_layers(kind)
    held = {name: params.pop(name) for name in [*params] if "ih" in name}

    def penalised(p, x):
        x = x.detach().requires_grad_()
        total = f(p | held, x)[0].sum()
        total.backward(create_graph=True, inputs=[x])
        return total + x.grad.square().sum()

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = batch_grad(penalised)(params, X)
    each = [torch.autograd.grad(penalised(leaves, x[None]), [*leaves.values()]) for x in X]
    assert_trees_close([*found.values()], [*map(torch.stack, zip(*each, strict=True))], TIGHT)
