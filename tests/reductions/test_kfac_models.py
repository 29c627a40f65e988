"""K-factors of all parameters of whole models: what is looked up, read in groups, in two roles, or a single vector."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import ekfac, ggn_trace, kfac
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, dense_ggn, peak_memory
from tests.core.programs import MODULES, of_module
from tests.crossed import GATES_OF_PATCHES, sides, thresholds_at
from tests.laws import composed
from tests.reductions.test_kfac import SHARINGS, matrices
from tests.rows import in_blocks
from tests.strategies import Numbers, seeded

EXACT, FLOOR = 1e-9, 1e-6
sharings = pytest.mark.parametrize("sharing", SHARINGS)


class TestModels:
    @pytest.mark.parametrize("called", MODULES)
    @pytest.mark.parametrize("n", [1, 3])
    @sharings
    def test_have_factors_of_every_parameter(self, called, n, sharing):
        """In one call, and the eigenbasis sees all of the block of each: the traces are equal."""
        f, *args = of_module(called, n)
        loss = F.cross_entropy
        wanted = ggn_trace(f, loss, per_parameter=True)(*args)
        found = ekfac(f, loss, fisher="exact", weight_sharing=sharing)(*args)
        assert_trees_close({name: k.trace() for name, k in found.items()}, wanted, EXACT, FLOOR)
        exact, drawn = (
            make(f, loss, weight_sharing=sharing)(*args)
            for make in (partial(kfac, fisher="exact"), partial(kfac, generator=seeded(), mc_samples=2))
        )
        blocks = in_blocks(kfac(f, loss, weight_sharing=sharing, fisher="exact"))(*args)
        assert_trees_close(blocks, exact, EXACT, FLOOR)
        assert_trees_close(kfac(composed(f, loss), weight_sharing=sharing, fisher="exact")(*args), exact, EXACT, FLOOR)
        for name, k in (exact | drawn).items():
            v = torch.ones_like(args[0][name])
            assert_trees_close(k.solve(k @ v + 0.1 * v, 0.1), v, 1e-6)
            assert (torch.linalg.eigvalsh(k.dense()) > -1e-9).all()


PICKS = {
    "all": lambda p: p[:3],
    "some": lambda p: p[1:4],
    "an index": lambda p: p[torch.tensor([3, 0, 3])],
    "embedding": lambda p: F.embedding(torch.tensor([4, 4, 1]), p),
    "index_select": lambda p: p.index_select(0, torch.tensor([0, 2, 2])),
    "flipped": lambda p: p.flip(0)[:3],
    "one for all": lambda p: p[2:3].expand(3, -1),
    "repeated for each sample": lambda p: p[None, :3].expand(2, -1, -1),
}
ONE_HOT = {
    "all": [0, 1, 2], "some": [1, 2, 3], "an index": [3, 0, 3], "embedding": [4, 4, 1],
    "index_select": [0, 2, 2], "flipped": [4, 3, 2], "one for all": [2, 2, 2],
    "repeated for each sample": [0, 1, 2],
}  # fmt: skip


class TestLookups:
    @sharings
    @pytest.mark.parametrize("called", PICKS)
    def test_what_is_added_is_a_product_with_unit_vectors(self, called, sharing):
        rows = torch.tensor(ONE_HOT[called]).expand(2, 3)
        units = F.one_hot(rows, 5)

        def tail(p, h):
            return (h + p["b"]).tanh().flatten(1) @ p["w"]

        def added(p, x):
            return tail(p, x @ p["v"] + PICKS[called](p["p"]))

        def multiplied(p, x, units):
            return tail(p, x @ p["v"] + units @ p["p"])

        shapes = {"p": (5, 2), "v": (3, 2), "b": (2,), "w": (6, 2)}
        params = {name: Numbers(i)(*shape) for i, (name, shape) in enumerate(shapes.items())}
        x, y = Numbers(7)(2, 3, 3), Numbers(8)(2, 2)
        found = kfac(added, F.mse_loss, weight_sharing=sharing, fisher="exact")(params, x, y)
        wanted = kfac(multiplied, F.mse_loss, weight_sharing=sharing, fisher="exact")(params, x, units.to(x), y)
        assert {name: k.groups for name, k in found.items()} == {name: k.groups for name, k in wanted.items()}
        for name, k in found.items():
            assert_trees_close(matrices(k), matrices(wanted[name]), EXACT)
        assert (found["p"].factors[0].ndim == 1) == (sharing != "reduce")

    @pytest.mark.parametrize("read", [torch.add, torch.mul, lambda x, p: F.layer_norm(x, p.shape, p)])
    def test_never_have_a_matrix_over_all_entries(self, read):
        t, d = 150, 40

        def f(p, x):
            return read(x, p).sin().mean((1, 2)).unsqueeze(1)

        args = torch.ones(t, d), Numbers(1)(2, t, d).float(), torch.zeros(2, 1)
        for make in (partial(kfac, fisher="exact"), partial(ekfac, fisher="exact")):
            _, peak = peak_memory(lambda make=make: make(f, F.mse_loss)(*args))
            assert peak < 40 * 2**20 < 4 * (t * d) ** 2
            assert make(f, F.mse_loss)(*args).factors[0].shape == (t,)


@st.composite
def grouped(draw):
    """A convolution in groups, the same as convolutions of the groups, the weight, perhaps a bias, and an input."""
    d, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(2, 3)), draw(st.booleans())
    i, o, kernel = draw(st.integers(1, 2)), draw(st.integers(1, 2)), [draw(st.integers(1, 2))] * d
    options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1))}
    call = getattr(F, f"conv{'_transpose' * transposed}{d}d")
    rand = Numbers(draw(st.integers(0, 5)))
    weight = rand(groups * i, o, *kernel) if transposed else rand(groups * o, i, *kernel)
    bias = {"b": rand(groups * o)} if draw(st.booleans()) else {}
    x = rand(draw(st.integers(1, 3)), groups * i, *[3] * d)

    def whole(p, x):
        return call(x, p["w"], p.get("b"), groups=groups, **options).tanh().flatten(1) @ p["v"]

    def apart(p, x):
        each = zip(x.chunk(groups, 1), p["w"], p.get("b", [None] * groups), strict=True)
        return torch.cat([call(x, w, b, **options) for x, w, b in each], 1).tanh().flatten(1) @ p["v"]

    v = rand(call(x, weight, groups=groups, **options)[0].numel(), 2)
    return whole, apart, {"w": weight, "v": v, **bias}, x, rand(len(x), 2), groups


class TestGroups:
    @settings(max_examples=12)
    @given(case=grouped(), sharing=st.sampled_from(SHARINGS), joint=st.booleans(), gates=sides(*GATES_OF_PATCHES))
    def test_have_the_factors_of_convolutions_of_their_own(self, case, sharing, joint, gates):
        """Also those with one input channel and kernels of one entry, which might be taken for a scale; and where one
        group would be read by its displacements."""
        whole, apart, params, x, y, groups = case
        of = {name: p if name == "v" else list(p.chunk(groups)) for name, p in params.items()}
        options = {"weight_sharing": sharing, "joint": joint}
        for make in (partial(kfac, fisher="exact"), partial(kfac, fisher="empirical")):
            with thresholds_at(**gates):
                found = make(whole, F.mse_loss, **options)(params, x, y)
            wanted = make(apart, F.mse_loss, **options)(of, x, y)
            assert_trees_close(found["w"].dense(), torch.block_diag(*(k.dense() for k in wanted["w"])), EXACT, FLOOR)
            assert found["w"].groups[0][0] == 0
            if "b" in params and not joint:  # its factor is of all channels
                for at, k in zip(torch.arange(len(params["b"])).chunk(groups), wanted["b"], strict=True):
                    assert_trees_close(found["b"].dense()[at][:, at], k.dense(), EXACT, FLOOR)
        found = ekfac(whole, F.mse_loss, fisher="exact", weight_sharing=sharing)(params, x, y)["w"]
        block = dense_ggn(whole, F.mse_loss)(params, x, y)["w"]
        assert_trees_close(found.trace(), block.trace(), EXACT)


ROLES = {
    "an embedding as the head": (
        lambda p, q, i: F.linear(F.embedding(i, p).tanh(), q),
        lambda rand, n: rand.below(4, n, 3),
        lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
        lambda rand, n: rand.below(4, n, 3),
    ),
    "an auto-encoder's weight": (
        lambda p, q, x: (x @ p).tanh() @ q.T,
        lambda rand, n: rand(n, 4),
        F.mse_loss,
        lambda rand, n: rand(n, 4),
    ),
}


def product_at(matrix, rows):
    """The entries of `kron(A, B)` as those of `vec(A) vec(B)^T`."""
    columns = len(matrix) // rows
    return matrix.reshape(rows, columns, rows, columns).transpose(1, 2).reshape(rows**2, columns**2)


class TestRoles:
    @pytest.mark.parametrize("called", ROLES)
    @pytest.mark.parametrize("n", [1, 3])
    @sharings
    def test_have_the_product_that_is_nearest_to_the_sum(self, called, n, sharing):
        f, inputs, loss, target = ROLES[called]
        w, args = Numbers(2)(4, 2), (inputs(Numbers(3), n), target(Numbers(4), n))
        found = kfac(lambda p, x: f(p, p, x), loss, weight_sharing=sharing, fisher="exact")(w, *args)
        apart = kfac(lambda p, x: f(p[0], p[1], x), loss, weight_sharing=sharing, fisher="exact")([w, w], *args)
        total = product_at(sum(k.dense() for k in apart), 4)
        u, s, v = torch.linalg.svd(total)
        assert_trees_close(product_at(found.dense(), 4), s[0] * u[:, :1] @ v[:1], 1e-7)
        for factor in matrices(found):
            assert torch.linalg.eigvalsh(factor).min() > -1e-9


# K-factors of samples with different numbers of positions, some perhaps with none, against their definition

EXACT_LENGTHS, READ, K = 1e-10, 2, 3
PICK = {
    "a mask": lambda x, there: x[there],
    "indices": lambda x, there: x[there.nonzero(as_tuple=True)],
    "a flat list": lambda x, there: x.flatten(0, 1)[there.flatten().nonzero()[:, 0]],
}
APPLY = {
    "linear": lambda p, rows: F.linear(rows, p["w"], p["b"]),
    "product": lambda p, rows: F.linear(rows, p["w"]) + p["b"],
    "column": lambda p, rows: F.linear(F.pad(rows, (0, 1), value=1.0), p["wb"]),
}
"""A layer; in the last, its bias is a column of its weight."""


def model(pick, layer):
    """The sum, for each sample, of what a layer makes of its positions."""

    def f(p, x, there):
        rows, owner = PICK[pick](x, there), there.nonzero()[:, 0]
        return x.new_zeros(len(x), K).index_add(0, owner, APPLY[layer](p, rows).tanh())

    return f


def looped(w, b, x, there, sharing):
    """`B (x) A` of the weight and of the weight with its bias, sample by sample."""
    n, samples = len(x), [a[own] for a, own in zip(x, there, strict=True)]
    B, A, with_positions = x.new_zeros(K, K), x.new_zeros(READ + 1, READ + 1), 0
    for a in samples:
        if not len(a):
            continue
        sent = (2 / (n * K)) ** 0.5 * torch.diag_embed(1 - F.linear(a, w, b).tanh().square())  # [R, V, K]
        read = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        with_positions += 1
        B += (sent.mT @ sent).sum(0) if sharing == "expand" else sent.sum(0).T @ sent.sum(0)
        A += torch.outer(read.mean(0), read.mean(0)) if sharing == "reduce" else read.T @ read
    A /= {"expand": there.sum(), "reduce": with_positions, "backpack": n}[sharing]
    return (B, A[:-1, :-1]), (B, A)


@pytest.mark.parametrize("pick", PICK)
@pytest.mark.parametrize("sharing", SHARINGS)
@given(lengths=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(lambda found: sum(map(bool, found)) > 1))
def test_are_of_the_positions_that_are_there(pick, sharing, lengths):
    """Also those of a bias that is one more input, which is 1 where there is a position. Other numbers of positions for
    each sample have no factors where positions are summed first, or with a bias."""
    rand, steps = Numbers(), max(lengths)
    x, y, w, b = rand(len(lengths), steps, READ), rand(len(lengths), K), rand(K, READ), rand(K)
    there = torch.arange(steps) < torch.tensor(lengths)[:, None]
    apart, joint = looped(w, b, x, there, sharing)
    for layer in APPLY:
        p = {"wb": torch.cat([w, b[:, None]], 1)} if layer == "column" else {"w": w, "b": b}
        for together in (False, True):
            wanted = joint if layer == "column" or (together and layer == "linear") else apart
            t = kfac(model(pick, layer), F.mse_loss, weight_sharing=sharing, joint=together, fisher="exact")
            for of in (t, in_blocks(t)):
                try:
                    found = of(p, x, there, y)
                except ArgumentError as error:
                    assert len({*lengths}) > 1 and (sharing != "expand" or together)
                    assert "samples have different numbers of rows" in str(error) or "picked or permuted" in str(error)
                    continue
                assert_trees_close(found["wb" if layer == "column" else "w"].factors, wanted, EXACT_LENGTHS, FLOOR)
