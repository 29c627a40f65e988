"""Recurrent layers at all time steps at once: where they are, and that nothing else shows."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from invfunc import batch_grad, batch_l2_grad, functional, gram, tree, variance
from invfunc.operations.recurrent import Steps
from invfunc.testing import assert_trees_close
from tests.rows import generic
from tests.strategies import Numbers

EXACT, N, STEPS, WIDTH, UNITS = 1e-10, 4, 3, 2, 3
KINDS = [nn.LSTM, nn.GRU, nn.RNN]
kinds = pytest.mark.parametrize("kind", KINDS)


def layers(kind: type, **options):
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
    f, params = layers(kind, **options)
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
        assert_trees_close(t(params, X, of), generic(t)(params, X, of), EXACT)


@kinds
@pytest.mark.parametrize("before", [True, False])
def test_what_is_closed_over_is_differentiated(kind, before):
    """Behind the layer nothing that it has read depends on it; before it, steps are not at once."""
    f, params = layers(kind)
    w = Numbers(4)(UNITS).requires_grad_()

    def losses(p, x):
        return (f(p, x * w[:WIDTH])[0] if before else f(p, x)[0] * w).sin().sum((1, 2))

    t = batch_l2_grad(losses)
    slopes = [torch.autograd.grad(sum(x.sum() for x in tree.tensors(s(params, X))), w)[0] for s in (t, generic(t))]
    assert_trees_close(*slopes, EXACT)
    assert (many(lambda: t(params, X)) == 0) is before


@kinds
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_derivative_in_f_is_seen(kind):
    """It depends on the recurrent weights by the states alone."""
    f, params = layers(kind)
    held = {name: params.pop(name) for name in [*params] if "ih" in name}

    def penalised(p, x):
        x = x.detach().requires_grad_()
        total = f(p | held, x)[0].sum()
        total.backward(create_graph=True, inputs=[x])
        return total + x.grad.square().sum()

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    found = batch_grad(penalised)(params, X)
    each = [torch.autograd.grad(penalised(leaves, x[None]), [*leaves.values()]) for x in X]
    assert_trees_close([*found.values()], [*map(torch.stack, zip(*each, strict=True))], EXACT)
