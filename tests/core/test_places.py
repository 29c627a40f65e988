"""Samples in any places of a scalar loss, any number of times: each has the share of all its places."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import get_overridable_functions

from invfunc import InvFuncError, batch_grad, batch_jacobian, batch_l2_grad, chunked, diag_ggn, kfac, outputs
from invfunc.core.ways import known_way
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close, loop_batch_grad
from tests.rows import FIRST_ORDER
from tests.strategies import Numbers

D = 4
Rows = dict[str, torch.Tensor]
"""Data of a program's samples: `x`, `i`, numbers below D, and keys `k`."""


def layer_norm(h, w, e):
    return F.layer_norm(h, (D,), w[2], w[3])


def conv(h, w, e):
    return F.conv1d(h[:, None], w[None, :1, :3], padding=1)[:, 0]


def conv_of_a_view(h, w, e):
    return F.conv1d(h.view(-1, 2, 2), w.view(2, 2, 4)[..., :3], padding=1).flatten(1)


def gather_of_a_layer(h, w, e):
    return (h @ w).gather(1, (e["i"][:, None] + torch.arange(D)) % D)


USES: dict[str, Callable] = {
    "elementwise": lambda h, w, e: h * w[0],
    "bias": lambda h, w, e: h + w[1],
    "matmul": lambda h, w, e: (h @ w).tanh(),
    "linear": lambda h, w, e: F.linear(h, w, w[0]).tanh(),
    "in place": lambda h, w, e: h.clone().mul_(w[3]),
    "embedding": lambda h, w, e: h + F.embedding(e["i"], w),
    "embedding times": lambda h, w, e: h * F.embedding(e["i"], w),
    "index": lambda h, w, e: h + w[e["i"]],
    "one-hot": lambda h, w, e: h + F.one_hot(e["i"], D).to(h.dtype) @ w,
    "gather of w": lambda h, w, e: h * w.gather(0, e["i"][:, None].expand(-1, D)),
    "gather": gather_of_a_layer,
    "slice": lambda h, w, e: torch.cat([h[:, :2] @ w[:2, :2], h[:, 2:]], 1).sin(),
    "conv": conv,
    "conv of a view": conv_of_a_view,
    "norm": layer_norm,
    "data": lambda h, w, e: h * e["x"].sin() + e["x"] @ w,
    "where": lambda h, w, e: torch.where((e["i"] % 2 == 0)[:, None], h @ w, h * w[0]),
    "nothing": lambda h, w, e: h.cos(),
}


# Orders, from the data alone


def by_items(e):
    return torch.tensor(sorted(range(len(e["k"])), key=lambda n: e["k"][n].item()))


def by_masks(e):
    return torch.cat([(e["i"] != 2).nonzero()[:, 0], (e["i"] == 2).nonzero()[:, 0]])


ORDERS: dict[str, Callable] = {
    "argsort": lambda e: e["k"].argsort(),
    "sort": lambda e: e["k"].sort(descending=True).indices,
    "topk": lambda e: e["k"].topk(len(e["k"])).indices,
    "by x": lambda e: e["x"][:, 0].argsort(),
    "items": by_items,
    "masks": by_masks,
    "flip": lambda e: torch.arange(len(e["k"])).flip(0),
}


def taken(e: Rows, q: torch.Tensor | slice) -> Rows:
    return {name: rows[q] for name, rows in e.items()}


# Ways to move h there and back around a function of rows


def written(h, q, z):
    out = torch.empty_like(z)
    out[q] = z
    return out


def in_a_loop(h, q, z):
    out = torch.zeros_like(z)
    for j, n in enumerate(q.tolist()):
        out[n] = z[j]
    return out


def stacked(h, q, z):
    rows = {n: z[j] for j, n in enumerate(q.tolist())}
    return torch.stack([rows[n] for n in range(len(q))])


BACK: dict[str, Callable] = {
    "index_add": lambda h, q, z: torch.zeros_like(z).index_add(0, q, z),
    "added": lambda h, q, z: h.index_add(0, q, z),
    "index_copy": lambda h, q, z: torch.zeros_like(z).index_copy(0, q, z),
    "scatter": lambda h, q, z: torch.zeros_like(z).scatter(0, q[:, None].expand(-1, D), z),
    "inverse": lambda h, q, z: z[q.argsort()],
    "index_select": lambda h, q, z: z.index_select(0, q.argsort()),
    "gather": lambda h, q, z: z.gather(0, q.argsort()[:, None].expand(-1, D)),
    "written": written,
    "loop": in_a_loop,
    "stack": stacked,
}
GO: dict[str, Callable] = {
    "index": lambda h, q: h[q],
    "index_select": lambda h, q: h.index_select(0, q),
    "gather": lambda h, q: h.gather(0, q[:, None].expand(-1, D)),
    "stack": lambda h, q: torch.stack([h[n] for n in q.tolist()]),
    "unbind": lambda h, q: torch.stack([h.unbind()[n] for n in q.tolist()]),
}


@dataclass
class Moved:
    """Steps around which the samples are put in another order; `others` is what is left where it was, wrongly unless
    nobody reads it."""

    order: str
    go: str
    back: str
    steps: list
    left: tuple[str, ...] = ()
    matrix: bool = False

    def __call__(self, h, w, e):
        q = ORDERS[self.order](e)
        there = taken(e, q) | {name: e[name] for name in self.left}
        if self.matrix:
            p = torch.eye(len(q), dtype=h.dtype)[q]
            return p.mT @ run(self.steps, p @ h, w, there)
        return BACK[self.back](h, q, run(self.steps, GO[self.go](h, q), w, there))

    def plain(self, h, w, e):
        z = plain(self.steps, h, w, e)
        return h + z if self.back == "added" and not self.matrix else z


@dataclass
class ByMask:
    """Each half of the samples on its own."""

    steps: tuple[list, list]

    def __call__(self, h, w, e):
        out = torch.zeros_like(h)
        for own, steps in enumerate(self.steps):
            mask = e["i"] % 2 == own
            if mask.any():
                out[mask] = run(steps, h[mask], w, taken(e, mask))
        return out

    def plain(self, h, w, e):
        first, second = (plain(steps, h, w, e) for steps in self.steps)
        return torch.where((e["i"] % 2 == 0)[:, None], first, second)


@dataclass
class InOrder:
    """Sample by sample, in the order of the keys."""

    steps: list
    order: str
    cat: bool

    def __call__(self, h, w, e):
        found = dict[int, torch.Tensor]()
        for n in ORDERS[self.order](e).tolist():
            found[n] = run(self.steps, h[n : n + 1], w, taken(e, slice(n, n + 1)))
        rows = [found[n] for n in range(len(h))]
        return torch.cat(rows) if self.cat else torch.stack([row[0] for row in rows])

    def plain(self, h, w, e):
        return plain(self.steps, h, w, e)


def run(steps, h, w, e):
    for step in steps:
        h = USES[step](h, w, e) if isinstance(step, str) else step(h, w, e)
    return h


def plain(steps, h, w, e):
    for step in steps:
        h = USES[step](h, w, e) if isinstance(step, str) else step.plain(h, w, e)
    return h


def steps_of(r: Random, depth: int, careless: bool, whole: bool) -> list:
    found: list = []
    for _ in range(r.choice([1, 1, 2, 2, 3])):
        kinds = ["use", "moved"] if whole else ["use", "moved"] * 3 + ["mask", "loop"]
        kind = r.choice(kinds) if depth else "use"
        if kind == "use":
            found.append(r.choice(list(USES)))
        elif kind == "moved":
            left = tuple(name for name in "xik" if careless and r.random() < 0.2)
            order, go, back = (r.choice(list(of)) for of in (ORDERS, GO, BACK))
            found.append(Moved(order, go, back, steps_of(r, depth - 1, careless, whole), left, r.random() < 0.1))
        elif kind == "mask":
            found.append(ByMask((steps_of(r, depth - 1, careless, whole), steps_of(r, depth - 1, careless, whole))))
        else:
            found.append(InOrder(steps_of(r, depth - 1, careless, whole), r.choice(list(ORDERS)), r.random() < 0.5))
    return found


def program(r: Random, careless: bool = False, whole: bool = False) -> tuple[Callable, Callable]:
    """A model function of `(w, x, i, k)` that moves its samples, and the same without moves. `careless` programs
    may leave some data where they were; what comes out is then no function of the samples, one by one. In `whole` ones
    each step is of all samples."""
    steps = steps_of(r, 2, careless, whole)

    def called(follow: Callable) -> Callable:
        def model(w, x, i, k):
            return follow(steps, x, w, {"x": x, "i": i, "k": k})

        model.steps = steps
        return model

    return called(run), called(plain)


def arguments(r: Random) -> tuple[torch.Tensor, ...]:
    n, seed = r.choice([1, 2, 3, 3, 4, 5]), r.randrange(1000)
    g = torch.Generator().manual_seed(seed)
    w, x = (torch.randn(size, D, generator=g, dtype=torch.float64) for size in (D, n))
    return w, x, torch.randint(D, (n,), generator=g), torch.randn(n, generator=g, dtype=torch.float64)


N = 4
P = {"w": Numbers()(3, 3), "b": Numbers(1)(3)}
X, Y = Numbers(2)(N, 3), Numbers(3)(N, 3)
EXACT = 1e-9


def model(p, x):
    return torch.tanh(x @ p["w"] + p["b"]).cumsum(-1)


def each(z, y):
    return (z - y).square().mean(-1)


def one_by_one(p, x, y, r):
    total = 0
    for i in r:
        z = model(p, x[i])
        total = total + each(z, y[i])
    return total / len(r)


def with_losses(p, x, y, r):
    return torch.stack([each(model(p, x[i]), y[i]) for i in r]).mean()


def sorted_by_data(p, x, y, r):
    """As packed sequences are, by their lengths."""
    x, y = x[r], y[r]
    order = x[:, 1].argsort()
    z = model(p, x[order])
    return F.mse_loss(z[order.argsort()], y)


def sorted_with_targets(p, x, y, r):
    x, y = x[r], y[r]
    _, order = x[:, 1].sort(descending=True)
    return F.mse_loss(model(p, x[order]), y[order])


WAYS = {
    "index": lambda p, x, y, r: F.mse_loss(model(p, x[r]), y[r]),
    "index_select": lambda p, x, y, r: F.mse_loss(
        model(p, x.index_select(0, torch.tensor(r))), y.index_select(0, torch.tensor(r))
    ),
    "one-hot of places": lambda p, x, y, r: F.mse_loss(model(p, x)[r], y[r]),
    "losses": lambda p, x, y, r: each(model(p, x), y)[r].mean(),
    "stack": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, x[i]) for i in r]), y[r]),
    "cat": lambda p, x, y, r: F.mse_loss(torch.cat([model(p, x[i : i + 1]) for i in r]), y[r]),
    "unbind": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, x.unbind()[i]) for i in r]), y[r]),
    "for": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, row) for row in x[r]]), y[r]),
    "for of the rest": lambda p, x, y, r: F.mse_loss(torch.stack([row.exp().log() for row in model(p, x)[r]]), y[r]),
    "sum": one_by_one,
    "losses stacked": with_losses,
    "sorted": sorted_by_data,
    "sorted with targets": sorted_with_targets,
    "topk": lambda p, x, y, r: F.mse_loss(model(p, x[r][x[r][:, 0].topk(len(r))[1]]), y[r][x[r][:, 0].topk(len(r))[1]]),
    "twice": lambda p, x, y, r: F.mse_loss(model(p, torch.cat([x[r], x[r]])), y[r].repeat(2, 1)),
}
PLACES = st.lists(st.integers(0, N - 1), min_size=1, max_size=6)


def weighted(p, x, y, counts):
    return (each(outputs(model(p, x)), y) * counts).sum()


def counts(r):
    return torch.bincount(torch.tensor(r), minlength=N).to(X.dtype) / len(r)


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(r=PLACES)
def test_shares_are_summed_over_the_places_of_a_sample(way, r):
    wanted = batch_grad(weighted)(P, X, Y, counts(r))
    assert_trees_close(batch_grad(lambda p, x, y: way(p, x, y, r))(P, X, Y), wanted, EXACT)


# Of all samples, each computed where it belongs


def softmax_of(p, x):
    return (x @ p["w"]).softmax(1)


def by_experts(p, x, y):
    """Each sample is computed by the expert that its data choose."""
    z = torch.zeros_like(x)
    for e in range(2):
        (at,) = torch.where((x[:, 0] > 0) == bool(e))
        z = z.index_add(0, at, model(p, x[at]) * (e + 1))
    return F.mse_loss(z, y)


def by_two_experts(p, x, y):
    """By the two best of three, as parameters say."""
    z = torch.zeros_like(x)
    weights, chosen = softmax_of(p, x).topk(2, 1)
    for e in range(3):
        at, rank = torch.where(chosen == e)
        z.index_add_(0, at, model(p, x[at]) * p["b"][e] * weights[at, rank, None])
    return F.mse_loss(z, y)


def by_experts_that_are_hit(p, x, y):
    """As in transformers."""
    z = torch.zeros_like(x)
    weights, chosen = softmax_of(p, x).topk(2, 1)
    mask = F.one_hot(chosen, 4).permute(2, 1, 0)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        rank, at = torch.where(mask[hit[0]])
        z.index_add_(0, at, model(p, x[None, at].reshape(-1, 3)) * weights[at, rank, None])
    return F.mse_loss(z, y)


def into_places(p, x, y):
    z = x.new_zeros(len(x), 3)
    for i in range(len(x)):
        z[i] = model(p, x[i])
    return F.mse_loss(z, y)


def experts_written(p, x, y):
    z = x.new_zeros(len(x), 3)
    for e in range(2):
        (at,) = torch.where((y[:, 0] > 0) == bool(e))
        z[at] = model(p, x[at]) * (e + 1)
    return F.mse_loss(z, y)


def views(p, x, y):
    """Two views of each sample, as in contrastive learning."""
    z = model(p, torch.cat([x, x + y]))
    one, other = z.chunk(2)
    return F.mse_loss(one, other)


def views_in_another_order(p, x, y):
    z = model(p, torch.cat([x, y.flip(0)]))
    return F.mse_loss(z[: len(x)], z[len(x) :].flip(0))


def chunks(p, x, y):
    return sum(F.mse_loss(model(p, a), b, reduction="sum") for a, b in zip(x.split(3), y.split(3), strict=True))


def pairs_of_terms(p, x, y):
    order = torch.arange(len(x)).roll(1)
    return F.mse_loss(model(p, x[order]), y[order]) + F.mse_loss(model(p, x), y)


def both_orders(p, x, y):
    order = torch.arange(len(x)).roll(1)
    return F.mse_loss(model(p, torch.cat([x, x[order]])), torch.cat([y, y[order]]))


def batches_of_one(p, x, y):
    return sum(F.mse_loss(model(p, x[i : i + 1]), y[i : i + 1]) for i in range(len(x)))


def any_operation(p, x, y):
    """Of what belongs to one sample, anything may be computed: here a product of it with itself, and a norm."""
    return sum(torch.linalg.norm(torch.outer(model(p, a), model(p, a)).matrix_exp()) for a in x + y)


def repeated(p, x, y):
    return F.mse_loss(model(p, x.repeat(2, 1)), y.repeat(2, 1))


def repeated_side_by_side(p, x, y):
    return F.mse_loss(model(p, x.repeat_interleave(3, 0)), y.repeat_interleave(3, 0))


def the_best_is_not_counted(p, x, y):
    """Numbers that all data give are constants, as they are to torch: here which loss is the smallest."""
    losses = each(model(p, x), y)
    return losses.sum() - losses[losses.argmin()].detach()


PROGRAMS = [by_experts, by_two_experts, by_experts_that_are_hit, into_places, experts_written, views]
PROGRAMS += [views_in_another_order, chunks, pairs_of_terms, both_orders, batches_of_one, any_operation, repeated]
PROGRAMS += [repeated_side_by_side, the_best_is_not_counted]
SUMS = {chunks, batches_of_one, any_operation, the_best_is_not_counted}


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_samples_are_followed_to_where_they_are_computed(f):
    def apart(p):
        terms = [f(p, X[n : n + 1], Y[n : n + 1]) for n in range(N)]
        return torch.stack(terms) / (1 if f in SUMS else N)

    shares = torch.func.jacrev(apart)(P)
    assert_trees_close(batch_grad(f)(P, X, Y), shares, EXACT)
    norms = {name: g.square().flatten(1).sum(1) for name, g in shares.items()}
    assert_trees_close(batch_l2_grad(f)(P, X, Y), norms, EXACT)


def test_a_sample_alone_meets_a_parameter_in_an_operation_without_a_rule():
    """The operation sees the tensor of the sample as it is there, with as many dims."""
    w, x = Numbers()(3), Numbers(1)(4, 3)

    def losses(w, x):
        return torch.stack([torch.outer(each, w).tanh().sum() for each in x])

    t = batch_grad(losses)
    assert_trees_close(t(w, x), loop_batch_grad(losses)(w, x), 1e-12)
    assert known_way(losses, t.called) == 0


# Samples that are moved, by their data or by any function of torch: each share is right, or is refused


def losses_of(model):
    return lambda w, x, i, k: model(w, x, i, k).sin().sum(1) + F.cross_entropy(model(w, x, i, k), i, reduction="none")


def in_order(losses):
    """A scalar that reads the losses in the order of the keys."""
    return lambda w, x, i, k: (losses(w, x, i, k) * k)[k.argsort()].sum() / len(x)


STATISTICS = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "in chunks": (lambda f: chunked(batch_grad(f), 2, over="samples"), lambda g: g),
    "chosen": (lambda f: batch_grad(f, samples=[-1, 0]), lambda g: g[[-1, 0]]),
}


def right_or_refused(statistic, args, wanted):
    try:
        found = statistic(*args)
    except InvFuncError:
        return False
    assert_trees_close(found, wanted, EXACT, floor=1.0)
    return True


def shares_of(losses, args):
    return torch.func.jacrev(losses)(*args)


class TestNothingIsSilentlyWrong:
    @pytest.mark.parametrize("name", STATISTICS)
    @given(r=st.randoms(use_true_random=False), careless=st.booleans())
    def test_in_the_losses_of_the_samples(self, name, r, careless):
        (model, _), args = program(r, careless), arguments(r)
        make, reduced = STATISTICS[name]
        losses = losses_of(model)
        right_or_refused(make(losses), args, reduced(shares_of(losses, args)))

    @pytest.mark.parametrize("name", STATISTICS)
    @given(r=st.randoms(use_true_random=False))
    def test_in_a_scalar_loss(self, name, r):
        (model, plain), args = program(r), arguments(r)
        make, reduced = STATISTICS[name]
        shares = shares_of(losses_of(plain), args) * (args[3] / len(args[1]))[:, None, None]
        right_or_refused(make(in_order(losses_of(model))), args, reduced(shares))

    @given(r=st.randoms(use_true_random=False), careless=st.booleans())
    def test_in_outputs(self, r, careless):
        (model, _), args = program(r, careless), arguments(r)
        jacobian = torch.func.jacrev(model)(*args)
        right_or_refused(batch_jacobian(model), args, jacobian)
        if not careless:
            right_or_refused(chunked(batch_jacobian(model), 2, over="samples"), args, jacobian)

    @given(r=st.randoms(use_true_random=False))
    def test_in_curvature(self, r):
        (model, plain), args = program(r), arguments(r)
        target = args[1].cos()
        for make in (diag_ggn, partial(diag_ggn, per_sample=True)):
            right_or_refused(make(model, F.mse_loss), (*args, target), make(plain, F.mse_loss)(*args, target))

    @given(r=st.randoms(use_true_random=False))
    def test_in_kronecker_factors(self, r):
        """These depend on which samples an operation gets together."""
        (model, plain), args = program(r, whole=True), arguments(r)
        target = args[1].cos()
        try:
            factors = kfac(plain, F.mse_loss, fisher="exact")(*args, target)
        except InvFuncError:
            return
        right_or_refused(
            lambda *a: kfac(model, F.mse_loss, fisher="exact")(*a).dense(), (*args, target), factors.dense()
        )


def test_few_programs_are_refused():
    """Refused are those where a matrix that orders the samples is multiplied with what depends on parameters."""
    refused = 0
    for seed in range(40):
        r = Random(seed)
        (model, _), args = program(r), arguments(r)
        refused += not right_or_refused(batch_grad(losses_of(model)), args, shares_of(losses_of(model), args))
    assert refused <= 5


# Whatever function of torch brings entries of data to other places: each share is that of their sample

MOVED, COTANGENTS = Numbers()(4, 3), Numbers(1)(4, 3)
ARGUMENTS = [(), (0,), (1,), ((0,),), ((0, 1),), (0, 1), (1, 0), (1, (0, 1)), (2,), (2, 0)]
KNOWN = {"flip", "roll", "flipud", "rot90", "fft_fftshift", "fft_ifftshift", "unsqueeze_", "t_", "transpose_", "msort"}


def functions() -> list[Callable]:
    groups = get_overridable_functions()
    return [f for group in (torch, torch.Tensor, torch.fft, torch.nn.functional) for f in groups[group]]


def origins(out: object) -> torch.Tensor | None:
    """Of which sample each entry of a result is; None if some are of none, or of several."""
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided or out.is_meta or out.dtype != MOVED.dtype:
        return None
    same = out.reshape(-1, 1) == MOVED.reshape(1, -1)
    return same.int().argmax(1).view(out.shape) // 3 if out.numel() and bool((same.sum(1) == 1).all()) else None


def moves() -> Iterator[tuple[str, Callable, torch.Tensor]]:
    """The functions that permute all entries of data, with arguments, and of which sample each entry then is."""
    for func, args in product(functions(), ARGUMENTS):
        try:
            samples = origins(func(MOVED.clone(), *args))
        except Exception:  # these are not arguments of it
            continue
        if samples is None or samples.numel() != MOVED.numel():
            continue
        own = torch.arange(4).view(-1, 1).expand(4, 3)
        if samples.shape != own.shape or not torch.equal(samples, own):
            yield func.__name__, lambda x, func=func, args=args: func(x.clone(), *args), samples


@pytest.mark.filterwarnings("ignore")
def test_moved_entries():
    w, found, right = torch.tensor(0.7, dtype=MOVED.dtype), set(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, move, samples in moves():
            found.add(name)
            weights, c = w.expand(samples.shape).clone().requires_grad_(), COTANGENTS.reshape(samples.shape)
            (each,) = torch.autograd.grad(((move(MOVED) * weights).tanh() * c).sum(), weights)
            wanted = torch.stack([each[samples == n].sum() for n in range(4)])
            try:
                came = batch_grad(lambda w, x, move=move, c=c: ((move(x) * w).tanh() * c).sum())(w, MOVED)
            except SampleAxisError:
                continue
            assert_trees_close(came, wanted, rtol=1e-10)
            right += 1
    assert found >= KNOWN
    assert right > 50
