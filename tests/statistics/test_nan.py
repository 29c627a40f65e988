"""A number that is none spoils what it spoils in the plain loop, and nothing else: it is never dropped."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import hessian, jacrev

import invfunc
from invfunc import chunked, compiled, functional, reduced, streamed, together, tree
from invfunc.errors import ArgumentError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from tests.rows import CASES, FACTORS, FIRST_ORDER, LOSS, MODEL, OF_DIAGONALS, made_of
from tests.strategies import Numbers, seeded

N, BAD = 6, 2


def dense(params, x):
    return ((x @ params["w"] + params["b"]).tanh() @ params["v"]).tanh()


def steps(params, x):
    return dense(params, x.unflatten(1, (2, 2)))


def scaled(params, x):
    return (x * params["w"]).sin() ** 2 + params["b"]


def convolved(params, x):
    z = F.conv2d(x.reshape(-1, 1, 2, 2), params["w"], params["b"], padding=1).tanh()
    return F.conv2d(z, params["v"], padding=1).flatten(1)


def numbers(seed, **shapes):
    return {name: Numbers(seed + i)(*shape) for i, (name, shape) in enumerate(shapes.items())}


MODELS = {
    "dense": (dense, numbers(0, w=(4, 5), b=(5,), v=(5, 3))),
    "steps": (steps, numbers(0, w=(2, 4), b=(4,), v=(4, 3))),
    "scaled": (scaled, numbers(0, w=(4,), b=(4,))),
    "convolved": (convolved, numbers(0, w=(2, 1, 3, 3), b=(2,), v=(2, 2, 3, 3))),
}


def general(z, y, reduction="mean"):
    """Convex, and known to nobody."""
    losses = (z - y).square().square().flatten(1).sum(1) + z.flatten(1).logsumexp(1)
    return losses if reduction == "none" else losses.mean()


def classes(z, y, reduction="mean"):
    """Of [N, C], or of each step of [N, T, C]."""
    return F.cross_entropy(z.movedim(-1, 1), (0 * y[..., 0]).nan_to_num(0, 0, 0).long(), reduction=reduction)


def of_each(loss):
    """The [N] losses."""
    return lambda z, y: loss(z, y, reduction="none").reshape(len(z), -1).sum(1)


LOSSES = {
    "mse": F.mse_loss,
    "cross entropy": classes,
    "bce": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
    "poisson": F.poisson_nll_loss,
    "general": general,
}


def poisoned(model, place, value):
    """Parameters, inputs and target with one entry that is not a number."""
    f, params = MODELS[model]
    x, params = Numbers(7)(N, 4), {name: p.clone() for name, p in params.items()}
    y = f(params, x).sigmoid()
    {"input": x[BAD], "target": y[BAD], "parameter": params["w"]}[place].view(-1)[0] = value
    return params, x, y


def flat(result):
    return torch.cat([g.flatten(1) for g in result.values()], 1)


def one_by_one(function, params, *batch):
    """Results of each sample alone, stacked."""
    found = [function(params, *(x[n : n + 1] for x in batch)) for n in range(N)]
    return {name: torch.stack([g[name] for g in found]) for name in params}


def shares(f, loss):
    """`[N, *p]`: the gradient of each sample alone, which no other one can spoil."""
    return lambda *args: one_by_one(jacrev(lambda p, x, y: loss(f(p, x), y).sum()), *args)


def squares(f, loss):
    """`[N, *p]`: the diagonal of the GGN of each sample."""

    def one(params, x, y):
        z = f(params, x)
        size = z.numel()
        curved = hessian(lambda z: loss(z, y))(z).reshape(size, size)
        if loss is F.huber_loss:  # torch compares, and NaN is not below the corner
            curved = curved.masked_fill((z - y).isnan().flatten().diag(), torch.nan)
        rows = {name: j.reshape(size, *params[name].shape) for name, j in jacrev(f)(params, x).items()}
        return {name: torch.einsum("i...,ij,j...->...", j, curved, j) for name, j in rows.items()}

    return lambda *args: one_by_one(one, *args)


def bent(f, loss):
    """`[N, *p]`: the diagonal of the Hessian of each sample."""

    def one(params, x, y):
        found = hessian(lambda p: loss(f(p, x), y))(params)
        size = {name: p.numel() for name, p in params.items()}
        return {k: found[k][k].reshape(size[k], size[k]).diagonal().reshape(params[k].shape) for k in params}

    return lambda *args: one_by_one(one, *args)


def composed(f, loss):
    return lambda params, x, y: loss(f(params, x), y)


def summed(result):
    return {name: g.sum(0) for name, g in result.items()}


def clipped(G):
    norms = flat(G).square().sum(1).sqrt()
    return {name: torch.tensordot((0.01 / norms).clamp(max=1), g, 1) for name, g in G.items()}, norms


def total(result):
    return sum(g.sum() for g in result.values())


OF_SHARES = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "samples=": (lambda f: invfunc.batch_grad(f, samples=[0, BAD]), lambda G: {k: g[[0, BAD]] for k, g in G.items()}),
    "chunked": (lambda f: chunked(invfunc.batch_grad(f), 2, over="samples"), lambda G: G),
    "chunked clipped": (lambda f: chunked(invfunc.clipped_grad(f, 0.01), 2, over="samples"), clipped),
    "together": (lambda f: together(invfunc.clipped_grad(f, 0.01), invfunc.batch_grad(f)), lambda G: (clipped(G), G)),
}
OF_DIAGONALS = {
    **{name: (row.make, row.of_each) for name, row in OF_DIAGONALS.items()},
    "chunked over outputs": (lambda *f: chunked(invfunc.diag_ggn(*f), 2), summed),
    "samples=": (lambda *f: invfunc.diag_ggn(*f, samples=[BAD, 0]), lambda D: summed({k: d[:3] for k, d in D.items()})),
    "together": (lambda *f: together(invfunc.diag_ggn(*f), invfunc.ggn_trace(*f)), lambda D: (summed(D), total(D))),
    "reduced": (
        lambda *f: reduced(invfunc.diag_ggn(*f, per_sample=True), lambda path, d: d.flatten(1).sum(1)),
        lambda D: {k: d.flatten(1).sum(1) for k, d in D.items()},
    ),
}


def spoiled(result):
    """For each leaf, True if an entry is not finite; for a leaf with a sample axis, for each of its rows."""
    return [
        (~x.isfinite()).reshape(len(x) if rows else 1, -1).any(1)
        for x in tree.leaves(result)
        for rows in [x.ndim > 0 and len(x) == N]
    ]


def assert_spoiled_alike(got, wanted):
    paths = [path for path, _ in tree.named_leaves(wanted)]
    for path, a, b in zip(paths, spoiled(got), spoiled(wanted), strict=True):
        assert torch.equal(a, b), f"{path}: {a.tolist()} is not {b.tolist()}"


def cases(losses=tuple(LOSSES), values=(torch.nan, torch.inf, -torch.inf)):
    places = st.sampled_from(["input", "target", "parameter"])
    return st.tuples(st.sampled_from(list(MODELS)), st.sampled_from(losses), places, st.sampled_from(values))


def posed(case):
    model, loss, place, value = case
    return MODELS[model][0], LOSSES[loss], poisoned(model, place, value)


@cache
def expected(of, case):
    """The plain loop of a case, of which each copy of a law draws the same ones."""
    f, loss, args = posed(case)
    return of(f, loss)(*args)


def shares_of_each(f, loss):
    return shares(f, of_each(loss))


class TestStatistics:
    @pytest.mark.parametrize("name", OF_SHARES)
    @given(case=cases())
    def test_of_the_shares(self, name, case):
        f, loss, args = posed(case)
        make, of = OF_SHARES[name]
        got, wanted = make(composed(f, of_each(loss)))(*args), of(expected(shares_of_each, case))
        assert_spoiled_alike(got, wanted)
        for x, y in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
            assert not (x.isfinite() & ~y.isfinite()).any()

    @pytest.mark.parametrize("name", OF_DIAGONALS)
    @given(case=cases(), found=st.booleans())
    def test_of_the_ggn(self, name, case, found):
        f, loss, args = posed(case)
        make, of = OF_DIAGONALS[name]
        forms = (composed(f, loss),) if found and loss is not general else (f, loss)
        assert_spoiled_alike(make(*forms)(*args), of(expected(squares, case)))

    @given(case=cases(values=(torch.nan,)))
    def test_of_the_hessian(self, case):
        f, loss, args = posed(case)
        each, wanted = invfunc.diag_hessian(f, loss, per_sample=True)(*args), bent(f, loss)(*args)
        of_sum = invfunc.diag_hessian(composed(f, loss))(*args)
        for name in wanted:
            assert not (each[name].isfinite() & ~wanted[name].isfinite()).any()  # columns that meet may spoil more
            assert not (of_sum[name].isfinite() & ~wanted[name].isfinite().all(0)).any()
            if case[2] != "parameter":
                assert each[name].isfinite().flatten(1).all(1).tolist() >= [n != BAD for n in range(N)]


# A batch of no samples, as Poisson sampling gives: sums are zeros, samples `[0, ...]`, and a mean stays an error

F_, PARAMS = functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())
X, Y = Numbers(2)(6, 4), Numbers(3).below(2, 6)
ZEROS = tree.map_leaves(torch.zeros_like, PARAMS)


def loss(reduction):
    return lambda p, x, y: F.cross_entropy(F_(p, x), y, reduction=reduction)


def generator():
    return torch.Generator().manual_seed(0)


STATISTICS = {
    "batch_grad": invfunc.batch_grad,
    "batch_l2_grad": invfunc.batch_l2_grad,
    "sum_grad_squared": invfunc.sum_grad_squared,
    "clipped_grad": lambda f: invfunc.clipped_grad(f, 1.0),
    "gram": invfunc.gram,
    "sketched_grad": lambda f: invfunc.sketched_grad(f, rows=2, columns=2, generator=generator()),
    "reduced": lambda f: reduced(invfunc.batch_grad(f), lambda g: g.sum(0)),
    "together": lambda f: together(invfunc.batch_grad(f), invfunc.clipped_grad(f, 1.0)),
}


def cut(result, n):
    """The result of n samples without them: axes of n become 0, and sums zeros."""
    return tree.map_leaves(lambda x: x.new_zeros([0 if d == n else d for d in x.shape]), result)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("of", STATISTICS)
class TestNoSamples:
    def test_are_those_of_some_without_these(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted = cut(t(PARAMS, X, Y), 6)
        assert_trees_close(t(PARAMS, X[:0], Y[:0]), wanted, 0)

    def test_in_all_modes(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted, args = t(PARAMS, X[:0], Y[:0]), (PARAMS, X[:0], Y[:0])
        modes = [compiled, *[lambda t: chunked(t, 2, over="params")] * ("params" in t.axes)]
        modes += [lambda t: chunked(t, chunk_size=2, over="samples")] * (of not in ("gram", "together"))
        for mode in modes:
            assert_trees_close(mode(t)(*args), wanted, 0)
        if reduction == "none" and of not in ("reduced", "gram"):
            loader = [args[1:], args[1:]]
            assert_trees_close(streamed(t)(PARAMS, loader), wanted, 0)


class TestAMeanOfNothing:
    @pytest.mark.parametrize("of", STATISTICS)
    def test_is_an_error(self, of):
        with pytest.raises(ArgumentError, match=r"x has no samples \(N = 0\), and the mean of no losses"):
            STATISTICS[of](loss("mean"))(PARAMS, X[:0], Y[:0])

    def test_as_is_a_variance(self):
        for of in (invfunc.variance, invfunc.grad_and_variance, invfunc.noise_scale):
            with pytest.raises(ArgumentError, match="0 sample"):
                of(loss("none"))(PARAMS, X[:0], Y[:0])

    def test_as_are_curvature_and_an_empty_loader(self):
        with pytest.raises(ArgumentError, match=r"no samples \(N = 0\)"):
            invfunc.diag_ggn(F_, F.cross_entropy)(PARAMS, X[:0], Y[:0])
        with pytest.raises(ArgumentError, match="the loader gave no samples"):
            streamed(invfunc.batch_grad(loss("none")))(PARAMS, [])


def test_a_step_of_private_training_goes_through_every_batch():
    t = invfunc.clipped_grad(loss("none"), 0.1, value=True)
    for n in (3, 0, 1):
        total, norms, value = t(PARAMS, X[:n], Y[:n])
        assert norms.shape == value.shape == (n,)
        assert_trees_close(total, total if n else ZEROS, 0)


# Tensors without entries have results without entries, or zeros; what holds no numbers, or no samples, is refused


def product(make, **options):
    return lambda f, loss: lambda params, *batch: make(f, loss, **options)(params, params, *batch)


def blocks(make):
    def of(f, loss):
        return lambda params, *batch: make(f, loss)(tree.map_leaves(lambda p: p, params), stacked(params), *batch)

    return of


def stacked(params):
    return tree.map_leaves(lambda p: p[None], params)


TRANSFORMS = {
    **{
        case: lambda f, loss, row=row, form=form: made_of(row, f, loss, form)
        for case, (row, form) in CASES.items()
        if not row.drawn and (form != LOSS or row.of_shares)
    },
    "chunked": lambda *f: invfunc.chunked(invfunc.diag_ggn(*f), 2),
    "hvp": product(invfunc.hvp),
    "ggnvp": product(invfunc.ggnvp),
    "ggnvp empirical": product(partial(invfunc.ggnvp, fisher="empirical")),
    "ggnvp of blocks": blocks(partial(invfunc.ggnvp, blocks=True)),
    "hvp of blocks": blocks(partial(invfunc.hvp, blocks=True)),
    "estimate_trace": lambda *f: invfunc.estimate_trace(invfunc.ggnvp(*f), probes=2, generator=seeded()),
    "estimate_diagonal": lambda *f: invfunc.estimate_diagonal(invfunc.hvp(*f), probes=2, generator=seeded()),
}
KNOWN = {
    "mse": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="sum"),
    "general": lambda z, y: (z - y).pow(4).sum(),
}


def f(params, x):
    return (x @ params["w"] + params["b"]).tanh() @ params["v"]


def arranged(steps=(), hidden=4, outputs=2):
    params = {"w": Numbers()(3, hidden), "b": Numbers(1)(hidden), "v": Numbers(2)(hidden, outputs)}
    return params, Numbers(3)(5, *steps, 3), Numbers(4)(5, *steps, outputs).sigmoid()


each = pytest.mark.parametrize("name", TRANSFORMS)


@each
@pytest.mark.parametrize("loss", KNOWN)
@pytest.mark.parametrize("shape", [{"outputs": 0}, {"steps": (0,)}, {"hidden": 0}], ids=str)
def test_no_entries_are_no_curvature(name, loss, shape):
    if "kfoc" in name and "hidden" in shape:
        pytest.skip("a layer without columns has no rank-one factors")
    args = arranged(**shape)
    found = TRANSFORMS[name](f, KNOWN[loss])(*args)
    factors = name in CASES and CASES[name][0].gives == FACTORS
    for leaf in [K.dense() for K in found.values()] if factors else tree.leaves(found):
        assert leaf.isfinite().all()
        assert "hidden" in shape or not leaf.any()


@each
@pytest.mark.parametrize("part", [0, 1, 2], ids=["params", "inputs", "target"])
def test_what_holds_no_numbers_is_refused(name, part):
    args = list(arranged())
    args[part] = tree.map_leaves(lambda x: x.to("meta"), args[part])
    if part == 2 and name.endswith(MODEL):
        return
    with pytest.raises(ArgumentError, match=r"a tensor of shape .* is on the meta device"):
        TRANSFORMS[name](f, KNOWN["mse"])(*args)


# float16 and bfloat16: sums, squares and probabilities are those of float32, however a parameter is read

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
READ = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T.contiguous().T,
    "computed": lambda w: w.exp(),  # at 0, where its derivative is 1
    "twice": lambda w: (w + w) / 2,
}
TINY = 2.0**-13
"""Its square is 0 in float16, that of the norm of thousands of them is not."""


@pytest.mark.parametrize("read", READ)
@HALF
class TestSquaresOfSmallShares:
    def of(self, statistic, read, dtype, n=3):
        def f(w, x):
            return (x @ READ[read](w)).sum(1)

        w, x = torch.zeros(256, 64, dtype=dtype), torch.full((n, 256), TINY, dtype=dtype)
        return statistic(f)(w, x)

    def test_make_norms(self, read, dtype):
        square = torch.tensor(256 * 64 * TINY**2)
        assert_trees_close(self.of(invfunc.batch_l2_grad, read, dtype), square.expand(3), 0.02)
        assert_trees_close(self.of(invfunc.gram, read, dtype), square.expand(3, 3), 0.02)

    def test_clip(self, read, dtype):
        found, norms = self.of(lambda f: invfunc.clipped_grad(f, 1e-3), read, dtype)
        assert_trees_close(norms, torch.full((3,), 128 * TINY), 0.02)
        assert_trees_close(found, torch.full((256, 64), 3 * 1e-3 / 128), 0.02)

    def test_make_a_trace(self, read, dtype):
        def trace(f):
            return invfunc.ggn_trace(lambda w, x: f(w, x)[:, None], lambda z, y: (z - y).square().sum() / 2)

        found = self.of(lambda f: lambda w, x: trace(f)(w, x, x[:, :1]), read, dtype)
        assert_trees_close(found, torch.tensor(3 * 256 * 64 * TINY**2), 0.02)


@HALF
@pytest.mark.parametrize("logit", [-8.0, -6.0, 6.0, 8.0])
def test_drawn_columns_of_rare_outcomes_average_to_the_hessian(dtype, logit):
    def f(b, x):
        return b + 0 * x

    args = torch.tensor([logit], dtype=dtype), torch.zeros(50, 1, dtype=dtype), torch.zeros(50, 1, dtype=dtype)
    p = torch.tensor(logit).double().sigmoid()
    generator = torch.Generator().manual_seed(0)
    found = invfunc.diag_ggn(f, F.binary_cross_entropy_with_logits, mc_samples=2000, generator=generator)(*args)
    assert_trees_close(found, (p * (1 - p)).reshape(1), 0.5)


@HALF
@pytest.mark.parametrize("between", [torch.tanh, lambda h: h.softmax(-1)], ids=["elementwise", "general"])
def test_a_chain_is_that_of_float32(dtype, between):
    """KFRA of rounded numbers is that of these numbers in float32, up to the rounding of its pullbacks."""

    def f(p, x, y):
        return F.cross_entropy(between(x @ p["w"]) @ p["v"], y)

    params, x, y = {"w": Numbers()(4, 5), "v": Numbers(1)(5, 3)}, Numbers(2)(6, 4), Numbers(3).below(3, 6)
    low = tree.map_tensors(lambda z: z.to(dtype), (params, x))
    found, wanted = (kfra(f)(*of, y) for of in (low, tree.map_tensors(lambda z: z.float(), low)))
    for name, block in found.items():
        assert all(x.dtype == dtype for x in block.factors)
        assert_trees_close([x.float() for x in block.factors], [*wanted[name].factors], 0.03)
