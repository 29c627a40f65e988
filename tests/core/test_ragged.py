"""Samples of different lengths in one batch, as programs put them together: one after the other, or padded."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence, unpad_sequence

from invfunc import batch_grad, chunked, diag_ggn, diag_hessian, functional, variance
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian, loop_batch_grad
from tests.strategies import Numbers

Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EXACT, MOST, H = 1e-9, 4, 3


def numbered(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return torch.arange(x.shape[dim], device=x.device)


def mask_of(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return numbered(x, 1) < lengths[:, None]


def sequences(x: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    return [own[: int(length)] for own, length in zip(x, lengths, strict=True)]


ROWS: dict[str, Rows] = {
    "cat": lambda x, lengths: torch.cat(sequences(x, lengths)),
    "mask": lambda x, lengths: x[mask_of(x, lengths)],
    "unpad_sequence": lambda x, lengths: torch.cat(unpad_sequence(x, lengths, batch_first=True)),
}
"""The rows of all samples, one sample after the other."""
NUMBERS: dict[str, Rows] = {
    "repeat_interleave of an arange": lambda x, lengths: torch.repeat_interleave(numbered(x), lengths),
    "its method, along a dim": lambda x, lengths: numbered(x).repeat_interleave(lengths, dim=0),
    "to a length": lambda x, lengths: numbered(x).repeat_interleave(lengths, output_size=int(lengths.sum())),
    "by keyword": lambda x, lengths: torch.repeat_interleave(numbered(x), repeats=lengths),
    "of the lengths": lambda x, lengths: torch.repeat_interleave(lengths),
    "of rows": lambda x, lengths: numbered(x)[:, None].expand(-1, 2).repeat_interleave(lengths, 0)[:, 1],
    "nonzero": lambda x, lengths: mask_of(x, lengths).nonzero()[:, 0],
}
"""The number of the sample of each of them."""


def along(own: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return own[:, None].expand_as(h)


def softmax(z: torch.Tensor, own: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    e = h.exp()
    return z.index_add(0, own, h * e / z.index_add(0, own, e)[own])


POOLED: dict[str, tuple[Callable, Callable]] = {
    "index_add": (lambda z, own, h: z.index_add(0, own, h), lambda h, m: h.sum(1)),
    "index_add_": (lambda z, own, h: z.clone().index_add_(0, own, h), lambda h, m: h.sum(1)),
    "scatter_add": (lambda z, own, h: z.scatter_add(0, along(own, h), h), lambda h, m: h.sum(1)),
    "scatter_reduce": (lambda z, own, h: z.scatter_reduce(0, along(own, h), h, "sum"), lambda h, m: h.sum(1)),
    "index_put": (lambda z, own, h: z.index_put((own,), h, accumulate=True), lambda h, m: h.sum(1)),
    "masks": (lambda z, own, h: torch.stack([h[own == i].sum(0) for i in range(len(z))]), lambda h, m: h.sum(1)),
    "mean": (
        lambda z, own, h: z.index_add(0, own, h) / own.bincount(minlength=len(z)).clamp(min=1)[:, None],
        lambda h, m: h.sum(1) / m.sum(1).clamp(min=1),
    ),
    "there and back": (
        lambda z, own, h: z.index_add(0, own, (h + z.index_add(0, own, h)[own]).square()),
        lambda h, m: ((h + h.sum(1, keepdim=True)).square() * m).sum(1),
    ),
    "softmax": (softmax, lambda h, m: (h * (h.exp() * m / (h.exp() * m).sum(1, keepdim=True).clamp(min=1e-9))).sum(1)),
}
"""One row for each sample, of its rows; and the same of padded samples and their mask."""


def losses(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, y, reduction="none")


def padded(pool: Callable) -> Callable:
    """The model on padded samples, of which a mask says how long they are."""

    def model(params: dict, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = mask_of(x, lengths)[..., None]
        h = (x @ params["a"] + (x[:, :1] @ params["c"]).sin()).tanh() * mask
        return pool(h, mask) @ params["b"]

    return model


def check(model: Callable, plain: Callable, lengths: list[int], seed: int) -> None:
    """All forms of the losses have the statistics of the plain model."""
    rand, n = Numbers(seed), len(lengths)
    params = {"a": rand(2, H), "b": rand(H, 2), "c": rand(2, H)}
    x, y, of = rand(n, MOST, 2), rand.below(2, n), torch.tensor(lengths)
    wanted = torch.func.jacrev(lambda p: losses(plain(p, x, of), y))(params)
    each, mean = (
        (lambda p, x, of, y: losses(model(p, x, of), y)),
        (lambda p, x, of, y: losses(model(p, x, of), y).mean()),
    )
    spread = {name: share.var(0, correction=0) for name, share in wanted.items()}
    diagonal = diag_ggn(plain, F.cross_entropy)(params, x, of, y)
    assert_trees_close(batch_grad(each)(params, x, of, y), wanted, EXACT)
    assert_trees_close(batch_grad(mean)(params, x, of, y), {k: g / n for k, g in wanted.items()}, EXACT)
    assert_trees_close(variance(each)(params, x, of, y), spread, EXACT, 1e-12)
    assert_trees_close(diag_ggn(mean)(params, x, of, y), diagonal, EXACT)
    assert_trees_close(diag_ggn(model, F.cross_entropy)(params, x, of, y), diagonal, EXACT)


SEEDS = st.integers(0, 9)
LENGTHS = st.lists(st.integers(0, MOST), min_size=1, max_size=5).filter(any)


@pytest.mark.parametrize("pool", POOLED)
@settings(max_examples=6)
@given(
    lengths=LENGTHS,
    rows=st.sampled_from(sorted(ROWS)),
    numbers=st.sampled_from(sorted(NUMBERS)),
    seed=st.integers(0, 9),
)
def test_rows_one_after_the_other_are_those_of_their_samples(pool, lengths, rows, numbers, seed):
    assume(pool not in ("masks", "mean") or min(lengths) > 0)  # a sum of no rows has no place, nor has their number
    pooled, plain = POOLED[pool]

    def model(params, x, lengths):
        own, context = NUMBERS[numbers](x, lengths), (x[:, 0] @ params["c"]).sin()
        h = (ROWS[rows](x, lengths) @ params["a"] + context.repeat_interleave(lengths, 0)).tanh()
        return pooled(h.new_zeros(len(x), H), own, h) @ params["b"]

    check(model, padded(plain), lengths, seed)


PADDED: dict[str, Callable] = {
    "batch first": lambda rows: pad_sequence(rows, batch_first=True).sum(1),
    "time first": lambda rows: pad_sequence(rows).sum(0),
    "in front": lambda rows: pad_sequence(rows, padding_side="left").flip(0).sum(0),
    "with a value": lambda rows: (z := pad_sequence(rows, True, 7.0)).where(z < 7, 0).sum(1),
    "of split rows": lambda rows: pad_sequence(torch.cat(rows).split([len(a) for a in rows]), True).sum(1),
}


@pytest.mark.parametrize("pad", PADDED)
@settings(max_examples=6)
@given(lengths=LENGTHS, seed=SEEDS)
def test_padded_rows_are_those_of_their_samples(pad, lengths, seed):
    assume(pad != "of split rows" or min(lengths) > 0)  # a split of no rows is of no sample

    def model(params, x, lengths):
        context = (x[:, 0] @ params["c"]).sin()
        rows = [(a @ params["a"] + c).tanh() for a, c in zip(sequences(x, lengths), context, strict=True)]
        return PADDED[pad](rows) @ params["b"]

    check(model, padded(lambda h, m: h.sum(1)), lengths, seed)


@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        (lambda x, lengths: torch.repeat_interleave(lengths.flip(0)), "matmul"),
        (lambda x, lengths: lengths.repeat_interleave(lengths.flip(0)), "matmul"),
        (lambda x, lengths: numbered(x).repeat_interleave(lengths).flip(0), "matmul"),
        (lambda x, lengths: x[:, 0, 0].repeat_interleave(lengths[[2, 0, 1]]).long() * 0, "matmul"),
    ],
    ids=["times", "both", "numbers", "values"],
)
def test_rows_of_other_samples_are_refused(wrong, at):
    rand = Numbers()
    params, x, lengths = {"a": rand(2, H), "b": rand(H, 2)}, rand(3, MOST, 2), torch.tensor([1, 3, 2])

    def model(params, x, lengths, y):
        h = (x[mask_of(x, lengths)] @ params["a"]).tanh()
        z = h.new_zeros(len(x), H).index_add(0, wrong(x, lengths) % len(x), h)
        return losses(z @ params["b"], y)

    args = params, x, lengths, torch.tensor([0, 1, 1])
    with pytest.raises(SampleAxisError, match=f"`{at}`"):
        batch_grad(lambda *args: model(*args).mean())(*args)


PACKED = st.tuples(st.sampled_from([nn.RNN, nn.LSTM, nn.GRU]), st.booleans(), st.booleans(), st.booleans())


def recurrent(kind: type, two: bool, first: bool, sort: bool, use: str) -> nn.Module:
    """A classifier of packed sequences that are sorted in it, by torch or by itself."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(2, 2, 2 - two, bidirectional=two, batch_first=first)
            self.head = nn.Linear(2 + 2 * two, 2)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            by = lengths.argsort(descending=True, stable=True)
            x, sizes = (x[by], lengths[by]) if sort else (x, lengths)
            packed = pack_padded_sequence(x if first else x.transpose(0, 1), sizes, first, enforce_sorted=sort)
            output, state = self.layer(packed)
            if use == "state":
                z = (state[0] if isinstance(state, tuple) else state)[-1 - two :].transpose(0, 1).flatten(1)
            else:
                z, of = pad_packed_sequence(output, batch_first=True)
                z = z[numbered(z), of - 1] if use == "last" else z.sum(1) / of[:, None]
            return self.head(z[by.argsort()] if sort else z)

    return Classifier().double()


@pytest.mark.parametrize("use", ["state", "last", "mean"])
@settings(max_examples=5)
@given(lengths=st.lists(st.integers(1, MOST), min_size=1, max_size=4), options=PACKED)
def test_packed_sequences_are_those_of_their_samples(use, lengths, options):
    module, rand, n, of = recurrent(*options, use), Numbers(), len(lengths), torch.tensor(lengths)
    f, params = functional(module)
    params = {name: rand(*p.shape) for name, p in params.items()}
    x, y = rand(n, MOST, 2), rand.below(2, n)
    each = lambda p, x, of, y: losses(f(p, x, of), y)  # noqa: E731
    leaves = {name: p.requires_grad_() for name, p in params.items()}  # torch.func does not run torch's own
    alone = [torch.autograd.grad(each(leaves, x[i], of[i], y[i]), [*leaves.values()]) for i in numbered(x)[:, None]]
    params = {name: p.detach() for name, p in leaves.items()}
    wanted = {name: torch.stack(g) for name, g in zip(params, zip(*alone, strict=True), strict=True)}
    assert_trees_close(batch_grad(each)(params, x, of, y), wanted, EXACT)
    assert_trees_close(batch_grad(lambda *args: each(*args).sum())(params, x, of, y), wanted, EXACT)
    assert_trees_close(variance(each)(params, x, of, y), {k: g.var(0, correction=0) for k, g in wanted.items()}, EXACT)
    diagonals = [diag_ggn(each)(params, x[i], of[i], y[i]) for i in numbered(x)[:, None]]
    total = {name: sum(d[name] for d in diagonals) for name in params}
    assert_trees_close(diag_ggn(f, partial(F.cross_entropy, reduction="sum"))(params, x, of, y), total, EXACT)
    assert_trees_close(diag_ggn(lambda *args: each(*args).sum())(params, x, of, y), total, EXACT)


# Errors of calls that are not followed: the operation, the line of f, the way out; those of f come out as they are

W, X = Numbers(7)(3, 2), Numbers(8)(4, 3)


def mixed(w, x):
    z = x @ w
    return (z - z.amax(0)).square().sum()


def test_the_operation_the_line_and_the_last_resort_are_told():
    with pytest.raises(SampleAxisError) as told:
        batch_grad(mixed)(W, X)
    text = str(told.value)
    line = mixed.__code__.co_firstlineno + 2
    assert f"at `amax` (test_ragged.py:{line}, in mixed): it reduces over the sample axis" in text
    assert "return the [N] losses" in text and "single samples" in told.value.__notes__[0]


def test_mixed_samples_that_do_not_reach_the_result_are_none():
    def f(w, x):
        mixed(w, x)
        return (x @ w).square().sum(1)

    assert_trees_close(batch_grad(f)(W, X), loop_batch_grad(f)(W, X), 1e-12)


@pytest.mark.parametrize("make", [batch_grad, variance, diag_hessian])
def test_errors_of_f_are_its_own(make):
    calls = []

    def f(w, x):
        calls.append(x)
        return {"a": x}["b"] @ w

    with pytest.raises(KeyError, match="b") as told:
        make(f)(W, X)
    assert len(calls) == 2 and told.value.__cause__ is None and told.value.__context__ is None
    assert traceback.extract_tb(told.value.__traceback__)[-1].name == "f"


def test_shapes_that_do_not_fit_are_told_by_torch():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        batch_grad(lambda w, x: (x.T @ w).square().sum())(W, X)


def test_no_parameter_is_told_before_what_mixes():
    with pytest.raises(ArgumentError, match="no parameter of params reaches the result"):
        batch_grad(lambda w, x: (x @ w.detach()).std(0).sum())(W, X)


def test_a_hessian_of_what_is_not_followed_is_taken_entry_by_entry():
    def f(w, x, y):
        z = x @ w
        return F.mse_loss((z - z.mean(0)) / z.std(0), y)

    y = Numbers(9)(4, 2)
    assert_trees_close(diag_hessian(f)(W, X, y), dense_diag_hessian(f)(W, X, y), 1e-9)


# Programs of which some form is refused, with the form that its error names, and systems of equations

N, T = 4, 4
P, X_WAYS, Y = Numbers()(3, 3), Numbers(1)(N, 3), Numbers(2)(N, 3)
NEAR = 1e-9


def apart(f, params, *batch):
    """The gradients of each sample's loss, from f on a batch of one."""
    shares = [torch.func.grad(lambda p, n=n: f(p, *(x[n : n + 1] for x in batch)).sum())(params) for n in range(N)]
    return {k: torch.stack([g[k] for g in shares]) for k in params} if isinstance(params, dict) else torch.stack(shares)


def test_ctc():
    x, y = Numbers(3)(N, T, 3), Numbers(4).below(2, N, 2) + 1

    def ctc(p, x, y, reduction="none"):
        z = (x @ p).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(z, y, torch.full((len(x),), T), torch.full((len(x),), 2), reduction=reduction)

    found = batch_grad(lambda p, x, y: ctc(p, x, y, "mean"))(P, x, y)  # divided by the lengths of the targets, too
    assert_trees_close(found, apart(ctc, P, x, y) / 2 / N, NEAR)
    assert_trees_close(batch_grad(ctc)(P, x, y), apart(ctc, P, x, y), NEAR)


MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]])


def masked(p, x, mask):
    return (x if mask.all() else x * mask) @ p


@pytest.mark.parametrize("n", [2, 4])  # a part of one sample would be broadcast to the whole mask
@pytest.mark.parametrize(("f", "given"), [(masked, {"mask": MASK}), (lambda p, x: masked(p, x, MASK), {})])
def test_a_mask_in_parts_is_a_batch_argument(f, given, n):
    for t in (diag_ggn(f, F.mse_loss), batch_grad(lambda p, x, y, **given: F.mse_loss(f(p, x, **given), y))):
        with pytest.raises(SampleAxisError, match="such as a mask or indices, as a batch argument"):
            chunked(t, n, over="samples")(P, X_WAYS, Y, **given)

    def f_of_mask(p, x, mask):
        return (x * mask) @ p

    wanted = dense_diag_ggn(f_of_mask, F.mse_loss)(P, X_WAYS, MASK, Y)
    assert_trees_close(chunked(diag_ggn(f_of_mask, F.mse_loss), n, over="samples")(P, X_WAYS, MASK, Y), wanted, NEAR)
